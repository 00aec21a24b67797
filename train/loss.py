"""Loss and accuracy of heads, one head at a time, so that K x T x V logits are never held.

Shapes: K heads, M positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.backbone import Backbone
from medusa.heads import LMHead, MedusaHeads
from train.labels import IGNORE

CHUNK = 256  # rows of logits at a time: 4 MB at V = 4096 stays in a core's cache


class HeadLosses(NamedTuple):
    """What training needs to know about each head; all [K]."""

    loss: Tensor
    """Mean cross-entropy in nats over the head's labels, 0 where it has none; carries gradients."""
    correct: Tensor
    """How many labels are the head's best guess."""
    total: Tensor
    """How many labels there are."""


def head_weights(num_heads: int, decay: float) -> Tensor:
    """[K] decay^k: a far head matters only where all nearer ones were right (paper section 2.2.1, lambda_k = 0.8^k)."""
    return decay ** torch.arange(num_heads, dtype=torch.float32)


def head_losses_plain(heads: MedusaHeads, hidden: Tensor, labels: Tensor, lm_head: LMHead | None) -> HeadLosses:
    """The obvious version, with all logits at once: the oracle.

    Args:
        hidden: [M, H] of the frozen backbone.
        labels: [K, M] or IGNORE.
    """
    logits = heads(hidden, lm_head).float()  # [K, M, V]
    count = (labels != IGNORE).sum(1)
    loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none").sum(1)
    correct = ((logits.argmax(-1) == labels) & (labels != IGNORE)).sum(1)
    return HeadLosses(loss / count.clamp_min(1), correct, count)


def head_losses(heads: MedusaHeads, hidden: Tensor, labels: Tensor, lm_head: nn.Module | None) -> HeadLosses:
    """The same figures and gradients, with at most `CHUNK` rows of logits in memory."""
    features = heads.features(hidden)  # [K, M, H]
    losses, correct, counts = [], [], []
    for head, feature in enumerate(features):
        taught = (labels[head] != IGNORE).nonzero()[:, 0]
        rows, row_labels = feature[taught], labels[head][taught]
        if heads.lm_heads is not None:
            weight, bias = heads.lm_heads[head].T, None
        else:
            weight, bias = _linear(lm_head)
        # A shared LM head may be kept in bfloat16 beside heads in float32.
        loss, right = _ChunkedCrossEntropy.apply(rows.to(weight.dtype), weight, bias, row_labels)
        losses.append(loss / max(len(taught), 1))
        correct.append(right)
        counts.append(len(taught))
    return HeadLosses(torch.stack(losses), torch.stack(correct), torch.tensor(counts, device=hidden.device))


def _linear(lm_head: nn.Module | None) -> tuple[Tensor, Tensor | None]:
    if not isinstance(lm_head, nn.Linear):
        raise TypeError(f"the backbone's LM head is a {type(lm_head).__name__}; a Linear is needed here")
    return lm_head.weight, lm_head.bias


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of x W^T + b; gradients are made in the forward, chunk by chunk, and nothing is kept."""

    @staticmethod
    def forward(
        ctx: Any, x_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        wants_x, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_x = torch.zeros_like(x_MH) if wants_x else None
        grad_weight = torch.zeros_like(weight_VH) if wants_weight else None
        loss = x_MH.new_zeros((), dtype=torch.float32)
        correct = torch.zeros((), dtype=torch.long, device=x_MH.device)
        for start in range(0, len(x_MH), CHUNK):
            rows, target = x_MH[start : start + CHUNK], labels[start : start + CHUNK, None]
            logits = F.linear(rows, weight_VH, bias_V).float()
            correct += (logits.argmax(-1, keepdim=True) == target).sum()
            log_p = logits.log_softmax(-1)
            loss -= log_p.gather(1, target).sum()
            if grad_x is None and grad_weight is None:
                continue
            grad = log_p.exp_().scatter_add_(1, target, torch.full_like(target, -1, dtype=log_p.dtype))
            grad = grad.to(rows.dtype)
            if grad_x is not None:
                grad_x[start : start + CHUNK] = grad @ weight_VH
            if grad_weight is not None:
                grad_weight += grad.T @ rows
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype),
            None,
            None,
        )


@torch.no_grad()
def backbone_choices(backbone: Backbone, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """What the backbone itself would have put at each position of a text: its argmax there [B, T].

    On sampled text this is the token that greedy decoding takes after that prefix. The first position keeps its token.
    """
    flat = hidden[:, :-1].flatten(0, 1)
    chosen = torch.cat([backbone.lm_head(rows).argmax(-1) for rows in flat.split(CHUNK)])
    return torch.cat([input_ids[:, :1], chosen.reshape(len(input_ids), -1)], dim=1)


def weighted(losses: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """The training loss: losses [K] summed with weights [K]."""
    return (losses * torch.as_tensor(weights, device=losses.device, dtype=losses.dtype)).sum()
