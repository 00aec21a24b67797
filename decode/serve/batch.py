"""The running batch of the server: texts that are decoded together. They join before any step, and leave at their end.

New prompts are read in a session of their own, whose rows then move into the running session. A row of the session that
held an ended text is used again, so memory does not grow with the number of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, runtime_checkable

import torch

from decode.loop import Step, Stepper, Timer, advance
from decode.ops.draws import NO_TOKEN
from decode.sequences import Request, Sequences

UNDEFINED, ENDED = "undefined", "ended"
"""Reasons why a text ends: its probabilities are NaN (`decode.generate` raises an error instead), or `end` was called.
"""


@runtime_checkable
class GrowingStepper(Stepper, Protocol):
    """A stepper that can take over the texts of another one. Compiled steppers cannot, as their rows are fixed."""

    def join(self, other: Self, places: list[int]) -> None:
        """Take over all texts of `other`, which has just started, as the rows `places` (`decode.session.Session.join`).

        Both steppers have the same models and options."""


class RunningBatch:
    """Texts that are decoded together, each of which is the text of its request alone."""

    def __init__(self, stepper_for: Callable[[Sequence[Request]], Stepper]) -> None:
        """Make an empty batch; `stepper_for` makes the steppers of new texts, all with the same models and options.

        Unless it makes `GrowingStepper`s, texts must not join before all running texts have ended."""
        self.stepper_for = stepper_for
        self.stepper: Stepper | None = None
        self.rows: list[int] = []
        self.roots: list[int] = []  # the next token of each of the rows, which is decided, but not written yet

    @property
    def sequences(self) -> Sequences:
        """The texts, by the rows that `join` returned."""
        assert self.stepper is not None, "no text has joined yet"
        return self.stepper.session.sequences

    @torch.inference_mode()
    def join(self, requests: Sequence[Request]) -> list[int]:
        """Read the prompts of new texts; returns the row of each of them in all later steps, until it has ended.

        An error while prompts are read changes nothing for the running texts; a later error drops all texts."""
        if not self.rows:
            self.clear()  # before the new stepper starts, so that it can use the compiled step of the last one
            self.stepper = self.stepper_for(requests)
            self.rows, self.roots = map(list, self.stepper.start())
            return list(self.rows)
        new = self.stepper_for(requests)
        assert isinstance(self.stepper, GrowingStepper), "its number of rows is fixed"
        assert isinstance(new, GrowingStepper), "it is made like the running one"
        rows, roots = new.start()
        unused = [row for row in range(len(self.sequences)) if row not in self.rows]
        places = [*unused, *range(len(self.sequences), len(self.sequences) + len(rows))][: len(rows)]
        try:
            self.stepper.join(new, places)
        except BaseException:
            self.clear()
            raise
        self.rows += places
        self.roots += roots
        return places

    @torch.inference_mode()
    def step(self) -> Step:
        """Decode one step of all texts. A text that it ends has a `finish_reason` in `sequences`, and leaves.

        The reason is `UNDEFINED` if its next token could not be drawn; the other texts go on. An error drops all texts.
        """
        assert self.stepper is not None, "no text has joined yet"
        for row, root in zip(self.rows, self.roots, strict=True):
            if root == NO_TOKEN:
                self.sequences.finish_reason[row] = UNDEFINED
        try:
            step, self.rows, self.roots = advance(self.sequences, self.stepper, self.rows, self.roots, Timer())
        except BaseException:
            self.clear()
            raise
        return step

    def end(self, row: int) -> None:
        """End the text of a row before the next step, for example because its client has left."""
        self.sequences.finish_reason[row] = ENDED

    def clear(self) -> None:
        """Drop all texts and their caches."""
        if self.stepper is not None:
            self.stepper.close()
        self.stepper, self.rows, self.roots = None, [], []
