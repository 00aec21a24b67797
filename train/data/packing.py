"""Rows of one length, packed from documents: cut from documents laid end to end, or made of whole documents.

Every token of a row carries the number of its document and whether it counts in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from train.data.examples import DataCounts, Example

OPEN_ROWS = 16  # rows that wait for more whole documents; with more rows, padding is less and reading ahead longer
PADDING = -1  # document number of padding
Batch = dict[str, Tensor]
"""Rows as named tensors: `input_ids`, `position_ids`, `document_ids`, `loss_mask`, and with features `hidden`."""


def pack(examples: Iterable[Example], length: int, whole: bool, counts: DataCounts) -> Iterator[Tensor]:
    """Pack examples into rows of at most `length` tokens, and add the numbers of examples and rows to `counts`.

    With `whole`, each document stays in one row; otherwise documents are cut at the end of a row.

    Yields:
        Rows of T <= length tokens as int32 [3, T]: token ids, loss mask (1 if a token counts), document numbers.
    """

    def documents() -> Iterator[Tensor]:
        for number, example in enumerate(examples):
            counts.add(example)
            columns = [example.input_ids, example.loss_mask, [number] * len(example.input_ids)]
            yield torch.from_numpy(np.array(columns, dtype=np.int32))  # far faster than torch.tensor for lists

    for row in _first_fit(documents(), length) if whole else _end_to_end(documents(), length):
        counts.rows += 1
        yield row


def _end_to_end(documents: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    parts, held = [], 0  # joined once they fill a row, not with every document
    for document in documents:
        parts.append(document)
        held += document.shape[1]
        if held > length:
            *rows, rest = torch.cat(parts, dim=1).split(length, dim=1)
            yield from rows
            parts, held = [rest], rest.shape[1]
    if held:
        yield torch.cat(parts, dim=1)


def _first_fit(documents: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    """Pack whole documents into rows: each document goes into the first open row that has room for it.

    Documents and rows are tensors [3, T] of T <= length tokens. Of more than `OPEN_ROWS` open rows, the fullest is
    yielded.
    """
    rows: list[Tensor] = []
    for document in documents:
        fits = (at for at, row in enumerate(rows) if row.shape[1] + document.shape[1] <= length)
        if (at := next(fits, None)) is None:
            rows.append(document)
        else:
            rows[at] = torch.cat([rows[at], document], dim=1)
        if len(rows) > OPEN_ROWS:
            yield rows.pop(max(range(len(rows)), key=lambda at: rows[at].shape[1]))
    yield from rows


def padded(row: Tensor, length: int) -> Tensor:
    """Pad a packed row of T tokens [3, T] to [3, length]. Padding has no document and does not count in the loss."""
    whole = F.pad(row, (0, length - row.shape[1]))
    whole[2, row.shape[1] :] = PADDING
    return whole


def as_item(input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor) -> Batch:
    """Make a dataset item from a row of T tokens: token ids, loss mask and document numbers, each [T]."""
    documents = document_ids.long()
    return {
        "input_ids": input_ids.long(),
        "position_ids": positions_of(documents),
        "document_ids": documents,
        "loss_mask": loss_mask.bool(),
    }


def positions_of(document_ids: Tensor) -> Tensor:
    """Position of each of the T tokens in a row [T], counted from the start of the token's document in this row.

    `document_ids` [T] are the document numbers of the tokens.
    """
    index = torch.arange(len(document_ids))
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[1:] = document_ids[1:] != document_ids[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values
