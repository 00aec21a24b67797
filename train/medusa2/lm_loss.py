"""The LM loss of Medusa-2, which keeps the adapted backbone close to the original one or teaches it the text.

    loss = L_LM + lambda_0(progress) * sum over heads of lambda_k * L_k

L_k is the loss of head k; the paper's weight for it is lambda_k = head_decay^k. L_LM is one of two losses: the
divergence from the original backbone, which is the same weights with the adapter off (the paper's self-distillation,
section 2.3.2), or the cross-entropy on the text. `progress` is the share of the run that is done.

With `adapter.teacher_tilt` (ours) the teacher p, the original backbone, is tilted towards q, the prediction that the
first head makes, one position earlier, of the same token:

    target(x at t + 1)  =  p(x | ids up to t) q(x | ids up to t - 1)^teacher_tilt / normaliser

This target minimises KL(target || p) - teacher_tilt E_target[log q]. Among tokens that are nearly equally probable, the
backbone learns to take the one that the head predicts. This raises the backbone's perplexity little.

Shapes: M positions with a next token, C of them in a chunk, H hidden size, V vocabulary, B rows, T tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from medusa.backbone import Backbone
from medusa.heads.independent import MedusaHeads
from train.data.datasets import PackedDataset
from train.data.packing import Batch
from train.features.files import Features
from train.loss.targets import IGNORE, NEXT, chunk_rows, head_labels
from train.medusa2.adapter import adapter_disabled, without_adapter
from train.states import packed_states

QUALITY_ROWS = 64  # number of rows on which the perplexity is measured
Tilt = Callable[[slice], Tensor]
"""Function from a slice of the M positions to the tilt [C, V], which is added to the teacher's log-probabilities."""


def lm_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor, teacher: Tensor | None, teacher_tilt: Tilt | None = None
) -> Tensor:
    """Compute the LM loss in nats: the mean over M positions of KL(original || adapted), or of the cross-entropy.

    Only one chunk of logits is in memory at a time; the backward computes the logits again. `head` is the backbone's LM
    head, adapted or not, and `hidden` [M, H] the adapted backbone's hidden states of size H. KL needs the original
    backbone's hidden states `teacher` [M, H]; a `teacher_tilt` (from `tilt_towards`) is added to its log-probabilities.
    Without a teacher, the loss is the cross-entropy of the next tokens `labels` [M]."""
    plain_head = without_adapter(head)

    def chunk(hidden_rows: Tensor, rows: slice) -> Tensor:
        log_q = head(hidden_rows).float().log_softmax(-1)
        if teacher is None:
            return F.nll_loss(log_q, labels[rows], reduction="sum")
        with torch.no_grad():
            log_p = plain_head(teacher[rows]).float().log_softmax(-1)
            if teacher_tilt is not None:
                log_p = (log_p + teacher_tilt(rows)).log_softmax(-1)
        return F.kl_div(log_q, log_p, log_target=True, reduction="sum")

    # The hidden states take part, so that the backward works without labels, too.
    loss = hidden.new_zeros((), dtype=torch.float32) + 0 * hidden.sum()
    weight = plain_head.weight
    assert isinstance(weight, Tensor)
    step = chunk_rows(1, weight.shape[0], hidden.device.type)
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        loss = loss + checkpoint(chunk, hidden[rows], rows, use_reentrant=False)
    return loss / max(len(hidden), 1)


@torch.no_grad()
def tilt_towards(
    heads: MedusaHeads, backbone: Backbone, exponent: float, hidden: Tensor, batch: Batch, labelled: Tensor
) -> Tilt:
    """Make the tilt of the teacher (the original backbone): `exponent` times the first head's log-probabilities.

    `exponent` is adapter.teacher_tilt at this point of its schedule. The first head reads `hidden` [B, T, H], the
    adapted backbone's hidden states of size H for B rows of T tokens. It predicts a token one position earlier than the
    backbone, so a document's first position has no tilt. `labelled` [B, T] is True where there is an LM loss."""
    lm_head, documents = without_adapter(backbone.head), batch["document_ids"]
    before = (batch["position_ids"][:, :-1], documents[:, :-1])
    inputs = heads.inputs(hidden[:, :-1], batch["input_ids"], backbone.embed, *before, num_heads=1)
    training = heads.training
    heads.eval()  # without dropout, as in decoding
    features = F.pad(heads.features(inputs, 1)[0], (0, 0, 1, 0))[labelled]
    heads.train(training)
    if heads.lm_heads is None:
        features = features.to(next(lm_head.parameters()).dtype)
    predicted = F.pad(documents[:, 1:] == documents[:, :-1], (1, 0))[labelled]
    exponents = exponent * predicted.float()[:, None]

    def gain(rows: slice) -> Tensor:
        return exponents[rows] * heads.logits(features[None, rows], lm_head)[0].float().log_softmax(-1)

    return gain


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
    """Perplexity (exp of mean cross-entropy) of the tokens that count in the loss, in the first `QUALITY_ROWS` rows."""
    total, count = 0.0, 0
    for rows_together in DataLoader(Subset(rows, range(min(len(rows), QUALITY_ROWS))), batch_size):
        batch = {name: tensor.to(backbone.device) for name, tensor in rows_together.items()}
        hidden = packed_states(backbone, batch["input_ids"], batch["position_ids"])
        labels = head_labels(batch["input_ids"], batch["loss_mask"], batch["document_ids"], 1, first=NEXT)[0]
        labelled = labels != IGNORE
        mean = lm_loss(backbone.head, hidden[labelled], labels[labelled], None)
        total, count = total + float(mean) * int(labelled.sum()), count + int(labelled.sum())
    return math.exp(total / max(count, 1))
