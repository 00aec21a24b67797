"""Training examples (documents as tokens with a loss mask), and rows of one length that are packed from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.files import Json
from train.loss.targets import FIRST_OFFSET

OPEN_ROWS = 16  # rows that wait for more whole documents; with more rows, padding is less and reading ahead longer
PADDING = -1  # document number of padding
Batch = dict[str, Tensor]
"""Rows as named tensors: `input_ids`, `position_ids`, `document_ids`, `loss_mask`, and with features `hidden`."""


class Example(NamedTuple):
    """One document of the training data, as tokens."""

    input_ids: list[int]
    loss_mask: list[bool]  # for each token, whether it counts in the loss
    where: str = ""  # file and line from which the document was read

    @property
    def has_labels(self) -> bool:
        """Whether heads can learn from this document: a token after the first two counts in the loss."""
        return any(self.loss_mask[FIRST_OFFSET:])


@dataclass
class DataCounts:
    """Counts of what the data hold, and of the records that were dropped."""

    documents: int = 0
    tokens: int = 0
    taught: int = 0  # tokens that count in the loss
    rows: int = 0
    cut: int = 0  # documents that are longer than a row and were split over several rows, or truncated
    dropped: dict[str, int] = field(default_factory=dict)  # number of dropped records for each reason
    raw_prompts: int = 0  # documents with a prompt as plain text, as `medusa distill` records it
    chat_prompts: int = 0  # documents with a prompt in a chat template
    options: dict[str, int] = field(default_factory=dict)  # documents not of plain text, by the template's options
    first: dict[str, str] = field(default_factory=dict)  # for each reason, file and line of the first dropped record

    def drop(self, reason: str, where: str, example: str = "") -> None:
        """Count a dropped record; `where` is its file and line, and `example` shows why."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first.setdefault(reason, f"{where}: {example}" if example else where)

    def add_prompt(self, raw: bool | None, options: Json | None = None) -> None:
        """Count a document whose prompt is plain text (`raw`) or in a chat template with `options`; `None`: unknown."""
        self.raw_prompts += raw is True
        self.chat_prompts += raw is False
        if raw is not True and options is not None:
            told = json.dumps(options, sort_keys=True)
            self.options[told] = self.options.get(told, 0) + 1

    @property
    def template_options(self) -> Json:
        """The options of the chat template with which most documents were written."""
        return json.loads(max(self.options, key=self.options.__getitem__)) if self.options else {}

    @property
    def has_raw_prompts(self) -> bool | None:
        """Whether most recorded prompts are plain text, not in a chat template; `None` if none is recorded."""
        return self.raw_prompts > self.chat_prompts if self.raw_prompts or self.chat_prompts else None

    def __str__(self) -> str:
        reasons = [f"{n} {why} (first: {self.first[why]})" for why, n in sorted(self.dropped.items())]
        return (
            f"{self.documents} documents ({self.cut} longer than a row), {self.tokens} tokens, {self.taught} taught, "
            f"{self.rows} rows; dropped: {', '.join(reasons) or 'none'}"
        )


def pack(examples: Iterable[Example], length: int, whole: bool, counts: DataCounts) -> Iterator[Tensor]:
    """Pack examples (documents) into rows of at most `length` tokens, and add them to `counts`.

    With `whole`, each document stays in one row; otherwise documents are cut at the end of a row. A row of T tokens is
    int32 [3, T]: token ids, loss mask (1 if a token counts in the loss, else 0) and document numbers."""

    def documents() -> Iterator[Tensor]:
        for number, example in enumerate(examples):
            counts.documents += 1
            counts.tokens += len(example.input_ids)
            counts.taught += sum(example.loss_mask)
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
    """Put each document into the first waiting row with room; of more than `OPEN_ROWS`, yield the fullest."""
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
    """Make a dataset item from the columns [T] of a row of T tokens."""
    ids, documents = input_ids.long(), document_ids.long()
    item = {"input_ids": ids, "position_ids": positions_of(documents), "document_ids": documents}
    return item | {"loss_mask": loss_mask.bool()}


def positions_of(document_ids: Tensor) -> Tensor:
    """Position of each token of a row in its document, from 0 at the document's start in this row."""
    _, lengths = document_ids.unique_consecutive(return_counts=True)
    return torch.cat([torch.arange(length) for length in lengths.tolist()])
