"""The loss of heads, in chunks of positions by default, and the plain version that it must equal.

Shapes: K heads, R positions that are taught, H hidden size, V vocabulary.

    objective   target of a head                                                given as
    text        the text's token there                                          labels
    argmax      the backbone's most probable token there                        labels (`backbone_choices`)
    distill     the backbone's distribution there, softmax(logits / temperature)    `BackboneTeacher`, chunk by chunk
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import places_of, rows_for
from train.loss.chunked import ChunkedLoss
from train.loss.labels import IGNORE
from train.loss.teacher import BackboneTeacher
from train.loss.weighting import PAPERS_WEIGHTING, Weighting, head_weights

BACKENDS = ("auto", "chunked", "plain", "liger")


class HeadLosses(NamedTuple):
    """The figures of a batch that training needs, all [K]."""

    objective: Tensor
    """Each head's part of the minimised loss: weighted cross-entropies in nats, averaged over its labels; carries
    gradients."""
    loss: Tensor
    """Mean cross-entropy in nats over the head's labels, unweighted, 0 if it has none; no gradients. A label that the
    head cannot guess (`MedusaHeads.vocabulary`) counts as 0 here, and as wrong in `correct`."""
    correct: Tensor
    """Number of labels that are the head's best guess; for a distribution, its most probable token is the label."""
    total: Tensor
    """Number of all labels."""


def head_losses(
    heads: MedusaHeads,
    inputs: HeadInputs,
    labels: Tensor,
    lm_head: nn.Module | None,
    weighting: Weighting = PAPERS_WEIGHTING,
    teacher: BackboneTeacher | None = None,
    backend: str = "auto",
) -> HeadLosses:
    """Losses and accuracies of all heads.

    Args:
        inputs: of the heads at the R taught positions.
        labels: [K, R] tokens, or IGNORE where a head is not taught; with a `teacher`, only IGNORE matters.
        lm_head: the backbone's, for heads that share it.
        backend: chunked (auto's choice), plain (all logits at once) or liger (a GPU and labels only).
    """
    if backend == "plain":
        return head_losses_plain(heads, inputs, labels, lm_head, weighting, teacher)
    features = heads.features(inputs)  # [K, R, H]
    places = _places(heads, labels, teacher)
    weight, bias = _lm_heads(heads, lm_head)
    if backend == "liger":
        losses = _head_losses_liger(features, places, weight, bias, weighting)
    else:
        losses = HeadLosses(*ChunkedLoss.apply(features, weight, bias, places, weighting, teacher))
    counts = (labels != IGNORE).sum(1)  # includes labels that the heads cannot guess: they are misses
    share = losses.total / counts.clamp_min(1)
    return HeadLosses(losses.objective * share, losses.loss * share, losses.correct, counts)


def head_losses_plain(
    heads: MedusaHeads,
    inputs: HeadInputs,
    labels: Tensor,
    lm_head: nn.Module | None,
    weighting: Weighting = PAPERS_WEIGHTING,
    teacher: BackboneTeacher | None = None,
) -> HeadLosses:
    """The obvious version of `head_losses`, its oracle: all logits at once, and autograd's gradients."""
    weight, bias = _lm_heads(heads, lm_head)  # a shared one may be kept in bfloat16 with heads in float32
    logits = heads(inputs, lambda features: nn.functional.linear(features.to(weight.dtype), weight, bias))
    log_p = logits.float().log_softmax(-1)  # [K, R, V]
    if teacher is None:
        places = _places(heads, labels, teacher)
        cross_entropy = -log_p.gather(-1, places.clamp_min(0)[..., None])[..., 0]
    else:
        soft, which, places = teacher.targets(slice(None), labels)
        cross_entropy = -(soft[which] * log_p).sum(-1)
    taught, count = places != IGNORE, (labels != IGNORE).sum(1)
    mean = taught / count.clamp_min(1)[:, None]
    probability = log_p.gather(-1, places.clamp_min(0)[..., None])[..., 0].exp()
    objective = (cross_entropy * weighting(probability, taught) * mean).sum(1)
    correct = ((log_p.argmax(-1) == places) & taught).sum(1)
    return HeadLosses(objective, (cross_entropy * mean).sum(1).detach(), correct, count)


def _places(heads: MedusaHeads, labels: Tensor, teacher: BackboneTeacher | None) -> Tensor:
    """Places of the labels [K, R] among the heads' logits; IGNORE also for labels that the heads never guess.

    Such a label is a certain miss. It teaches nothing, and D-PACE's chain ends before it, as at the end of a text. (A
    teacher's targets hold such places already.)
    """
    if heads.vocabulary is None or teacher is not None:
        return labels
    assert heads.config.vocab_size is not None
    places = places_of(heads.vocabulary, labels.clamp_min(0), heads.config.vocab_size)
    return torch.where((labels == IGNORE) | (places < 0), IGNORE, places)


def _lm_heads(heads: MedusaHeads, lm_head: nn.Module | None) -> tuple[Tensor, Tensor | None]:
    """The weights [K, H, V] of the heads' own LM heads, or the weights [V, H] and bias [V] of a shared one."""
    if heads.lm_heads is not None:
        return heads.lm_heads, None
    assert lm_head is not None
    rows = rows_for(heads, lm_head)
    return rows.weight, rows.bias


def _head_losses_liger(
    features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor | None, weighting: Weighting
) -> HeadLosses:
    """Liger's fused linear cross-entropy, head by head. Liger chunks by itself, with one kernel per chunk."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses, shares = [], []
    for head, feature in enumerate(features):
        weight = weights if weights.dim() == 2 else weights[head].T
        out = liger_fused_linear_cross_entropy(
            feature.to(weight.dtype), weight, labels[head], bias, ignore_index=IGNORE, return_token_accuracy=True
        )
        losses.append(out.loss)
        shares.append(out.token_accuracy)
    count = (labels != IGNORE).sum(1)
    loss = torch.where(count > 0, torch.stack(losses), 0.0)  # a mean over nothing is not a number
    share = torch.where(count > 0, torch.stack(shares), 0.0)
    objective = loss * head_weights(len(count), weighting.decay).to(loss.device)
    return HeadLosses(objective, loss.detach(), (share * count).round().long(), count)
