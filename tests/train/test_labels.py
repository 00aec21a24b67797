"""Labels written as strings: letters are ids, and a dot means nothing to teach."""

from __future__ import annotations

import torch

from medusa.heads.inputs import following_ids
from train.loss.targets import FIRST_OFFSET, IGNORE, head_labels


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


def test_the_first_head_is_taught_the_token_after_the_next() -> None:
    assert FIRST_OFFSET == 2
    assert drawn("abcdef", "111111", num_heads=4) == ["cdef..", "def...", "ef....", "f....."]


def test_labels_stay_within_the_document() -> None:
    assert drawn("abcdefgh", "11112222") == ["cd..gh..", "d...h..."]


def test_documents_of_one_token_have_no_labels() -> None:
    assert drawn("abcdef", "123456") == ["......", "......"]


def test_padding_is_never_taught() -> None:
    assert drawn("abcd00", "111133", mask="xxxx..") == ["cd....", "d....."]


def test_the_loss_mask_is_read_at_the_label() -> None:
    """For a question (abc) and its answer (de), the question's last tokens are inputs, not labels."""
    assert drawn("abcde", "11111", mask="...xx") == [".de..", "de..."]


def test_positions_near_the_end_of_a_row_have_no_labels() -> None:
    assert drawn("abc", "111", num_heads=4) == ["c..", "...", "...", "..."]
    assert drawn("a", "1", num_heads=2) == [".", "."]


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
