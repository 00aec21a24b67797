"""Training examples, which are documents as tokens with a loss mask, and counts of documents, tokens and rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from train.loss.labels import FIRST_OFFSET


class Example(NamedTuple):
    """One document of the training data, as tokens."""

    input_ids: list[int]
    """Token ids of the document, T of them."""
    loss_mask: list[bool]
    """T flags: True for tokens that count in the loss."""
    where: str = ""
    """File and line from which the document was read."""

    @property
    def has_labels(self) -> bool:
        """Whether any head has a label here: a token that counts in the loss and is not one of the first two tokens."""
        return any(self.loss_mask[FIRST_OFFSET:])


@dataclass
class DataCounts:
    """Counts of the documents, tokens and rows of a dataset, and of the records that were dropped."""

    documents: int = 0
    tokens: int = 0
    taught: int = 0
    rows: int = 0
    cut: int = 0
    """Number of documents that are longer than a row and were split over several rows, or truncated."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped records for each reason."""
    first: dict[str, str] = field(default_factory=dict)
    """For each reason, file and line of the first record that was dropped."""

    def add(self, example: Example) -> None:
        """Count a document that is used for training, and its tokens."""
        self.documents += 1
        self.tokens += len(example.input_ids)
        self.taught += sum(example.loss_mask)

    def drop(self, reason: str, where: str) -> None:
        """Count a record that is dropped, under its reason."""
        self.dropped[reason] += 1
        self.first.setdefault(reason, where)

    def to_dict(self) -> dict[str, object]:
        """The counts of documents, tokens, rows and dropped records as a JSON object."""
        return asdict(self) | {"dropped": dict(self.dropped)}

    def __str__(self) -> str:
        reasons = [f"{n} {why} (first: {self.first[why]})" for why, n in sorted(self.dropped.items())]
        return (
            f"{self.documents} documents ({self.cut} longer than a row), {self.tokens} tokens, {self.taught} taught, "
            f"{self.rows} rows; dropped: {', '.join(reasons) or 'none'}"
        )
