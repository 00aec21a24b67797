"""The running batch of the server: texts that are decoded together. They join before any step, and leave at their end.

New prompts are read in a session of their own, whose rows then move into the running session. A row of the session that
held an ended text is used again, so memory does not grow with the number of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from decode.loop import Step, Stepper, Timer, advance
from decode.sequences import Request, Sequences


class RunningBatch:
    """Texts that are decoded together, each of which is the text of its request alone."""

    def __init__(self, stepper_for: Callable[[Sequence[Request]], Stepper]) -> None:
        """Make an empty batch; `stepper_for` makes steppers that can be joined, such as those of one drafter."""
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
        new = self.stepper_for(requests)
        rows, roots = new.start()
        if self.stepper is None or not self.rows:
            self.clear()
            self.stepper, self.rows, self.roots = new, list(rows), list(roots)
            return list(rows)
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

        An error drops all texts."""
        assert self.stepper is not None, "no text has joined yet"
        try:
            step, self.rows, self.roots = advance(self.sequences, self.stepper, self.rows, self.roots, Timer())
        except BaseException:
            self.clear()
            raise
        return step

    def clear(self) -> None:
        """Drop all texts and their caches."""
        if self.stepper is not None:
            self.stepper.close()
        self.stepper, self.rows, self.roots = None, [], []
