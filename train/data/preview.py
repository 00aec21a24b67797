"""A preview of the training data: a few examples, with their tokens that count in the loss marked, and statistics."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from itertools import chain, groupby, islice

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from medusa.loading import load_config, load_tokenizer, text_limits
from medusa.options import LoadOptions
from train.config import TrainConfig
from train.data.datasets import require_data, require_template_options
from train.data.packing import DataCounts, Example, pack
from train.data.reader import ExampleReader

TAUGHT = "bold green"
BRACKETS = "⟦", "⟧"  # around tokens that count in the loss, on a console without colours


@dataclass
class Preview:
    """The first examples of the training data, and statistics of all data (`whole`) or, for a stream, of these."""

    examples: list[Example]
    counts: DataCounts
    tokenizer: PreTrainedTokenizerBase | None
    whole: bool  # whether the counts cover all data; false for a stream

    def to_dict(self) -> dict[str, object]:
        """The preview as a JSON object."""
        shown = [
            {"where": e.where, "input_ids": e.input_ids, "taught": [int(mark) for mark in e.loss_mask]}
            for e in self.examples
        ]
        return {"counts": asdict(self.counts), "examples": shown}


def preview(config: TrainConfig, count: int) -> Preview:
    """Read all data as a training run would, and return the first `count` examples with statistics of all data.

    Of a stream, only these examples are read. Raise RequestError if the data cannot be used for training."""
    require_data(config.data)
    require_template_options(config)
    options = LoadOptions(revision=config.revision, trust_remote_code=config.trust_remote_code)
    tokenizer, limits = load_tokenizer(config.backbone, options), text_limits(load_config(config.backbone, options))
    reader, counts = ExampleReader(config.data, tokenizer, limits.vocab_size, limits.context), DataCounts()
    examples = reader.read(counts)
    shown = list(islice(examples, count))
    read = shown if config.data.streaming else chain(shown, examples)
    deque(pack(read, reader.row_length, reader.whole, counts), maxlen=0)
    return Preview(shown, counts, tokenizer, whole=not config.data.streaming)


def show(found: Preview, console: Console, ids: bool = False) -> None:
    """Print a preview; with `ids`, also each token's position and id."""
    for number, example in enumerate(found.examples, 1):
        about = f"{len(example.input_ids)} tokens, {sum(example.loss_mask)} taught"
        console.print(Text(f"{number}  {example.where}  {about}", style="bold cyan"), soft_wrap=True)
        console.print(marked(example, found.tokenizer, coloured=console.color_system is not None), soft_wrap=True)
        for position, (token, taught) in enumerate(zip(example.input_ids, example.loss_mask, strict=True)):
            if ids:
                spelled = "" if found.tokenizer is None else repr(found.tokenizer.decode([token]))
                line = f"{position:>6} {token:>7} {'taught' if taught else '      '} {spelled}".rstrip()
                console.print(Text(line, style=TAUGHT if taught else ""), soft_wrap=True)
        console.print()
    of = "all data" if found.whole else f"the first {len(found.examples)} examples of a stream"
    console.print(Text(f"{of}: {found.counts}"), soft_wrap=True)


def marked(example: Example, tokenizer: PreTrainedTokenizerBase | None, coloured: bool) -> Text:
    """Return the text of an example in which the tokens that count in the loss are coloured or in brackets."""
    out, before, end = Text(), "", 0
    for taught, run in groupby(example.loss_mask):
        end += len(list(run))
        ids = example.input_ids[:end]
        # A part decoded alone may lose its leading space. So the text up to the part's end is decoded, and then cut.
        text = "".join(f"{token} " for token in ids) if tokenizer is None else str(tokenizer.decode(ids))
        piece = text[len(before) :]
        out.append(piece.join(BRACKETS) if taught and not coloured else piece, TAUGHT if taught and coloured else None)
        before = text
    return out
