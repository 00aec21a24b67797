"""The perplexity of a backbone with its adapter off and on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.utils.data import default_collate

from medusa.backbone import Backbone
from train.data.datasets import PackedDataset
from train.features.dataset import Features
from train.loss.labels import IGNORE, NEXT, head_labels
from train.medusa2.adapter import untouched
from train.medusa2.lm_loss import lm_loss

QUALITY_ROWS = 64  # number of rows on which the perplexity is measured


class Quality(NamedTuple):
    """Perplexities of the original backbone (before) and of the adapted one (after) on the same rows."""

    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.before:.3f} before, {self.after:.3f} after ({self.after / self.before - 1:+.2%})"


def quality(backbone: Backbone, rows: PackedDataset | Features) -> Quality:
    """Measure the perplexity of an adapted backbone on the same rows with its adapter off and on."""
    backbone.model.eval()
    with untouched(backbone.model):
        before = perplexity(backbone, rows)
    return Quality(before, perplexity(backbone, rows))


@torch.no_grad()
def perplexity(backbone: Backbone, rows: PackedDataset | Features, batch_size: int = 4) -> float:
    """Measure the perplexity of a backbone on the first `QUALITY_ROWS` rows.

    It is exp of the mean cross-entropy of the tokens that count in the loss.
    """
    total, count = 0.0, 0
    for start in range(0, min(len(rows), QUALITY_ROWS), batch_size):
        picked = [rows[index] for index in range(start, min(start + batch_size, len(rows), QUALITY_ROWS))]
        batch = {name: tensor.to(backbone.device) for name, tensor in default_collate(picked).items()}
        hidden = backbone.hidden_states(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        labels = head_labels(batch["input_ids"], batch["loss_mask"], batch["document_ids"], 1, first=NEXT)[0]
        taught = labels != IGNORE
        mean = lm_loss(backbone.head, hidden[taught], labels[taught], None)
        total, count = total + float(mean) * int(taught.sum()), count + int(taught.sum())
    return math.exp(total / max(count, 1))
