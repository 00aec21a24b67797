"""A reader that turns records (`medusa.records`) into training examples, and drops records that cannot be used."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from medusa.records.record import Record, continuation_ids, conversation_text, prompt_ids, text_ids, tokens_of
from medusa.records.sources import read_records
from train.config import DataConfig
from train.data.chat import LeftOutError, conversation
from train.data.packing import DataCounts, Example


class ExampleReader:
    """Reads the records of a dataset in order, and turns them into training examples."""

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, context: int | None
    ) -> None:
        """Make a reader; token ids must be below `vocab_size`, and rows have at most `context` tokens (`None`: any)."""
        self.config, self.tokenizer, self.vocab_size = config, tokenizer, vocab_size
        self.row_length = min(config.sequence_length, context or config.sequence_length)
        self.whole = config.long_documents != "split"  # whether each document stays in one row
        self.excluded = excluded_windows(config, tokenizer)

    def read(self, counts: DataCounts) -> Iterator[Example]:
        """Yield the examples of one pass over the data, and count dropped records and long documents in `counts`.

        Raise RequestError if a record cannot be read, or if its token ids are those of another tokenizer."""
        for record in islice(records_of(self.config, self.config.path), self.config.max_examples):
            asks_only = record.is_prompt or 0 < record.first_taught == len(record.messages or ())
            if asks_only and not record.is_answered:
                raise RequestError(
                    f"{record.where}: a prompt without an answer as text; heads learn from answers; write some with "
                    "medusa distill --prompts FILE, or give whole documents as text"
                )
            found, left_out = to_examples(record, self.tokenizer, self.config.template_options, self.config.raw)
            for error in left_out:
                counts.drop(error.reason, record.where, str(error))
            if not found and not left_out:
                counts.drop("without an assistant turn", record.where)
            for example in found:
                if (kept := self._kept(record, example, counts)) is not None:
                    yield kept

    def _kept(self, record: Record, example: Example, counts: DataCounts) -> Example | None:
        """Return the part of an example that fits in a row; `None` if it is dropped."""
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
            return None
        counts.cut += too_long
        raw, options = self._raw(record), self.config.template_options | record.template_options
        is_known = bool(options) or raw is False or record.messages is not None
        counts.add_prompt(raw, options if is_known else None)
        return example

    def _raw(self, record: Record) -> bool | None:
        """Whether the prompt of a record is plain text; `None` if it is not known or the record has none."""
        if record.is_prompt:
            return self.config.raw or self.tokenizer is None or self.tokenizer.chat_template is None
        return record.raw_prompt

    def _reason_to_drop(self, record: Record, example: Example, too_long: bool) -> str | None:
        if record.text is not None and not record.text.strip():
            return "empty"
        if not example.has_labels:
            return "with nothing to teach"
        if self.excluded and not self.excluded.isdisjoint(_windows(example.input_ids, self.config.exclude_window)):
            return "shared with the excluded text"
        return "longer than a row" if too_long and self.config.long_documents == "drop" else None


def records_of(config: DataConfig, source: str) -> Iterator[Record]:
    return read_records(source, split=config.split, subset=config.subset, separator=config.document_separator)


def to_examples(
    record: Record,
    tokenizer: PreTrainedTokenizerBase | None,
    options: Mapping[str, Any] | None = None,
    raw: bool = False,
) -> tuple[list[Example], list[LeftOutError]]:
    """Turn a record into training examples: token ids, and which of them count in the loss.

    Of a text, all tokens count in the loss; of a conversation, what the assistant wrote; of a prompt with an answer,
    the answer. With `raw`, or without a chat template, a prompt is plain text; `options` are those of the template.
    Return also the answers of a conversation that are left out. Raise RequestError if the record is text but there is
    no tokenizer, or if the template rejects the conversation."""
    if record.input_ids is not None:
        loss_mask = [position >= record.prompt_tokens for position in range(len(record.input_ids))]
        return [Example(record.input_ids, loss_mask, record.where)], []
    if tokenizer is None:
        raise RequestError(f"{record.where}: the backbone has no tokenizer; give input_ids")
    if record.messages is not None or (record.is_prompt and not raw and tokenizer.chat_template is not None):
        return conversation(record.as_conversation(), tokenizer, options)
    begin, end = ([] if token is None else [token] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    if record.is_prompt:
        shown = text_ids(record.question, tokenizer)
        ids = shown + continuation_ids(shown, record.answer or "", tokenizer)
    else:
        shown, ids = [], tokens_of(record.text or "", tokenizer)
        ids = ids if ids[:1] == begin else begin + ids
    if not record.unfinished and ids[-1:] != end:
        ids = ids + end
    return [Example(ids, [at >= len(shown) for at in range(len(ids))], record.where)], []


def excluded_windows(config: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> set[tuple[int, ...]]:
    """Collect every run of `config.exclude_window` tokens in the questions and texts of `config.exclude`."""
    windows: set[tuple[int, ...]] = set()
    for record in records_of(config, config.exclude) if config.exclude else ():
        if record.messages is not None and tokenizer is not None and not record.is_prompt:
            text = conversation_text(record.messages, record, tokenizer, config.template_options, prompt=False)
            parts = [tokens_of(text, tokenizer)]
        elif record.input_ids is not None:
            parts = [record.input_ids]
        else:
            parts = [prompt_ids(record, tokenizer, raw=True)]
            if record.answer and tokenizer is not None:
                parts.append(tokens_of(record.answer, tokenizer))
        if max(map(len, parts)) < config.exclude_window:
            short = f"a text in {config.exclude} is shorter than exclude_window; it excludes nothing"
            warnings.warn(short, stacklevel=2)
        for ids in parts:
            windows.update(_windows(ids, config.exclude_window))
    return windows


def _windows(ids: list[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[start : start + size]) for start in range(len(ids) - size + 1))
