"""From conversations or text to packed rows of ids, each token knowing its document and whether it is taught."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from medusa.records import DOCUMENT_SEPARATOR, Record, prompt_ids, read_records

MIN_TAUGHT = 2  # tokens: below that not even the first head has a label


@dataclass
class DataConfig:
    """The `data` section of a training YAML; a plain string stands for `path`."""

    path: str
    """A file, a folder or a Hub dataset id."""
    split: str = "train"
    """Of a Hub dataset."""
    document_separator: str = DOCUMENT_SEPARATOR
    """The line between documents of a `.txt` file."""
    sequence_length: int = 512
    """Tokens in a packed row; clipped to the backbone's context."""
    max_examples: int | None = None
    """Read this many records and no more."""
    exclude: str | None = None
    """Drop examples that share `exclude_window` consecutive tokens with a record here: keeps test prompts out."""
    exclude_window: int = 32
    """How many consecutive tokens count as the same text."""

    def __post_init__(self) -> None:
        if self.sequence_length < 4:
            raise RequestError(f"data.sequence_length is {self.sequence_length}; take 4 or more")
        if self.exclude_window < 1:
            raise RequestError(f"data.exclude_window is {self.exclude_window}; take 1 or more")


@dataclass
class Example:
    """One document: ids [T], which of them are taught [T]."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass
class Counts:
    """What was read, and what was dropped and why."""

    documents: int = 0
    tokens: int = 0
    taught: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        dropped = ", ".join(f"{number} {why}" for why, number in sorted(self.dropped.items())) or "none"
        return f"{self.documents} documents, {self.tokens} tokens, {self.taught} taught; dropped: {dropped}"


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of `sequence_length` tokens, cut from documents laid end to end.

    Positions start anew with every document, and after every cut: with `attention_mask=None` and `use_cache=False`
    transformers then keeps documents from seeing each other (a cache or a mask of ones would let them).
    """

    def __init__(self, examples: Iterable[Example], sequence_length: int) -> None:
        self.counts = Counts()
        ids: list[int] = []
        taught: list[bool] = []
        documents: list[int] = []
        for number, example in enumerate(examples):
            self.counts.documents += 1
            ids += example.input_ids
            taught += example.loss_mask
            documents += [number] * len(example.input_ids)
        self.counts.tokens, self.counts.taught = len(ids), sum(taught)
        padding = -len(ids) % sequence_length
        shape = (-1, sequence_length)
        self.input_ids = torch.tensor(ids + [0] * padding, dtype=torch.int32).reshape(shape)
        self.loss_mask = torch.tensor(taught + [False] * padding, dtype=torch.bool).reshape(shape)
        self.document_ids = torch.tensor(documents + [-1] * padding, dtype=torch.int32).reshape(shape)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        documents = self.document_ids[index].long()
        return {
            "input_ids": self.input_ids[index].long(),
            "position_ids": positions_of(documents),
            "document_ids": documents,
            "loss_mask": self.loss_mask[index],
        }


def positions_of(document_ids: Tensor) -> Tensor:
    """document_ids [T] -> position of each token in its document, as far as it lies in this row [T]."""
    index = torch.arange(len(document_ids))
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[1:] = document_ids[1:] != document_ids[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values


def load_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, context: int | None
) -> PackedDataset:
    """Everything that `config` names, tokenised and packed.

    Raises:
        RequestError: no such data, a record that cannot be used, or nothing left to teach.
    """
    require_data(config)
    length = min(config.sequence_length, context or config.sequence_length)
    dropped: Counter[str] = Counter()
    excluded = _windows_of(config, tokenizer)
    examples = _examples(config, tokenizer, vocab_size, excluded, dropped)
    dataset = PackedDataset(examples, length)
    dataset.counts.dropped = dropped
    if not dataset.counts.taught:
        raise RequestError(f"nothing to train on in {config.path}: {dataset.counts}")
    return dataset


def require_data(config: DataConfig) -> None:
    """See that there is something to read, before a backbone is loaded for it.

    Raises:
        RequestError: no such data.
    """
    for source in filter(None, (config.path, config.exclude)):
        next(iter(read_records(source, split=config.split, separator=config.document_separator)))


def _examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    excluded: set[tuple[int, ...]],
    dropped: Counter[str],
) -> Iterator[Example]:
    records = read_records(config.path, split=config.split, separator=config.document_separator)
    for number, record in enumerate(records):
        if config.max_examples is not None and number >= config.max_examples:
            return
        example = to_example(record, tokenizer)
        if example.input_ids and max(example.input_ids) >= vocab_size:
            raise RequestError(
                f"{record.where}: the id {max(example.input_ids)} is beyond the backbone's vocabulary of {vocab_size}"
            )
        if sum(example.loss_mask) < MIN_TAUGHT:
            dropped["with nothing to teach"] += 1
        elif excluded and not excluded.isdisjoint(_windows(example.input_ids, config.exclude_window)):
            dropped["shared with the excluded text"] += 1
        else:
            yield example


def to_example(record: Record, tokenizer: PreTrainedTokenizerBase | None) -> Example:
    """Ids and loss mask of one record: a text is taught whole, a conversation where the assistant speaks."""
    if record.input_ids is not None:
        taught = [position >= record.prompt_tokens for position in range(len(record.input_ids))]
        return Example(record.input_ids, taught)
    if tokenizer is None:
        raise RequestError(f"{record.where}: the backbone has no tokenizer; give input_ids")
    if record.messages is not None:
        return _conversation(record, tokenizer)
    ids = tokenizer(record.text or "", add_special_tokens=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = begin + ids + end
    return Example(ids, [True] * len(ids))


def _conversation(record: Record, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Only what the assistant says is taught, its end of turn included.

    The template is asked for the conversation up to and after every assistant turn: what the second has more is what
    that turn adds. That works for every template, with or without generation tags.
    """
    if tokenizer.chat_template is None:
        raise RequestError(f"{record.where}: a conversation needs a chat template, and this tokenizer has none")
    messages: list[dict[str, Any]] = record.messages or []
    try:
        ids = _rendered(tokenizer, messages, add_generation_prompt=False)
        mask = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = _rendered(tokenizer, messages[:turn], add_generation_prompt=True)
            after = _rendered(tokenizer, messages[: turn + 1], add_generation_prompt=False)
            start, end = _common(before, ids), _common(after, ids)
            if end <= start:  # the template renders earlier turns otherwise than a last one: measure from behind
                rest = _rendered(tokenizer, messages[turn + 1 :], add_generation_prompt=False)
                end = len(ids) - _common(rest[::-1], ids[::-1])
            mask[start:end] = [True] * (end - start)
    except Exception as error:  # templates are programs: they raise what they like, and it is about this record
        raise RequestError(f"{record.where}: the chat template refuses the messages ({error})") from None
    return Example(ids, mask)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    rendered: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)
    return rendered["input_ids"]


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _windows(ids: list[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[start : start + size]) for start in range(len(ids) - size + 1))


def _windows_of(config: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> set[tuple[int, ...]]:
    if config.exclude is None:
        return set()
    records = read_records(config.exclude, split=config.split, separator=config.document_separator)
    texts = (prompt_ids(r, tokenizer) if r.is_prompt else to_example(r, tokenizer).input_ids for r in records)
    windows: set[tuple[int, ...]] = set()
    for ids in texts:
        if len(ids) < config.exclude_window:
            warnings.warn(
                f"{config.exclude} holds a text shorter than exclude_window; it excludes nothing", stacklevel=2
            )
        windows.update(_windows(ids, config.exclude_window))
    return windows
