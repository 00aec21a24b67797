"""The schedule of Medusa-2: how lambda_0 (weight of the heads' loss) and teacher_tilt change over a training run."""

from __future__ import annotations

import math

from train.config import AdapterConfig


def schedule_factor(config: AdapterConfig, progress: float) -> float | None:
    """Factor on lambda_0 and teacher_tilt (`train.medusa2.lm_loss`) when a share `progress` of the run is done.

    The factor is `None` at the start of the run, while only the heads learn.
    """
    if progress < config.heads_first:
        return None
    progress = (progress - config.heads_first) / (1 - config.heads_first)
    return {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}[config.schedule]


def lambda_0_at(config: AdapterConfig, progress: float) -> float:
    """The value of lambda_0, the weight of the heads' loss, when a share `progress` of the run is done.

    It is 1 at the start of the run, while only the heads learn and the LM loss is not computed.
    """
    share = schedule_factor(config, progress)
    return 1.0 if share is None else config.lambda_0 * share
