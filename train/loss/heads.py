"""The loss of heads: computed in chunks of positions by default, and in a plain version that tests compare it with.

Shapes: K heads, R positions at which heads have labels, H hidden size, V vocabulary.

    objective   what head k (from 0) at position t learns about token t + k + 2     passed as
    text        the text's token                                                    labels
    argmax      the backbone's most probable token                                  labels (`backbone_choices`)
    distill     the backbone's distribution, softmax(logits / temperature)          `BackboneTeacher`, chunk by chunk
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
    """Weighted loss, plain loss, right guesses and labels of K heads: [K]; in Medusa-2 [K + 1], the LM loss last."""

    objective: Tensor
    """Each head's part of the loss, with gradients: the mean over its labels of the weighted cross-entropy, in nats."""
    loss: Tensor
    """Mean unweighted cross-entropy over each head's labels, in nats, without gradients; 0 for a head without labels. A
    label outside the reduced vocabulary (`MedusaHeads.vocabulary`) counts as 0 here, and as wrong in `correct`."""
    correct: Tensor
    """Number of labels that are the head's best guess. In distillation, a label is the backbone's best token."""
    total: Tensor  # number of labels of each head


def head_losses(
    heads: MedusaHeads,
    inputs: HeadInputs,
    labels: Tensor,
    lm_head: nn.Module | None,
    weighting: Weighting = PAPERS_WEIGHTING,
    teacher: BackboneTeacher | None = None,
    backend: str = "auto",
) -> HeadLosses:
    """Compute the losses and accuracies of all K heads on a batch, from their `inputs` at the R positions with labels.

    `labels` [K, R] are token ids, `IGNORE` where a head has no label. With a `teacher`, only the places of `IGNORE` are
    used, not the ids. `lm_head` is the backbone's, for heads that share it. `backend` is one of `BACKENDS`."""
    if backend == "plain":
        return head_losses_plain(heads, inputs, labels, lm_head, weighting, teacher)
    features = heads.features(inputs)  # [K, R, H]
    places = _places(heads, labels, teacher)
    weight, bias = _lm_heads(heads, lm_head)
    if backend == "liger":
        losses = _head_losses_liger(features, places, weight, bias, weighting)
    else:
        losses = HeadLosses(*ChunkedLoss.apply(features, weight, bias, places, weighting, teacher))
    # Labels outside the reduced vocabulary are counted: they are misses.
    counts = (labels != IGNORE).sum(1)
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
    """Compute the same as `head_losses` in the simplest way, for tests: all logits at once, and autograd."""
    weight, bias = _lm_heads(heads, lm_head)  # a shared LM head may be in bfloat16, and the heads in float32
    logits = heads(inputs, lambda features: nn.functional.linear(features.to(weight.dtype), weight, bias))
    log_p = logits.float().log_softmax(-1)  # [K, R, V]
    soft = None if teacher is None else teacher.targets(slice(None), labels)
    places = _places(heads, labels, teacher) if soft is None else soft.labels
    at_label = log_p.gather(-1, places.clamp_min(0)[..., None])[..., 0]
    cross_entropy = -at_label if soft is None else -(soft.distributions[soft.which] * log_p).sum(-1)
    labelled, count = places != IGNORE, (labels != IGNORE).sum(1)
    mean = labelled / count.clamp_min(1)[:, None]
    objective = (cross_entropy * weighting(at_label.exp(), labelled) * mean).sum(1)
    correct = ((log_p.argmax(-1) == places) & labelled).sum(1)
    return HeadLosses(objective, (cross_entropy * mean).sum(1).detach(), correct, count)


def _places(heads: MedusaHeads, labels: Tensor, teacher: BackboneTeacher | None) -> Tensor:
    """Convert labels [K, R] of K heads at R positions from token ids to indices into the heads' logits.

    A label outside a reduced vocabulary also becomes `IGNORE`: heads never guess it, so it has no loss, and dpace
    counts its probability as 0. With a `teacher`, which does not use the ids, labels are returned unchanged."""
    if heads.vocabulary is None or teacher is not None:
        return labels
    assert heads.config.vocab_size is not None
    places = places_of(heads.vocabulary, labels.clamp_min(0), heads.config.vocab_size)
    return torch.where((labels == IGNORE) | (places < 0), IGNORE, places)


def _lm_heads(heads: MedusaHeads, lm_head: nn.Module | None) -> tuple[Tensor, Tensor | None]:
    """The weights [K, H, V] of the K heads' own LM heads and `None`, or weights [V, H] and bias of the shared LM head.

    H is the hidden size, V the number of tokens that heads guess among."""
    if heads.lm_heads is not None:
        return heads.lm_heads.expand(heads.config.num_heads, -1, -1), None  # with `lm_head: one` they share one
    assert lm_head is not None
    rows = rows_for(heads, lm_head)
    return rows.weight, rows.bias


def _head_losses_liger(
    features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor | None, weighting: Weighting
) -> HeadLosses:
    """Compute the losses with Liger's fused linear cross-entropy, head by head. Liger makes its own chunks."""
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
    loss = torch.where(count > 0, torch.stack(losses), 0.0)  # Liger returns NaN for a head without labels
    share = torch.where(count > 0, torch.stack(shares), 0.0)
    objective = loss * head_weights(len(count), weighting.decay).to(loss.device)
    return HeadLosses(objective, loss.detach(), (share * count).round().long(), count)
