"""Datasets of packed rows: a dataset held in memory, and a function that loads any dataset a recipe describes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from train.config import DataConfig
from train.data.examples import DataCounts, Example
from train.data.packing import Batch, as_item, pack, padded
from train.data.reader import ExampleReader, records_of
from train.data.streaming import StreamedDataset


class PackedDataset(Dataset[Batch]):
    """Dataset of rows of `sequence_length` tokens, all held in memory.

    Positions restart at every document and at the start of every row. A transformers model that is called with
    `attention_mask=None` and `use_cache=False` then lets no document attend to another one in the same row.
    """

    def __init__(
        self, examples: Iterable[Example], sequence_length: int, whole: bool = False, counts: DataCounts | None = None
    ) -> None:
        """Pack `examples` into rows of one length, and add them to `counts`. With `whole`, no document is split."""
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


def load_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, context: int | None, seed: int = 0
) -> PackedDataset | StreamedDataset:
    """Load, tokenise and pack the data that `config` describes.

    Args:
        vocab_size: size of the backbone's vocabulary.
        context: context length of the backbone, if it has a limit.
        seed: seed for the order of the rows in a streamed dataset.

    Raises:
        RequestError: the data do not exist, a record cannot be used, or no token counts in the loss.
    """
    require_data(config)
    length, whole = row_length(config, context), config.long_documents != "split"
    reader = ExampleReader(config, tokenizer, vocab_size, length)
    if config.streaming:
        stream = StreamedDataset(reader, length, whole, config.shuffle_buffer, seed)
        next(iter(stream))  # raises errors in the first records before training starts
        return stream
    counts = DataCounts()
    dataset = PackedDataset(reader.read(counts), length, whole, counts)
    if not counts.taught:
        raise RequestError(
            f"nothing to train on in {config.path}: {counts}; heads learn from texts and from what an assistant says"
        )
    return dataset


def row_length(config: DataConfig, context: int | None) -> int:
    """Number of tokens in a row: `sequence_length`, but at most `context`, the backbone's context length."""
    return min(config.sequence_length, context or config.sequence_length)


def require_data(config: DataConfig) -> None:
    """Check that the data of `config`, and the texts to exclude from the data, can be read: read one record of each.

    Raises:
        RequestError: the data do not exist or cannot be read.
    """
    for source in filter(None, (config.path, config.exclude)):
        next(iter(records_of(config, source)))
