"""Count the tokens of the steps that a drafter would take through a known text, for programs that have no such loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def step_lengths(ids: Sequence[int], start: int, guessed: Callable[[int], Sequence[int]]) -> list[int]:
    """Count the tokens that each step writes in the text `ids`, whose new tokens begin at `start`.

    `guessed` returns the guesses after the token at a place, which is the root. A guess is accepted if the text goes on
    with it and the guesses before it are accepted."""
    lengths = []
    while start < len(ids):
        count = 0
        for guess, token in zip(guessed(start), ids[start + 1 :], strict=False):
            if guess != token:
                break
            count += 1
        lengths.append(1 + count)
        start += 1 + count
    return lengths
