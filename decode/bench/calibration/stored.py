"""Calibrations and the files that keep them, one calibration for each situation of each set of heads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from transformers import PreTrainedModel

from decode.bench.machine import machine
from decode.drafters.layouts import DynamicTree
from decode.settings import Settings
from medusa.files import read_json, write_json
from medusa.fingerprint import heads_fingerprint
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout, Tree

FILE = "calibration.json"


@dataclass
class CalibrationPoint:
    """One tree that was tried, with its predicted tau and the time of its step in milliseconds."""

    nodes: int
    paths: list[list[int]]
    """Empty for a dynamic tree."""
    tau: float
    step_ms: float
    dynamic: bool = False

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tau / self.step_ms


@dataclass
class RecordedTexts:
    """The texts that a calibration was made from."""

    texts: int
    tokens: int = 0
    """Tokens of the continuations."""
    prompt_tokens: int = 0
    source: str = "the backbone's own"


@dataclass
class Calibration:
    """The trees that were tried, and the best of them."""

    points: list[CalibrationPoint]
    chosen: int
    """Index of the best point."""
    temperatures: list[float]
    """One for each head, for the confidences of dynamic trees."""
    holds_for: dict[str, object]
    """The situation that the calibration was made in (`situation`)."""
    texts: RecordedTexts

    @property
    def best(self) -> CalibrationPoint:
        return self.points[self.chosen]

    @property
    def tree(self) -> Layout:
        """The best tree."""
        if self.best.dynamic:
            return DynamicTree.over_heads(self.best.nodes, len(self.temperatures), tuple(self.temperatures))
        return Tree.from_paths(self.best.paths)

    def to_json(self) -> dict[str, object]:
        """The entry of the calibration in a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, object]) -> Calibration:
        """Read an entry of a file."""
        return TypeAdapter(cls).validate_python(content)


def situation(model: PreTrainedModel, heads: MedusaHeads, settings: Settings, batch_size: int) -> dict[str, object]:
    """Everything that a calibration depends on: machine, backbone, heads, dtype, batch size and sampling."""
    here = machine()
    return {
        **{name: getattr(here, name) for name in ("processor", "gpu", "threads", "torch", "transformers")},
        "backbone": type(model).__name__ + f" {model.config.get_text_config(decoder=True).hidden_size}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(model.config, "_attn_implementation", None),
        "batch_size": batch_size,
        "temperature": settings.temperature,
        "acceptance": settings.rule.name,
        "version": 2,
        "heads": heads_fingerprint(heads),
        **({"amateur": settings.amateur.to_dict()} if settings.amateur else {}),
    }


def files_for(heads_folder: Path | None) -> list[Path]:
    """The files for calibrations of heads: first in their folder, if the user owns one, then in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa-heads" / FILE
    return [cache] if heads_folder is None else [heads_folder / FILE, cache]


def stored(places: Sequence[Path], wanted: dict[str, object]) -> Calibration | None:
    """The calibration for exactly the situation `wanted`, from the first of these files that has it."""
    return next((Calibration.from_json(entry) for entry in _entries(places) if entry["holds_for"] == wanted), None)


def stored_temperatures(places: Sequence[Path], heads: MedusaHeads) -> tuple[float, ...] | None:
    """The temperatures that were fitted for these heads, in any situation."""
    fingerprint = heads_fingerprint(heads)
    fitted = (entry.get("temperatures") for entry in _entries(places) if entry["holds_for"].get("heads") == fingerprint)
    return next(map(tuple, filter(None, fitted)), None)


def _entries(places: Sequence[Path]) -> Iterator[Any]:
    """Entries as they are in the files: those of early versions lack some names."""
    for place in filter(Path.is_file, places):
        yield from read_json(place)


def store(places: Sequence[Path], calibration: Calibration) -> Path:
    """Add a calibration to the first of these files that can be written, and return that file.

    An earlier calibration of the same situation is replaced.

    Raises:
        OSError: no file can be written.
    """
    for place in places:
        try:
            kept = [entry for entry in _entries([place]) if entry["holds_for"] != calibration.holds_for]
            write_json(place, [*kept, calibration.to_json()])
            return place
        except OSError:
            if place == places[-1]:
                raise
    raise OSError("there is no file to keep a calibration in")
