"""The schedule of Medusa-2: how lambda_0 and teacher_tilt change over a run."""

from __future__ import annotations

import math

from train.config import AdapterConfig


def risen(config: AdapterConfig, progress: float) -> float | None:
    """Share of lambda_0 and teacher_tilt that applies at `progress` (0 to 1); `None` while the heads learn alone."""
    if progress < config.heads_first:
        return None
    progress = (progress - config.heads_first) / (1 - config.heads_first)
    return {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}[config.schedule]


def heads_weight(config: AdapterConfig, progress: float) -> float:
    """lambda_0 at `progress` (0 to 1); 1 while the heads learn alone, since their loss is the only one then."""
    share = risen(config, progress)
    return 1.0 if share is None else config.lambda_0 * share
