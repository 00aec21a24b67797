"""The loss of heads in chunks of positions, so that the K x R x V logits are never in memory at once.

The gradients are computed in the forward, while a chunk's logits are in memory.

Shapes: K heads, R positions at which heads have labels, C of them in a chunk, H hidden size, V vocabulary. Capital
letters at the end of a name are its shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from medusa.argmax import argmax
from train.loss.objectives import Weighting
from train.loss.targets import IGNORE, BackboneTeacher, SoftTargets, chunk_rows

NO_LESS = -80.0
"""Logarithm of the least probability. Below it float32 has denormal numbers, with which a CPU computes 10 to 80 times
more slowly, and which are too small to change a sum of 1."""


class ChunkedLoss(torch.autograd.Function):
    """Autograd function that computes the losses of K heads from their features.

    Its inputs are features [K, R, H] of hidden size H at R positions, LM head weights and bias, labels [K, R], the
    numbers [K], not 0, by which each head's sums are divided, the rule for loss weights, the teacher for distillation,
    whether the gradient of `weight` is added to `weight.grad`, whether overlaps are wanted, and `edges`: r further
    columns of the LM head that learn, for features [K, R, H + r]. It returns the objective, a scalar, for each head [K]
    the plain loss and the number of right guesses (`train.loss.heads.HeadLosses`), and the overlaps [K, R], if wanted:
    1 minus the total variation distance between guess and target, 0 without a label that the heads can guess.

    The forward also computes the gradients, and applies the loss weights to them, because it sums those of the heads'
    own LM heads over the positions: a sum cannot be weighted by position. For the same reason the objective is a
    scalar: if the heads have one LM head, its gradient is a sum over heads, too.

    Autograd would add the gradient of `weight` to a waiting one, and so hold two. With `in_place`, the forward itself
    adds to `weight.grad`. It must then be followed by one backward, in which the objective's gradient is 1."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_KRH: Tensor,
        weight: Tensor,  # [V, H] of the shared LM head, [K, H, V] of own ones, or [1, H, V] of one for all heads
        bias_V: Tensor | None,
        labels: Tensor,
        counts: Tensor,
        weighting: Weighting,
        teacher: BackboneTeacher | None,
        in_place: bool,
        overlapping: bool,
        edges: Tensor | None = None,  # [V, r]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device = x_KRH.device.type
        # Products use the LM head's dtype, which may be bfloat16 with heads in float32, or autocast's dtype.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        num_heads, positions, _ = x_KRH.shape
        own = weight.dim() == 3
        matrix = weight.to(dtype)
        if not own:
            matrix = matrix.T
        elif len(matrix) == 1:
            matrix = matrix[0]
        columns = None if edges is None else edges.to(dtype).T
        learns_x, learns_weight, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad_x = torch.empty_like(x_KRH) if learns_x else None
        grad_weight = None
        if learns_weight and own:  # a shared LM head is frozen
            grad_weight = weight.grad if in_place else None
            if grad_weight is None:
                grad_weight = torch.zeros_like(weight)
        figures = x_KRH.new_zeros(3, num_heads, dtype=torch.float)
        overlaps = x_KRH.new_zeros(num_heads, positions, dtype=torch.float)
        grad_edges = torch.zeros_like(edges.T)[None] if edges is not None and ctx.needs_input_grad[-1] else None  # type: ignore[attr-defined]
        step = chunk_rows(num_heads, matrix.shape[-1], device, own)
        with torch.autocast(device, enabled=False):
            for start in range(0, positions, step):
                rows = slice(start, start + step)
                x_KCH, target, soft = x_KRH[:, rows].to(dtype), labels[:, rows], None
                if teacher is not None:
                    soft = teacher.targets(rows, target)
                    target = soft.labels
                mean = (target != IGNORE) / counts[:, None]
                grads = (None if grad_x is None else grad_x[:, rows], grad_weight, grad_edges)
                wanted = overlaps[:, rows] if overlapping else None
                figures += _chunk(x_KCH, (matrix, columns), bias_V, target, soft, mean, weighting, grads, wanted)
                del soft  # otherwise two chunks' distributions would be in memory at once
        objective, loss, correct = figures[0].sum(), figures[1].clone(), figures[2].long()
        if in_place and grad_weight is not None:
            weight.grad, grad_weight = grad_weight, None
        ctx.save_for_backward(grad_x, grad_weight, grad_edges)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(loss, correct, overlaps)
        return objective, loss, correct, overlaps

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_edges = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = grads[0]  # gradient of the objective
        # An own LM head's gradient is the largest tensor here. It is scaled in place, so a second backward is an error.
        scaled_weight = None if grad_weight is None else grad_weight.mul_(scale)
        scaled_x = None if grad_x is None else grad_x * scale.to(grad_x.dtype)
        scaled_edges = None if grad_edges is None else grad_edges[0].T * scale
        return scaled_x, scaled_weight, None, None, None, None, None, None, None, scaled_edges


def _chunk(
    x_KCH: Tensor,
    matrices: tuple[Tensor, Tensor | None],
    bias_V: Tensor | None,
    target_KC: Tensor,
    soft: SoftTargets | None,
    mean_KC: Tensor,
    weighting: Weighting,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    overlaps: Tensor | None,
) -> Tensor:
    """Compute weighted loss, plain loss and right guesses [3, K] of K heads in a chunk of C positions, and gradients.

    `matrices` holds the weights [H, V] of one LM head for all heads, or [K, H, V] of own ones, and those [r, V] of
    edges, or `None`; then features are [K, C, H + r]. Labels `target_KC` are
    indices into the logits, or `IGNORE`. If the heads learn distributions, these are `soft`. `mean_KC` is each label's
    factor in its head's mean loss: 1 / number of labels. Of `grads`, the first gets
    the gradient of the features, and those of LM heads and edges that learn are added to the others [K or 1, ..., V],
    unless these are `None`. `overlaps` [K, C] gets those of `ChunkedLoss`, unless it is `None`."""
    (matrix, columns), (grad_x, grad_weight, grad_edges) = matrices, grads
    x_KCH, codes = x_KCH.tensor_split([matrix.shape[-2]], dim=-1)
    logits = _times(x_KCH, matrix)  # [K, C, V]; becomes the gradient, in place
    logits = (logits if columns is None else logits + codes @ columns).float()
    if bias_V is not None:
        logits += bias_V
    temperature = 1.0 if soft is None else soft.temperature
    if temperature != 1:
        logits /= temperature
    labelled = target_KC != IGNORE
    # Head by head, to use less memory.
    every, wanted = enumerate(target_KC.clamp_min(0)), overlaps is not None
    parts = [_to_gradient(logits[head], target, soft, head, wanted) for head, target in every]
    loss_KC, accepted_KC, best_KC, shared_KC = (torch.stack(part) for part in zip(*parts, strict=True))
    if overlaps is not None:
        overlaps.copy_(shared_KC * labelled)
    correct = ((best_KC == target_KC) & labelled).sum(1)
    weights = weighting(accepted_KC, labelled) * mean_KC
    if temperature != 1:
        logits /= temperature  # the gradient is wanted by the logits before the division
    if any(grad is not None for grad in grads):
        gradient_KCV = logits.to(matrix.dtype)
        if grad_x is not None:
            of_x = [_times(gradient_KCV, part.mT) for part in matrices if part is not None]
            grad_x.copy_(torch.cat(of_x, dim=-1).float() * weights[..., None])
        if grad_edges is not None:
            _add_products(grad_edges, (codes * weights[..., None]).to(matrix.dtype), gradient_KCV)
        if grad_weight is not None:
            _add_products(grad_weight, (x_KCH * weights[..., None]).to(matrix.dtype), gradient_KCV)
    return torch.stack([(loss_KC * weights).sum(1), (loss_KC * mean_KC).sum(1), correct])


def _to_gradient(
    logits_CV: Tensor, target_C: Tensor, soft: SoftTargets | None, head: int, overlapping: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Replace a head's logits at C positions by the gradient of its loss.

    Return [C] the loss, the probability of acceptance, the best guess, and what guess and target have in common. With
    the probability, dpace weights the loss. Unless the objective is one of acceptance, it is the probability of the
    label `target_C`. The last one is sum_x min(p(x), q(x)), computed only if `overlapping`."""
    best, label = argmax(logits_CV), target_C[:, None]
    if soft is None:
        # In place, with one exponential for each logit, where `log_softmax` and `exp` take two. None exceeds 1.
        logits_CV -= logits_CV.gather(1, best[:, None])
        at_label = logits_CV.gather(1, label)
        total = logits_CV.clamp_min_(NO_LESS).exp_().sum(-1, keepdim=True)
        logits_CV /= total
        logits_CV.scatter_add_(1, label, torch.full_like(at_label, -1.0))
        loss = (total.log() - at_label)[:, 0]
        at_label = loss.neg().exp()  # also the overlap with a target of one token
        return loss, at_label, best, at_label
    log_q = logits_CV.log_softmax(-1)
    at_label = log_q.gather(1, label)[:, 0]
    q = torch.clamp_min(log_q, NO_LESS, out=logits_CV).exp_()
    p = soft.distributions[soft.which[head]]
    cross_entropy = -torch.linalg.vecdot(p, log_q)
    del log_q
    overlap = torch.minimum(p, q).sum(-1) if overlapping else cross_entropy
    if soft.acceptance is None:
        q -= p
        return cross_entropy, at_label.exp(), best, overlap
    accepted = soft.acceptance.probability(p, q)
    soft.acceptance.gradient_(q, p, accepted)
    return soft.acceptance.loss(accepted, cross_entropy), accepted, best, overlap


def _times(x_KCA: Tensor, matrix: Tensor) -> Tensor:
    """Multiply vectors [K, C, A] by one matrix [A, B], or by each head's own [K, A, B]."""
    if matrix.dim() == 3:
        return torch.bmm(x_KCA, matrix)
    # In two dimensions, because otherwise `matmul` may copy the matrix for each head.
    return (x_KCA.flatten(0, 1) @ matrix).unflatten(0, x_KCA.shape[:2])


def _add_products(total_KHV: Tensor, x_KCH: Tensor, gradient_KCV: Tensor) -> None:
    """Add to `total_KHV` each head's features times the gradient of its logits; to [1, H, V], those of all heads."""
    if len(total_KHV) == 1:
        x_KCH, gradient_KCV = x_KCH.flatten(0, 1)[None], gradient_KCV.flatten(0, 1)[None]
    for total, x, gradient in zip(total_KHV, x_KCH, gradient_KCV, strict=True):
        if total.dtype == x.dtype:
            total.addmm_(x.T, gradient)
        else:
            total += x.T @ gradient
