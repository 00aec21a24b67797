"""Packing: rows of one length, cut from documents laid end to end, or made of whole documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from train.data.examples import DataCounts, Example

OPEN_ROWS = 16  # rows that wait for another whole document; more waste less padding and read ahead further
PADDING = -1  # the document that padding belongs to


@dataclass(frozen=True)
class PackedRow:
    """One row of the training data, without its padding; all lists have one entry per token."""

    ids: list[int]
    taught: list[bool]
    documents: list[int]
    """Number of the document that the token belongs to."""

    def __add__(self, other: PackedRow) -> PackedRow:
        return PackedRow(self.ids + other.ids, self.taught + other.taught, self.documents + other.documents)

    def cut(self, start: int, end: int | None) -> PackedRow:
        """The tokens from `start` to before `end`."""
        return PackedRow(self.ids[start:end], self.taught[start:end], self.documents[start:end])

    def tensors(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, loss mask and documents, padded to [length]; padding belongs to no document and is not taught."""
        missing = length - len(self.ids)
        ids, documents = self.ids + [0] * missing, self.documents + [PADDING] * missing
        mask = torch.tensor(self.taught + [False] * missing)
        return torch.tensor(ids, dtype=torch.int32), mask, torch.tensor(documents, dtype=torch.int32)


def pack(examples: Iterable[Example], length: int, whole: bool, counts: DataCounts) -> Iterator[PackedRow]:
    """Pack examples into rows of at most `length` tokens; `whole` keeps each document in one row."""

    def documents() -> Iterator[PackedRow]:
        for example in examples:
            number = counts.documents
            counts.add(example)
            yield PackedRow(example.input_ids, example.loss_mask, [number] * len(example.input_ids))

    for row in _first_fit(documents(), length) if whole else _end_to_end(documents(), length):
        counts.rows += 1
        yield row


def _end_to_end(documents: Iterable[PackedRow], length: int) -> Iterator[PackedRow]:
    open_row = PackedRow([], [], [])
    for document in documents:
        joined = open_row + document
        filled = len(joined.ids) // length * length
        for start in range(0, filled, length):
            yield joined.cut(start, start + length)
        open_row = joined.cut(filled, None)
    if open_row.ids:
        yield open_row


def _first_fit(documents: Iterable[PackedRow], length: int) -> Iterator[PackedRow]:
    """Put each document, none longer than `length`, into the first open row that has room for it."""
    rows: list[PackedRow] = []
    for document in documents:
        for at, row in enumerate(rows):
            if len(row.ids) + len(document.ids) <= length:
                rows[at] = row + document
                break
        else:
            rows.append(document)
        if len(rows) > OPEN_ROWS:
            yield rows.pop(max(range(len(rows)), key=lambda at: len(rows[at].ids)))
    yield from rows
