"""What a benchmark and a verification have in common: the models, the options and the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.bench.methods import Method, medusa_method, plain_method
from decode.drafters.base import DrafterFactory
from decode.loop import Timer
from decode.settings import Settings
from medusa.loading import Loaded

StartProgress = Callable[[str, int], Callable[..., object]]
"""Starts a progress bar with a title and a total; returns a function that advances the bar, by 1 or by a number."""


def no_progress(title: str, total: int) -> Callable[..., object]:
    """Show no progress."""
    return lambda count=1: None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A drafter under test."""

    loaded: Loaded
    source: DrafterFactory
    settings: Settings
    prompts: Sequence[list[int]]
    heads: str | None = None
    """The name of the heads, if heads draft."""
    drafter: str = "heads"
    """The name of the drafter with its options, as the user wrote it."""
    tree: object = None
    """The tree as results list it."""
    batch_size: int = 1
    seed: int = 0
    start_progress: StartProgress = no_progress

    @property
    def dtype(self) -> str:
        return str(self.loaded.model.dtype).removeprefix("torch.")

    def plain(self, settings: Settings, clock: Timer | None = None) -> Method:
        """Plain decoding."""
        return plain_method(self.loaded.model, settings, self.loaded.tokenizer, clock)

    def drafted(self, settings: Settings, clock: Timer | None = None, source: DrafterFactory | None = None) -> Method:
        """Decoding with a drafter, by default the one under test."""
        source, loaded = source or self.source, self.loaded
        return medusa_method(loaded.model, source.heads, settings, loaded.tokenizer, clock=clock, drafter=source)
