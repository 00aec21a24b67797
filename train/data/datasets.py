"""Datasets of packed rows, in which each token has its document and whether it is taught: in memory or streamed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import count, islice

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from train.config import DataConfig
from train.data.examples import DataCounts, Example, ExampleReader, records_of
from train.data.packing import PackedRow, pack

Batch = dict[str, Tensor]
"""The arguments of the trained module, by name: `input_ids`, `position_ids`, `document_ids` and `loss_mask`."""


class PackedDataset(Dataset[Batch]):
    """All rows of `sequence_length` tokens.

    Positions restart with every document and after every cut. With `attention_mask=None` and `use_cache=False`,
    transformers then keeps documents from attending to each other; a cache or a mask of ones would not.
    """

    def __init__(
        self, examples: Iterable[Example], sequence_length: int, whole: bool = False, counts: DataCounts | None = None
    ) -> None:
        """`whole` keeps each document in one row; documents are counted in `counts`."""
        self.counts = counts or DataCounts()
        rows = [row.tensors(sequence_length) for row in pack(examples, sequence_length, whole, self.counts)]
        empty = torch.empty(0, sequence_length, dtype=torch.int32)
        columns = [torch.stack(column) for column in zip(*rows, strict=True)] or [empty, empty.bool(), empty]
        self.input_ids, self.loss_mask, self.document_ids = columns

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> Batch:
        return _item(self.input_ids[index], self.loss_mask[index], self.document_ids[index])


class StreamedDataset(IterableDataset[Batch]):
    """Rows packed while they are read, pass after pass without end; `max_steps` ends the training.

    The order depends on the seed and the data only. A resumed run reads again what it had read, as the Trainer does,
    and so finds its place as long as the data are the same.
    """

    def __init__(self, reader: ExampleReader, length: int, whole: bool, shuffle_buffer: int, seed: int) -> None:
        """Rows have `length` tokens; `whole` keeps each document in one row."""
        self.reader, self.length, self.whole = reader, length, whole
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.counts = DataCounts()
        """Counts of the first pass so far; workers of a data loader keep theirs to themselves."""

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rows = self._passes()
        for row in islice(rows, worker.id, None, worker.num_workers) if worker else rows:
            yield _item(*row.tensors(self.length))

    def _passes(self) -> Iterator[PackedRow]:
        self.counts = counts = DataCounts()
        for number in count():
            rows = pack(self.reader.read(counts), self.length, self.whole, counts)
            yield from _shuffled(rows, self.shuffle_buffer, random.Random(self.seed + number))
            if not counts.taught:
                raise RequestError(f"nothing to train on: {counts}")
            counts = DataCounts()  # the first pass has counted everything


def _item(input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor) -> Batch:
    documents = document_ids.long()
    return {
        "input_ids": input_ids.long(),
        "position_ids": positions_of(documents),
        "document_ids": documents,
        "loss_mask": loss_mask,
    }


def positions_of(document_ids: Tensor) -> Tensor:
    """document_ids [T] -> position of each token in the part of its document that lies in this row [T]."""
    index = torch.arange(len(document_ids))
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[1:] = document_ids[1:] != document_ids[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values


def _shuffled(rows: Iterator[PackedRow], size: int, rng: random.Random) -> Iterator[PackedRow]:
    """The same rows, each drawn from the next `size` rows."""
    waiting: list[PackedRow] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) >= size:
            yield waiting.pop(rng.randrange(size))
    rng.shuffle(waiting)
    yield from waiting


def load_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, context: int | None, seed: int = 0
) -> PackedDataset | StreamedDataset:
    """Everything that `config` names, tokenised and packed; `seed` is for the order of a stream.

    Raises:
        RequestError: no such data, a record that cannot be used, or nothing left to teach.
    """
    require_data(config)
    length, whole = row_length(config, context), config.long_documents != "split"
    reader = ExampleReader(config, tokenizer, vocab_size, length)
    if config.streaming:
        stream = StreamedDataset(reader, length, whole, config.shuffle_buffer, seed)
        next(iter(stream))  # errors in the first records are raised before training starts
        return stream
    counts = DataCounts()
    dataset = PackedDataset(reader.read(counts), length, whole, counts)
    if not counts.taught:
        raise RequestError(
            f"nothing to train on in {config.path}: {counts}; heads are taught texts and what an assistant says"
        )
    return dataset


def row_length(config: DataConfig, context: int | None) -> int:
    """Tokens in a row: as many as asked for, at most the backbone's context."""
    return min(config.sequence_length, context or config.sequence_length)


def require_data(config: DataConfig) -> None:
    """Check that the data can be opened, before a backbone is loaded.

    Raises:
        RequestError: no such data.
    """
    for source in filter(None, (config.path, config.exclude)):
        next(iter(records_of(config, source)))
