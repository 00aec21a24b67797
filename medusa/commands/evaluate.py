"""Measure how often the token that the backbone generates is among each head's best guesses.

  medusa evaluate demo --data demo
  medusa evaluate --backbone org/model --drafter mtp:3 --data demo

The backbone first continues every prompt greedily. It continues a document after the document's first 16 tokens, and a
conversation after the first question. The heads' guesses are compared with the generated text, not with the text of the
file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice

from decode.settings import Settings
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, ModelsWithHeads, warn_of_copies
from medusa.errors import RequestError, RunError
from medusa.options import REQUIRED, Options, count, group, option
from medusa.records.record import naming
from medusa.records.sources import DOCUMENT_SEPARATOR, read_records, require_records, require_splits
from medusa.tables import print_table

OPENING = 16  # number of tokens of a document that the backbone continues


class DataOptions(Options):
    data: str = option(
        REQUIRED,
        "read a .jsonl, .json, .txt or .parquet file, a folder, a Hub dataset, or demo (shipped)",
        metavar="D",
        brief="read records from a file, a folder or a Hub dataset",
        exists=require_records,
    )
    max_prompts: int = count(100, "read only the first N records")
    split: str = option("train", "read this split of a Hub dataset", metavar="NAME")
    document_separator: str = option(DOCUMENT_SEPARATOR, "split .txt files into documents at this line", metavar="LINE")

    def check_given(self, names: Sequence[str]) -> None:
        if "split" in names:
            require_splits(self.data)


EVALUATED = ("max_new_tokens", "ignore_generation_config")  # of the settings


class EvaluateOptions(CommandOptions):
    shown = "heads data max-prompts max-new-tokens split drafter backbone device dtype threads json quiet"
    models: ModelsWithHeads = group(ModelsWithHeads, "models", without=("tree",))
    settings: Settings = group(Settings, "generation (greedy)", only=EVALUATED, max_new_tokens=128)
    batch_size: int = 1
    contrasting: Contrasting = NO_CONTRAST
    data: DataOptions = group(DataOptions, "data")


def require_positions(max_new_tokens: int, num_heads: int) -> None:
    """Raise a RequestError if texts of `max_new_tokens` tokens are too short for one position where all heads guess."""
    if max_new_tokens <= num_heads:
        least = f"{num_heads} heads need at least {num_heads + 1}"
        raise RequestError(f"--max-new-tokens is {max_new_tokens}, and {least}; give a larger number")


def run(options: EvaluateOptions) -> None:
    from decode.request import require_fitting
    from decode.texts import TextGenerator
    from medusa.backbone import Backbone
    from medusa.commands.models import Opened
    from train.evaluate import OwnText, head_accuracy

    data, output = options.data, options.output
    found = read_records(data.data, split=data.split, separator=data.document_separator)
    records = list(islice(found, data.max_prompts))
    opened = Opened(options, [options.models.drafter])
    loaded, heads = opened.loaded, opened.heads_of(opened.configs[0])
    assert heads is not None  # the drafter is `heads` or `mtp`
    backbone = Backbone(loaded.model, heads.config.feature_layers)
    require_positions(options.settings.max_new_tokens, heads.config.num_heads)
    encoded = opened.encode([record.opening() for record in records])
    prompts = [ids[:OPENING] if record.is_document else ids for record, ids in zip(records, encoded, strict=True)]
    for record, prompt in zip(records, prompts, strict=True):
        with naming(record.where):
            require_fitting([prompt], backbone)
    warn_of_copies(prompts, options.settings)
    write, texts = TextGenerator(loaded.model, options.settings, loaded.tokenizer), []
    for prompt in output.track(prompts, "generating"):
        result = write([prompt])[0]
        texts.append(OwnText(result.input_ids + result.new_ids, len(result.input_ids)))
    accuracy = head_accuracy(backbone, heads, texts)
    if not accuracy.tokens:
        raise RunError(
            f"there are no positions to evaluate in {len(prompts)} texts, because the backbone ended every text at "
            "once; give other --data, or a larger --max-new-tokens"
        )
    rows = []
    for head in accuracy.heads:
        shares = [*head.top.values(), head.conditional_top1]
        rows.append([str(head.head), *(f"{share:.3f}" for share in shares)])
    print_table(
        output.console,
        ("head", "top 1", "top 5", "top 10", "top 1 if earlier are right"),
        rows,
        f"Share of right guesses at {accuracy.tokens} positions of the backbone's greedy texts",
    )
    output.write(asdict(accuracy))
