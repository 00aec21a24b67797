"""The running batch: texts that are decoded together. They join before any step, and leave at their end.

New prompts are read in a session of their own, whose rows then move into the running session. A row of the session that
held an ended text is used again, so memory does not grow with the number of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from transformers import PreTrainedModel

from decode.loop import Step, Stepper, Timer, advance
from decode.ops.draws import NO_TOKEN
from decode.ops.fast_linear import joining
from decode.sequences import Request, Sequences
from medusa.tree_support import longrope_boundary

UNDEFINED, ENDED = "undefined", "ended"
"""Reasons why a text ends: its probabilities are NaN (`decode.generate` raises an error instead), or `end` was called.
"""


def must_be_alone(models: Iterable[PreTrainedModel]) -> bool:
    """Whether texts must be decoded one by one: longrope rotates all of them by the length of the longest."""
    return any(longrope_boundary(model) is not None for model in models)


class RunningBatch:
    """Texts that are decoded together, each of which is the text of its request alone."""

    def __init__(self, stepper_for: Callable[[Sequence[Request]], Stepper]) -> None:
        """Make an empty batch; `stepper_for` makes the steppers of new texts, all with the same models and options."""
        self.stepper_for = stepper_for
        self.stepper: Stepper | None = None

    @property
    def rows(self) -> list[int]:
        """The rows of the running texts."""
        return [] if self.stepper is None else self.stepper.rows

    @property
    def sequences(self) -> Sequences:
        """The texts, by the rows that `join` returned."""
        assert self.stepper is not None, "no text has joined yet"
        return self.stepper.session.sequences

    @torch.inference_mode()
    def join(self, requests: Sequence[Request]) -> list[int]:
        """Read the prompts of new texts; returns the row of each of them in all later steps, until it has ended.

        An empty list means that nothing was done, as a step runs already: the texts can join after the next one. An
        error while prompts are read changes nothing for the running texts; a later error drops all texts."""
        new = None
        try:
            if not self.rows:
                self.clear()  # before the new stepper starts, so that it can use the compiled step of the last one
            with joining(bool(self.rows)):
                new = self.stepper_for(requests)
                if self.stepper is not None and not self.stepper.takes(new):
                    return []
                new.start()
        except BaseException:
            if new is not None:
                new.close()
            raise
        if self.stepper is None:
            self.stepper = new
            return list(self.rows)
        count, running = len(new.rows), self.rows
        unused = [row for row in range(len(self.sequences)) if row not in running]
        places = [*unused, *range(len(self.sequences), len(self.sequences) + count)][:count]
        try:
            self.stepper.join(new, places)
        except BaseException:
            new.close()
            self.clear()
            raise
        return places

    @torch.inference_mode()
    def step(self) -> Step:
        """Decode one step of all texts. A text that it ends has a `finish_reason` in `sequences`, and leaves.

        The reason is `UNDEFINED` if its next token could not be drawn; the other texts go on. An error drops all texts.
        """
        assert self.stepper is not None, "no text has joined yet"
        for row, root in zip(self.rows, self.stepper.roots, strict=True):
            if root == NO_TOKEN:
                self.sequences.finish_reason[row] = UNDEFINED
        try:
            return advance(self.stepper, Timer())
        except BaseException:
            self.clear()
            raise

    def end(self, row: int) -> None:
        """End the text of a row before the next step, for example because its client has left."""
        self.sequences.finish_reason[row] = ENDED

    def clear(self) -> None:
        """Drop all texts and their caches."""
        if self.stepper is not None:
            self.stepper.close()
        self.stepper = None
