"""A dataset of rows that are packed while training reads them, for data that does not fit into memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from medusa.errors import RequestError
from train.data.examples import DataCounts
from train.data.packing import Batch, as_item, pack, padded
from train.data.reader import ExampleReader


class StreamedDataset(IterableDataset[Batch]):
    """Dataset of rows that are packed while training reads them. It repeats the data without end.

    The order of the rows depends only on the seed and the data. On resuming, the Trainer skips the rows that the run
    has read before, so the run continues at the same row if the data are unchanged.
    """

    def __init__(self, reader: ExampleReader, length: int, whole: bool, shuffle_buffer: int, seed: int) -> None:
        """Make a stream of rows packed from the examples that `reader` reads.

        Args:
            length: number of tokens in a row.
            whole: keep each document in one row.
            shuffle_buffer: number of rows from which the next row is drawn at random.
            seed: seed for the order of the rows.
        """
        self.reader, self.length, self.whole = reader, length, whole
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.counts = DataCounts()
        """Counts of what the first pass over the data has read. Each worker of a data loader has its own counts."""

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
            counts = DataCounts()  # later passes read the same data, so their counts are not kept


def _shuffled(rows: Iterator[Tensor], size: int, rng: random.Random) -> Iterator[Tensor]:
    """Shuffle rows within a buffer: each row is drawn at random from the next `size` rows."""
    waiting: list[Tensor] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) >= size:
            yield waiting.pop(rng.randrange(size))
    rng.shuffle(waiting)
    yield from waiting
