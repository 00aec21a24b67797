"""Datasets of packed rows, held in memory or streamed."""

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
from train.data.packing import Batch, as_item, pack, padded


class PackedDataset(Dataset[Batch]):
    """All rows of `sequence_length` tokens.

    Positions restart with every document and after every cut. With `attention_mask=None` and `use_cache=False`,
    transformers then keeps documents from attending to each other; a cache or a mask of ones would not.
    """

    def __init__(
        self, examples: Iterable[Example], sequence_length: int, whole: bool = False, counts: DataCounts | None = None
    ) -> None:
        """Pack `examples`; `whole` keeps each document in one row. `counts` counts the documents."""
        self.counts = counts or DataCounts()
        rows = [padded(row, sequence_length) for row in pack(examples, sequence_length, whole, self.counts)]
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        nothing = torch.empty(0, sequence_length, dtype=torch.int32)
        self.input_ids, taught, self.document_ids = columns or [nothing] * 3
        self.loss_mask = taught.bool()

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> Batch:
        return as_item(self.input_ids[index], self.loss_mask[index], self.document_ids[index])


class StreamedDataset(IterableDataset[Batch]):
    """Rows packed while they are read, pass after pass without end; `max_steps` ends the training.

    The order depends on the seed and the data only. A resumed run skips the rows that it has read, as the Trainer does,
    and continues at the same row if the data are unchanged.
    """

    def __init__(self, reader: ExampleReader, length: int, whole: bool, shuffle_buffer: int, seed: int) -> None:
        """
        Args:
            length: tokens in a row.
            whole: keep each document in one row.
            shuffle_buffer: number of rows from which the next one is drawn.
        """
        self.reader, self.length, self.whole = reader, length, whole
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.counts = DataCounts()
        """Counts of the first pass so far; each worker of a data loader has its own."""

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rows = self._passes()
        for row in islice(rows, worker.id, None, worker.num_workers) if worker else rows:
            yield as_item(*padded(row, self.length))

    def _passes(self) -> Iterator[Tensor]:
        self.counts = counts = DataCounts()
        for number in count():
            rows = pack(self.reader.read(counts), self.length, self.whole, counts)
            yield from _shuffled(rows, self.shuffle_buffer, random.Random(self.seed + number))
            if not counts.taught:
                raise RequestError(f"nothing to train on: {counts}")
            counts = DataCounts()  # the first pass has counted everything


def _shuffled(rows: Iterator[Tensor], size: int, rng: random.Random) -> Iterator[Tensor]:
    """The same rows, each drawn from the next `size` rows."""
    waiting: list[Tensor] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) >= size:
            yield waiting.pop(rng.randrange(size))
    rng.shuffle(waiting)
    yield from waiting


def load_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, context: int | None, seed: int = 0
) -> PackedDataset | StreamedDataset:
    """Load, tokenise and pack the data that `config` names; `seed` is for the order of a stream.

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
    """Tokens in a row: `sequence_length`, at most the backbone's context."""
    return min(config.sequence_length, context or config.sequence_length)


def require_data(config: DataConfig) -> None:
    """Check that the data can be opened, before a backbone is loaded.

    Raises:
        RequestError: no such data.
    """
    for source in filter(None, (config.path, config.exclude)):
        next(iter(records_of(config, source)))
