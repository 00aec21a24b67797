"""Measure how often each head's best guesses hold the backbone's own token.

  medusa evaluate --backbone demo --heads demo --data prompts.jsonl

The backbone first continues the start of every record greedily. Heads are compared with that text, not with the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode.settings import Settings
from medusa.commands.arguments import group
from medusa.commands.options import LOADING, Models, Output, RuntimeOptions, read_prompts
from medusa.options import REQUIRED, LoadOptions, Options, count, option
from medusa.records.sources import DOCUMENT_SEPARATOR

if TYPE_CHECKING:
    from rich.table import Table

    from train.evaluate import Accuracy

OPENING = 16  # tokens of a text that serve as its prompt


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Which records to read."""

    data: str = option(REQUIRED, "read records from this file, folder or Hub dataset, as --prompts does", metavar="D")
    max_prompts: int = count(100, "read only the first N records")
    split: str = option("train", "read this split of a Hub dataset", metavar="NAME")
    document_separator: str = option(DOCUMENT_SEPARATOR, "split a .txt file at this line", metavar="LINE")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options):
    """Options of `medusa evaluate`."""

    models: Models = group(Models, "models", only=("backbone", "heads"), heads=REQUIRED)
    load: LoadOptions = LOADING
    data: DataOptions = group(DataOptions, "data")
    settings: Settings = group(Settings, "generation (greedy)", only=("max_new_tokens",), max_new_tokens=128)
    runtime: RuntimeOptions = group(RuntimeOptions, "runtime")
    output: Output = group(Output, "output")


def run(options: EvaluateOptions) -> None:
    from rich.progress import track

    from decode.bench.methods import plain_method
    from decode.request import require_fitting
    from medusa.backbone import Backbone
    from medusa.commands import models
    from medusa.loading import load_backbone
    from medusa.records.record import prompt_ids
    from train.evaluate import OwnText, head_accuracy

    data, output = options.data, options.output
    records = read_prompts(data.data, data.split, data.max_prompts, data.document_separator)
    models.check_models(options.models, options.load)
    options.runtime.prepare()
    loaded = load_backbone(options.models.backbone, options.load)
    backbone, heads = Backbone(loaded.model), models.open_heads(str(options.models.heads), loaded)
    prompts = []
    for record in records:
        ids = prompt_ids(record, loaded.tokenizer)
        prompts.append(ids if record.is_prompt or record.prompt_tokens else ids[:OPENING])
    require_fitting(prompts, backbone)
    method, texts = plain_method(loaded.model, options.settings, loaded.tokenizer), []
    for prompt in track(prompts, "generating", console=output.progress, disable=output.quiet):
        result = method([prompt])[0]
        texts.append(OwnText(result.input_ids + result.new_ids, len(result.input_ids)))
    accuracy = head_accuracy(backbone, heads, texts)
    output.console.print(_table(accuracy))
    output.write(accuracy.to_dict())


def _table(accuracy: Accuracy) -> Table:
    from rich.table import Table

    table = Table(title=f"right guesses at {accuracy.tokens} positions of the backbone's own greedy text")
    for name in ("head", "top 1", "top 5", "top 10", "top 1 if all earlier heads are right"):
        table.add_column(name, justify="right")
    for head in accuracy.heads:
        shares = [*head.top.values(), head.conditional_top1]
        table.add_row(str(head.head), *(f"{share:.3f}" for share in shares))
    return table
