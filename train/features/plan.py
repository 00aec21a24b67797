"""The estimate of what a cache of features costs and saves: disk space and training time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from medusa.errors import RequestError
from medusa.files import readable


@dataclass(frozen=True)
class FeaturePlan:
    """Estimates for a cache of features: the disk space that it needs, and the training time that it saves."""

    tokens: int
    missing_bytes: int
    """Number of bytes that are not written yet."""
    free_bytes: int
    backbone_seconds: float
    """Seconds of a training step in the backbone's forward, which is not needed with features."""
    heads_seconds: float
    """Seconds of a training step in everything else."""
    epochs: float

    @property
    def saved_per_epoch(self) -> float:
        """Share of the time of an epoch that cached features save, in every epoch after the first."""
        return self.backbone_seconds / (self.backbone_seconds + self.heads_seconds)

    @property
    def saved(self) -> float:
        """Share of the run's time that cached features save. The first epoch, which computes them, saves no time."""
        return max(0.0, 1 - 1 / self.epochs) * self.saved_per_epoch

    def to_dict(self) -> dict[str, object]:
        """The estimates as a JSON object."""
        return asdict(self) | {"saved_per_epoch": self.saved_per_epoch, "saved": self.saved}

    def __str__(self) -> str:
        return (
            f"features: {self.tokens:,} tokens, {readable(self.missing_bytes)} to write, "
            f"{readable(self.free_bytes)} free; they save {self.saved_per_epoch:.0%} of every epoch after the first, "
            f"{self.saved:.0%} of this run ({self.epochs:.3g} epochs)"
        )

    def require_space(self, folder: Path) -> None:
        """Check that the disk has enough space for the features.

        Raises:
            RequestError: the disk is too small; the message names `folder`.
        """
        if self.missing_bytes > self.free_bytes:
            raise RequestError(
                f"features would take {readable(self.missing_bytes)} in {folder}, where {readable(self.free_bytes)} "
                "are free; leave cache_features out, give another features_dir, or features_dtype: float16"
            )
