"""Labels written as strings: letters are ids, and a dot means nothing to teach."""

from __future__ import annotations

import pytest
import torch

from medusa.heads.inputs import following_ids
from train.loss.targets import IGNORE, head_labels


def drawn(ids: str, documents: str, mask: str | None = None, num_heads: int = 2) -> list[str]:
    """The labels of each head as a string; `mask` holds `x` where a token may be taught."""
    rows = head_labels(
        torch.tensor([[ord(letter) for letter in ids]]),
        torch.tensor([[letter == "x" for letter in mask or "x" * len(ids)]]),
        torch.tensor([[int(number) for number in documents]]),
        num_heads,
    )
    return ["".join("." if label == IGNORE else chr(label) for label in row) for row in rows[:, 0].tolist()]


def test_the_docstrings_example() -> None:
    assert drawn("abcdefg", "1111122") == ["cde....", "de....."]


@pytest.mark.parametrize(
    ("ids", "documents", "mask", "labels"),
    [
        ("abcdef", "111111", None, ["cdef..", "def...", "ef....", "f....."]),  # the token after the next
        ("abcdefgh", "11112222", None, ["cd..gh..", "d...h..."]),  # within the document
        ("abcdef", "123456", None, ["......", "......"]),  # documents of one token
        ("abcd00", "111133", "xxxx..", ["cd....", "d....."]),  # padding
        ("abcde", "11111", "...xx", [".de..", "de..."]),  # a question and its answer: the mask is read at the label
        ("abc", "111", None, ["c..", "...", "...", "..."]),  # near the end of a row
        ("a", "1", None, [".", "."]),
    ],
)
def test_labels_by_documents_and_mask(ids: str, documents: str, mask: str | None, labels: list[str]) -> None:
    assert drawn(ids, documents, mask, num_heads=len(labels)) == labels


def test_rows_of_a_batch_are_independent() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    labels = head_labels(ids, torch.ones_like(ids), torch.zeros_like(ids), 1)
    assert labels.tolist() == [[[3, IGNORE, IGNORE], [6, IGNORE, IGNORE]]]


def test_the_tokens_after_each_position() -> None:
    """Head k's label is one further than the last of the k + 1 tokens that it may see."""
    ids = torch.tensor([[5, 6, 7, 8]])
    assert following_ids(ids, 3).tolist() == [[[6, 7, 8], [7, 8, 8], [8, 8, 8], [8, 8, 8]]]
    everything = torch.ones_like(ids)
    labels = head_labels(ids, everything, everything, 2)
    for head in range(2):
        for position in range(4):
            if labels[head, 0, position] != IGNORE:
                seen = following_ids(ids, 2)[0, position, : head + 1].tolist()
                assert [*seen, int(labels[head, 0, position])] == ids[0, position + 1 : position + head + 3].tolist()
