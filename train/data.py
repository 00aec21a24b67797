"""From conversations or text to rows of ids, each token knowing its document and whether it is taught.

    records (medusa.records) -> examples (ids and mask; what cannot be used is dropped and counted) -> rows

All rows at once are a `PackedDataset`; a `StreamedDataset` packs them while it reads.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from medusa.records import DOCUMENT_SEPARATOR, Record, prompt_ids, read_records
from train.chat import conversation
from train.labels import FIRST_OFFSET

LONG_DOCUMENTS = ("split", "truncate", "drop")
OPEN_ROWS = (
    16  # rows that still take a document, where documents are kept whole: more waste less and read ahead further
)
PADDING = -1  # the document that padding belongs to


@dataclass
class DataConfig:
    """The `data` section of a training YAML; a plain string stands for `path`."""

    path: str
    """A file, a folder or a Hub dataset id."""
    split: str = "train"
    """Of a Hub dataset."""
    document_separator: str = DOCUMENT_SEPARATOR
    """The line between documents of a `.txt` file."""
    subset: str | None = None
    """Of a Hub dataset that has several (its "configuration")."""
    sequence_length: int = 512
    """Tokens in a packed row; clipped to the backbone's context."""
    long_documents: str = "split"
    """split: documents lie end to end and are cut where a row ends; truncate or drop: every document lies whole in one
    row, and one that is longer than a row loses its end, or is left out."""
    streaming: bool = False
    """Pack rows while training reads them, for data larger than the memory; needs training.max_steps or max_minutes."""
    shuffle_buffer: int = 256
    """Streamed rows among which the next one is drawn; 1 keeps the order of the file."""
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
        if self.shuffle_buffer < 1:
            raise RequestError(f"data.shuffle_buffer is {self.shuffle_buffer}; take 1 (no shuffling) or more")
        if self.long_documents not in LONG_DOCUMENTS:
            raise RequestError(
                f"data.long_documents is {self.long_documents!r}; choose one of {', '.join(LONG_DOCUMENTS)}"
            )


@dataclass
class Example:
    """One document: ids [T], which of them are taught [T]."""

    input_ids: list[int]
    loss_mask: list[bool]
    where: str = ""
    """File and line."""


@dataclass
class Counts:
    """What was read, and what was dropped and why."""

    documents: int = 0
    tokens: int = 0
    taught: int = 0
    rows: int = 0
    cut: int = 0
    """Documents longer than a row: split over several, or truncated."""
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """Where the first of each kind of dropped record stands."""

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, where)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"dropped": dict(self.dropped)}

    def __str__(self) -> str:
        dropped = (
            ", ".join(f"{n} {why} (first: {self.first[why]})" for why, n in sorted(self.dropped.items())) or "none"
        )
        return (
            f"{self.documents} documents ({self.cut} longer than a row), {self.tokens} tokens, {self.taught} taught, "
            f"{self.rows} rows; dropped: {dropped}"
        )


class Row(NamedTuple):
    """One row of the training data, without its padding."""

    ids: list[int]
    taught: list[bool]
    documents: list[int]


def pack(examples: Iterable[Example], length: int, whole: bool, counts: Counts) -> Iterator[Row]:
    """Rows of at most `length` tokens, cut from documents laid end to end, or of `whole` documents."""

    def counted() -> Iterator[Row]:
        for example in examples:
            counts.documents += 1
            counts.tokens += len(example.input_ids)
            counts.taught += sum(example.loss_mask)
            yield Row(example.input_ids, example.loss_mask, [counts.documents - 1] * len(example.input_ids))

    for row in _first_fit(counted(), length) if whole else _end_to_end(counted(), length):
        counts.rows += 1
        yield row


def _end_to_end(documents: Iterable[Row], length: int) -> Iterator[Row]:
    open_row = Row([], [], [])
    for document in documents:
        joined = _joined(open_row, document)
        whole = len(joined.ids) // length * length
        for start in range(0, whole, length):
            yield _cut(joined, start, start + length)
        open_row = _cut(joined, whole, None)
    if open_row.ids:
        yield open_row


def _first_fit(documents: Iterable[Row], length: int) -> Iterator[Row]:
    """Every document, none longer than `length`, in the first open row that has room for it."""
    rows: list[Row] = []
    for document in documents:
        for at, row in enumerate(rows):
            if len(row.ids) + len(document.ids) <= length:
                rows[at] = _joined(row, document)
                break
        else:
            rows.append(document)
        if len(rows) > OPEN_ROWS:
            yield rows.pop(max(range(len(rows)), key=lambda at: len(rows[at].ids)))
    yield from rows


def _cut(row: Row, start: int, end: int | None) -> Row:
    return Row(row.ids[start:end], row.taught[start:end], row.documents[start:end])


def _joined(row: Row, other: Row) -> Row:
    return Row(row.ids + other.ids, row.taught + other.taught, row.documents + other.documents)


class PackedDataset(Dataset[dict[str, Tensor]]):
    """All rows of `sequence_length` tokens.

    Positions start anew with every document, and after every cut: with `attention_mask=None` and `use_cache=False`
    transformers then keeps documents from seeing each other (a cache or a mask of ones would let them).
    """

    def __init__(
        self, examples: Iterable[Example], sequence_length: int, whole: bool = False, counts: Counts | None = None
    ) -> None:
        self.counts = counts or Counts()
        rows = [_padded(row, sequence_length) for row in pack(examples, sequence_length, whole, self.counts)]
        empty = torch.empty(0, sequence_length, dtype=torch.int32)
        self.input_ids = torch.stack([ids for ids, _, _ in rows]) if rows else empty
        self.loss_mask = torch.stack([mask for _, mask, _ in rows]) if rows else empty.bool()
        self.document_ids = torch.stack([documents for _, _, documents in rows]) if rows else empty

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return _item(self.input_ids[index], self.loss_mask[index], self.document_ids[index])


def _padded(row: Row, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and documents of a row, [length] each; padding is of no document and not taught."""
    missing = length - len(row.ids)
    return (
        torch.tensor(row.ids + [0] * missing, dtype=torch.int32),
        torch.tensor(row.taught + [False] * missing, dtype=torch.bool),
        torch.tensor(row.documents + [PADDING] * missing, dtype=torch.int32),
    )


def _item(input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor) -> dict[str, Tensor]:
    """What the trained module takes: ids, positions, documents and mask, each [T]."""
    documents = document_ids.long()
    return {
        "input_ids": input_ids.long(),
        "position_ids": positions_of(documents),
        "document_ids": documents,
        "loss_mask": loss_mask,
    }


class StreamedDataset(IterableDataset[dict[str, Tensor]]):
    """Rows packed while they are read, pass after pass without end: `max_steps` says when it is enough.

    The order is the seed's and the data's alone, so a resumed run finds its place by reading again what it had read
    (that is what the Trainer does); it is the same place as long as the data are the same.
    """

    def __init__(
        self,
        read: Callable[[Counts], Iterator[Example]],
        sequence_length: int,
        whole: bool = False,
        shuffle_buffer: int = 1,
        seed: int = 0,
    ) -> None:
        """`read` starts a new pass over the examples, and counts what it drops."""
        self.read, self.length, self.whole = read, sequence_length, whole
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.counts = Counts()
        """Of the first pass, as far as it has come; workers of a data loader keep theirs to themselves."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        rows = self._passes()
        for row in islice(rows, worker.id, None, worker.num_workers) if worker else rows:
            yield _item(*_padded(row, self.length))

    def _passes(self) -> Iterator[Row]:
        self.counts = counts = Counts()
        for number in count():
            rows = pack(self.read(counts), self.length, self.whole, counts)
            yield from _shuffled(rows, self.shuffle_buffer, random.Random(self.seed + number))
            if not counts.taught:
                raise RequestError(f"nothing to train on: {counts}")
            counts = Counts()  # later passes see what the first one has counted


def _shuffled(rows: Iterator[Row], size: int, rng: random.Random) -> Iterator[Row]:
    """The same rows, each drawn among the `size` that come next."""
    waiting: list[Row] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) >= size:
            yield waiting.pop(rng.randrange(size))
    rng.shuffle(waiting)
    yield from waiting


def positions_of(document_ids: Tensor) -> Tensor:
    """document_ids [T] -> position of each token in its document, as far as it lies in this row [T]."""
    index = torch.arange(len(document_ids))
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[1:] = document_ids[1:] != document_ids[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values


def load_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    context: int | None,
    seed: int = 0,
) -> PackedDataset | StreamedDataset:
    """Everything that `config` names, tokenised and packed; `seed` is of a stream's order.

    Raises:
        RequestError: no such data, a record that cannot be used, or nothing left to teach.
    """
    require_data(config)
    length, whole = row_length(config, context), config.long_documents != "split"
    excluded = _windows_of(config, tokenizer)

    def read(counts: Counts) -> Iterator[Example]:
        return read_examples(config, tokenizer, vocab_size, length, counts, excluded)

    if config.streaming:
        stream = StreamedDataset(read, length, whole, config.shuffle_buffer, seed)
        next(iter(stream))  # what is wrong with the first records is said before training starts
        return stream
    counts = Counts()
    dataset = PackedDataset(read(counts), length, whole, counts)
    if not counts.taught:
        raise RequestError(nothing_to_train_on(config, counts))
    return dataset


def nothing_to_train_on(config: DataConfig, counts: Counts) -> str:
    return f"nothing to train on in {config.path}: {counts}; heads are taught texts and what an assistant says"


def row_length(config: DataConfig, context: int | None) -> int:
    return min(config.sequence_length, context or config.sequence_length)


def _read(config: DataConfig, source: str) -> Iterator[Record]:
    return read_records(source, split=config.split, subset=config.subset, separator=config.document_separator)


def require_data(config: DataConfig) -> None:
    """See that there is something to read, before a backbone is loaded for it.

    Raises:
        RequestError: no such data.
    """
    for source in filter(None, (config.path, config.exclude)):
        next(iter(_read(config, source)))


def read_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    length: int,
    counts: Counts,
    excluded: set[tuple[int, ...]] | None = None,
) -> Iterator[Example]:
    """Examples in the order of the data, for rows of `length` tokens; what is dropped is counted in `counts`."""
    excluded = _windows_of(config, tokenizer) if excluded is None else excluded
    for record in islice(_read(config, config.path), config.max_examples):
        example = to_example(record, tokenizer)
        if example.input_ids and max(example.input_ids) >= vocab_size:
            raise RequestError(
                f"{record.where}: the id {max(example.input_ids)} is beyond the backbone's vocabulary of {vocab_size}; "
                "these are another tokenizer's ids"
            )
        too_long = len(example.input_ids) > length
        if reason := _reason_to_drop(config, record, example, too_long, excluded):
            counts.drop(reason, record.where)
            continue
        if too_long and config.long_documents == "truncate":
            example = Example(example.input_ids[:length], example.loss_mask[:length], example.where)
            if not _teaches(example):
                counts.drop("with nothing taught within a row", record.where)
                continue
        counts.cut += too_long
        yield example


def _reason_to_drop(
    config: DataConfig, record: Record, example: Example, too_long: bool, excluded: set[tuple[int, ...]]
) -> str | None:
    if record.text is not None and not record.text.strip():
        return "empty"
    if record.messages is not None and not any(message["role"] == "assistant" for message in record.messages):
        return "without an assistant turn"
    if not _teaches(example):
        return "with nothing to teach"
    if excluded and not excluded.isdisjoint(_windows(example.input_ids, config.exclude_window)):
        return "shared with the excluded text"
    if too_long and config.long_documents == "drop":
        return "longer than a row"
    return None


def _teaches(example: Example) -> bool:
    """Whether a head has a label in it: not even the first one is taught a document's first two tokens."""
    return any(example.loss_mask[FIRST_OFFSET:])


def to_example(record: Record, tokenizer: PreTrainedTokenizerBase | None) -> Example:
    """Ids and loss mask of one record: a text is taught whole, a conversation where the assistant speaks."""
    if record.input_ids is not None:
        taught = [position >= record.prompt_tokens for position in range(len(record.input_ids))]
        return Example(record.input_ids, taught, record.where)
    if tokenizer is None:
        raise RequestError(f"{record.where}: the backbone has no tokenizer; give input_ids")
    if record.messages is not None:
        return Example(*conversation(record, tokenizer), record.where)
    ids = tokenizer(record.text or "", add_special_tokens=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = begin + ids + end
    return Example(ids, [True] * len(ids), record.where)


def _windows(ids: list[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[start : start + size]) for start in range(len(ids) - size + 1))


def _windows_of(config: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> set[tuple[int, ...]]:
    if config.exclude is None:
        return set()
    records = _read(config, config.exclude)
    texts = (prompt_ids(r, tokenizer) if r.is_prompt else to_example(r, tokenizer).input_ids for r in records)
    windows: set[tuple[int, ...]] = set()
    for ids in texts:
        if len(ids) < config.exclude_window:
            warnings.warn(
                f"{config.exclude} holds a text shorter than exclude_window; it excludes nothing", stacklevel=2
            )
        windows.update(_windows(ids, config.exclude_window))
    return windows
