"""Measure how often the token that the backbone generates is among each head's best guesses.

  medusa evaluate demo --data demo

The backbone first continues every prompt greedily. Of a document or a conversation, it continues the first 16 tokens.
The heads' guesses are compared with the generated text, not with the text of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice

from rich.table import Table

from decode.settings import Settings
from medusa.commands.effects import require_splits
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models
from medusa.options import REQUIRED, Options, count, group, option
from medusa.records.record import prompt_ids
from medusa.records.sources import DOCUMENT_SEPARATOR, read_records

OPENING = 16  # number of tokens that the backbone continues, of a record that is not a prompt


class DataOptions(Options):
    data: str = option(
        REQUIRED,
        "read a .jsonl, .json, .txt or .parquet file, a folder, a Hub dataset, or demo (shipped)",
        metavar="D",
        brief="read records from a file, a folder or a Hub dataset",
    )
    max_prompts: int = count(100, "read only the first N records")
    split: str = option("train", "read this split of a Hub dataset", metavar="NAME")
    document_separator: str = option(DOCUMENT_SEPARATOR, "split .txt files into documents at this line", metavar="LINE")

    def check_given(self, names: Sequence[str]) -> None:
        if "split" in names:
            require_splits(self.data)


class EvaluateOptions(CommandOptions):
    shown = "heads data max-prompts max-new-tokens split backbone device dtype threads json quiet"
    models: Models = group(Models, "models", only=("backbone", "heads"), heads=REQUIRED)
    settings: Settings = group(Settings, "generation (greedy)", only=("max_new_tokens",), max_new_tokens=128)
    batch_size: int = 1
    contrasting: Contrasting = NO_CONTRAST
    data: DataOptions = group(DataOptions, "data")


def run(options: EvaluateOptions) -> None:
    from decode.bench.methods import plain_method
    from decode.request import require_fitting
    from medusa.backbone import Backbone
    from medusa.commands import models
    from medusa.loading import load_backbone
    from train.evaluate import OwnText, head_accuracy

    data, output = options.data, options.output
    found = read_records(data.data, split=data.split, separator=data.document_separator)
    records = list(islice(found, data.max_prompts))
    models.check_models(options)
    options.runtime.prepare()
    loaded = load_backbone(options.models.backbone, options.load)
    backbone, heads = Backbone(loaded.model), models.open_heads(str(options.models.heads), loaded)
    prompts = []
    for record in records:
        ids = prompt_ids(record, loaded.tokenizer)
        prompts.append(ids if record.is_prompt or record.prompt_tokens else ids[:OPENING])
    require_fitting(prompts, backbone)
    method, texts = plain_method(loaded.model, options.settings, loaded.tokenizer), []
    for prompt in output.track(prompts, "generating"):
        result = method([prompt])[0]
        texts.append(OwnText(result.input_ids + result.new_ids, len(result.input_ids)))
    accuracy = head_accuracy(backbone, heads, texts)
    table = Table(title=f"Share of right guesses at {accuracy.tokens} positions of the backbone's greedy texts")
    for name in ("head", "top 1", "top 5", "top 10", "top 1 if all earlier heads are right"):
        table.add_column(name, justify="right")
    for head in accuracy.heads:
        shares = [*head.top.values(), head.conditional_top1]
        table.add_row(str(head.head), *(f"{share:.3f}" for share in shares))
    output.console.print(table)
    output.write(asdict(accuracy))
