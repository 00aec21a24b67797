"""A reader that turns records (`medusa.records`) into training examples, and drops records that cannot be used."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice

from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from medusa.records.record import Record, prompt_ids
from medusa.records.sources import read_records
from train.config import DataConfig
from train.data.chat import conversation
from train.data.packing import DataCounts, Example


class ExampleReader:
    """Reads the records of a dataset in order, and turns them into training examples."""

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, context: int | None
    ) -> None:
        """Make a reader of the data that `config` describes, in which token ids must be below `vocab_size`.

        Training rows have at most `context` tokens, the context length of the backbone (`None`: no such limit)."""
        self.config, self.tokenizer, self.vocab_size = config, tokenizer, vocab_size
        self.row_length = min(config.sequence_length, context or config.sequence_length)
        self.whole = config.long_documents != "split"  # whether each document stays in one row
        self.excluded = excluded_windows(config, tokenizer)

    def read(self, counts: DataCounts) -> Iterator[Example]:
        """Yield the examples of one pass over the data, and count dropped records and long documents in `counts`.

        Raise RequestError if a record cannot be read, or if its token ids are those of another tokenizer."""
        for record in islice(records_of(self.config, self.config.path), self.config.max_examples):
            example = to_example(record, self.tokenizer)
            if max(example.input_ids, default=0) >= self.vocab_size:
                beyond = f"id {max(example.input_ids)} is beyond the backbone's vocabulary of {self.vocab_size}"
                raise RequestError(f"{record.where}: the {beyond}; these are another tokenizer's ids")
            too_long = len(example.input_ids) > self.row_length
            reason = self._reason_to_drop(record, example, too_long)
            if too_long and self.config.long_documents == "truncate":
                ids, mask = example.input_ids[: self.row_length], example.loss_mask[: self.row_length]
                example = Example(ids, mask, record.where)
                reason = reason or (None if example.has_labels else "with nothing taught within a row")
            if reason:
                counts.drop(reason, record.where)
                continue
            counts.cut += too_long
            counts.add_prompt(record.raw_prompt)
            yield example

    def _reason_to_drop(self, record: Record, example: Example, too_long: bool) -> str | None:
        if record.text is not None and not record.text.strip():
            return "empty"
        if record.messages is not None and not any(message["role"] == "assistant" for message in record.messages):
            return "without an assistant turn"
        if not example.has_labels:
            return "with nothing to teach"
        if self.excluded and not self.excluded.isdisjoint(_windows(example.input_ids, self.config.exclude_window)):
            return "shared with the excluded text"
        return "longer than a row" if too_long and self.config.long_documents == "drop" else None


def records_of(config: DataConfig, source: str) -> Iterator[Record]:
    """Read the records of the file, folder or Hub dataset `source`, with the reading options in `config`."""
    return read_records(source, split=config.split, subset=config.subset, separator=config.document_separator)


def to_example(record: Record, tokenizer: PreTrainedTokenizerBase | None) -> Example:
    """Turn a record into a training example: token ids, and which of them count in the loss.

    Of a text, all tokens count in the loss; of a conversation, those of the assistant's turns; of a prompt with a
    continuation in token ids, those of the continuation. Raise RequestError if the record is text but there is no
    tokenizer, or if the assistant's turns cannot be found."""
    if record.input_ids is not None:
        loss_mask = [position >= record.prompt_tokens for position in range(len(record.input_ids))]
        return Example(record.input_ids, loss_mask, record.where)
    if tokenizer is None:
        raise RequestError(f"{record.where}: the backbone has no tokenizer; give input_ids")
    if record.messages is not None:
        return Example(*conversation(record, tokenizer), record.where)
    begin, end = ([] if token is None else [token] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    ids = begin + tokenizer(record.text or "", add_special_tokens=False)["input_ids"] + end
    return Example(ids, [True] * len(ids), record.where)


def excluded_windows(config: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> set[tuple[int, ...]]:
    """Collect every run of `config.exclude_window` tokens in the texts of the file or dataset `config.exclude`.

    The reader drops every training example that contains such a run."""
    windows: set[tuple[int, ...]] = set()
    for record in records_of(config, config.exclude) if config.exclude else ():
        ids = prompt_ids(record, tokenizer, raw=True) if record.is_prompt else to_example(record, tokenizer).input_ids
        if len(ids) < config.exclude_window:
            short = f"a text in {config.exclude} is shorter than exclude_window; it excludes nothing"
            warnings.warn(short, stacklevel=2)
        windows.update(_windows(ids, config.exclude_window))
    return windows


def _windows(ids: list[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[start : start + size]) for start in range(len(ids) - size + 1))
