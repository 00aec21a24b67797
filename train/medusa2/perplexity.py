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
from train.medusa2.adapter import adapter_disabled
from train.medusa2.lm_loss import lm_loss

QUALITY_ROWS = 64  # number of rows on which the perplexity is measured


class Perplexities(NamedTuple):
    """Perplexities of the original backbone (before) and of the adapted one (after) on the same rows."""

    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.before:.3f} before, {self.after:.3f} after ({self.after / self.before - 1:+.2%})"


def measure_perplexities(backbone: Backbone, rows: PackedDataset | Features) -> Perplexities:
    """Measure the perplexity of an adapted backbone on the same rows with its adapter off and on."""
    backbone.model.eval()
    with adapter_disabled(backbone.model):
        before = perplexity(backbone, rows)
    return Perplexities(before, perplexity(backbone, rows))


@torch.no_grad()
def perplexity(backbone: Backbone, rows: PackedDataset | Features, batch_size: int = 4) -> float:
    """Measure the perplexity of a backbone on the first `QUALITY_ROWS` rows.

    The perplexity is exp of the mean cross-entropy of the tokens that count in the loss.
    """
    total, count = 0.0, 0
    for start in range(0, min(len(rows), QUALITY_ROWS), batch_size):
        picked = [rows[index] for index in range(start, min(start + batch_size, len(rows), QUALITY_ROWS))]
        batch = {name: tensor.to(backbone.device) for name, tensor in default_collate(picked).items()}
        hidden = backbone.hidden_states(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        labels = head_labels(batch["input_ids"], batch["loss_mask"], batch["document_ids"], 1, first=NEXT)[0]
        labelled = labels != IGNORE
        mean = lm_loss(backbone.head, hidden[labelled], labels[labelled], None)
        total, count = total + float(mean) * int(labelled.sum()), count + int(labelled.sum())
    return math.exp(total / max(count, 1))
