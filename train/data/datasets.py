"""Datasets of packed rows: one held in memory, and one that packs rows while training reads them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from medusa.loading import load_tokenizer
from medusa.records.sources import require_splits
from medusa.records.template import require_options
from train.config import DataConfig, TrainConfig
from train.data.packing import Batch, DataCounts, Example, as_item, pack, padded
from train.data.reader import ExampleReader, records_of


class PackedDataset(Dataset[Batch]):
    """Dataset of packed rows of training data, all held in memory; each row has `sequence_length` tokens.

    Position ids restart at every document and at the start of every row. A transformers model that is called with
    `attention_mask=None` and `use_cache=False` then lets no document attend to another one in the same row."""

    def __init__(
        self, examples: Iterable[Example], sequence_length: int, whole: bool = False, counts: DataCounts | None = None
    ) -> None:
        """Pack `examples` into rows and add them to `counts`; with `whole`, no example is split."""
        self.counts = counts or DataCounts()
        rows = [padded(row, sequence_length) for row in pack(examples, sequence_length, whole, self.counts)]
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        nothing = torch.empty(0, sequence_length, dtype=torch.int32)
        self.input_ids, loss_mask, self.document_ids = columns or [nothing] * 3
        self.loss_mask = loss_mask.bool()

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> Batch:
        return as_item(self.input_ids[index], self.loss_mask[index], self.document_ids[index])


class StreamedDataset(IterableDataset[Batch]):
    """Dataset of rows that are packed while training reads them. It repeats the data without end.

    The order of the rows depends only on the seed and the data. On resuming, the Trainer skips the rows that the run
    has read before, so the run continues at the same row if the data are unchanged."""

    def __init__(self, reader: ExampleReader, shuffle_buffer: int, seed: int) -> None:
        self.reader, self.shuffle_buffer, self.seed = reader, shuffle_buffer, seed
        self.counts = DataCounts()  # of the first pass over the data; each worker of a data loader has its own

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rows = self._passes()
        for row in islice(rows, worker.id, None, worker.num_workers) if worker else rows:
            yield as_item(*padded(row, self.reader.row_length))

    def _passes(self) -> Iterator[Tensor]:
        self.counts = counts = DataCounts()
        for number in count():
            rows = pack(self.reader.read(counts), self.reader.row_length, self.reader.whole, counts)
            yield from _shuffled(rows, self.shuffle_buffer, random.Random(self.seed + number))
            if not counts.taught:
                raise RequestError(f"nothing to train on: {counts}")
            counts = DataCounts()  # later passes read the same data, so their counts are not kept


def _shuffled(rows: Iterator[Tensor], size: int, rng: random.Random) -> Iterator[Tensor]:
    """Yield a random row of a buffer of `size` rows, and read the next row into the buffer."""
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
    """Load, tokenise and pack the data that `config` describes; `seed` orders the rows of a streamed dataset.

    `vocab_size` is the backbone's number of token ids, `context` its largest text length in tokens (`None`: no limit).
    Raise RequestError if data do not exist, a record is invalid, or no token counts in the loss."""
    reader = ExampleReader(config, tokenizer, vocab_size, context)
    if config.streaming:
        stream = StreamedDataset(reader, config.shuffle_buffer, seed)
        next(iter(stream))  # raises errors in the first records before training starts
        return stream
    counts = DataCounts()
    dataset = PackedDataset(reader.read(counts), reader.row_length, reader.whole, counts)
    if not counts.taught:
        hint = "heads learn from texts and from what an assistant says"
        raise RequestError(f"nothing to train on in {config.path}: {counts}; {hint}")
    return dataset


def require_template_options(config: TrainConfig) -> None:
    """Raise RequestError if the backbone's chat template does not read an option that the data ask for."""
    for section, data in (("data", config.data), ("eval_data", config.eval_data)):
        if data is not None and data.template_options:
            tokenizer = load_tokenizer(config.backbone, config.load_options)
            require_options(data.template_options, tokenizer, config.backbone, f"{section}.template_options.{{}}")


def require_data(config: DataConfig, section: str | None = "data") -> None:
    """Raise RequestError if no record of the data, or of the texts to exclude, can be read.

    `section`: that of the recipe, whose split and subset must have an effect; `None`: another one's apply."""
    if section is not None and config.split != type(config).model_fields["split"].default:
        require_splits(config.path, f"{section}.split")
    if section is not None and config.subset is not None and Path(config.path).exists():
        raise RequestError(
            f"{section}.subset is of a Hub dataset, and {config.path} is local; leave out {section}.subset"
        )
    for source in filter(None, (config.path, config.exclude)):
        next(iter(records_of(config, source)))
