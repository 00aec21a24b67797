"""The LM loss of Medusa-2, which keeps the adapted backbone close to the original one or teaches it the text.

    loss = L_LM + lambda_0(t) * sum over heads of lambda_k * L_k

L_k is the loss of head k; the paper's weight for it is lambda_k = head_decay^k. L_LM is one of two losses: the
divergence from the original backbone, which is the same weights with the adapter off (the paper's self-distillation,
section 2.3.2), or the cross-entropy on the text.

With `adapter.teacher_tilt` (ours) the teacher p, the original backbone, is tilted towards q, the first head's
prediction of the same token one position earlier:

    target(x at t + 1)  =  p(x | ids up to t) q(x | ids up to t - 1)^teacher_tilt / normaliser

This target minimises KL(target || p) - teacher_tilt E[log q]. Among tokens that are nearly as probable, the backbone
learns to take the one that the head predicts, which raises its perplexity little.

Shapes: M positions with a next token, C of them in a chunk, H hidden size, V vocabulary, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from medusa.backbone import Backbone
from medusa.heads.independent import MedusaHeads
from train.data.packing import Batch
from train.loss.chunks import chunk_rows
from train.medusa2.adapter import without_adapter

Tilt = Callable[[slice], Tensor]
"""Function from a slice of the M positions to the tilt [C, V], which is added to the teacher's log-probabilities."""


def lm_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor, teacher: Tensor | None, teacher_tilt: Tilt | None = None
) -> Tensor:
    """Compute the LM loss in nats: the mean over M positions of KL(original || adapted), or of the cross-entropy.

    Only one chunk of logits is in memory at a time; the backward computes the logits again.

    Args:
        head: LM head of the backbone, with or without an adapter.
        hidden: [M, H] hidden states of the adapted backbone.
        labels: [M] next tokens, for the cross-entropy.
        teacher: [M, H] hidden states of the original backbone, for the divergence; `None` for the cross-entropy.
        teacher_tilt: function that returns what is added to the teacher's log-probabilities at a slice of positions.
    """
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

    loss = (
        hidden.new_zeros((), dtype=torch.float32) + 0 * hidden.sum()
    )  # so that the backward works without labels, too
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
    """Make the tilt of the teacher (the original backbone) towards the first head's predictions of the same tokens.

    The first head predicts a token one position earlier than the backbone, so a document's first position has no tilt.

    Args:
        exponent: exponent of the head's probabilities in the tilted distribution (`teacher_tilt`).
        hidden: [B, T, H] hidden states of the adapted backbone.
        batch: the B rows of T tokens.
        labelled: [B, T] True at the positions that have a next token, where the LM loss is computed.
    """
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
