"""The loss of heads: computed in chunks of positions by default, and in a plain version that tests compare it with.

Shapes: K heads, R positions at which heads have labels, H hidden size, V vocabulary.

    objective   what head k (from 0) at position t learns about token t + k + 2     passed as
    text        the text's token                                                    labels
    argmax      the backbone's most probable token                                  labels (`backbone_choices`)
    distill     the backbone's distribution, softmax(logits / temperature)          `BackboneTeacher`, chunk by chunk
    tv, ...     the same, by how often the guess is accepted (`objectives.py`)      the same, with `acceptance`

Heads that predict a confidence c learn from one more term, as in DSpark: the cross-entropy between c and a, the share
that the guess q and its target p have in common, a = sum_x min(p(x), q(x)) = 1 - TV(p, q). A label is a p of one token.
a is held fixed. The features also learn from this term. It has no part where path dropout hides the token before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import places_of, rows_for
from train.loss.chunked import ChunkedLoss
from train.loss.objectives import PAPERS_WEIGHTING, Weighting, head_weights
from train.loss.targets import IGNORE, BackboneTeacher

BACKENDS = ("auto", "chunked", "plain", "liger")


class HeadLosses(NamedTuple):
    """Weighted loss of all heads, and plain loss, right guesses and labels of each: [K]; in Medusa-2 [K + 1], the LM
    loss last. Only heads that predict a confidence have its loss [K], which Medusa-2 does not train."""

    objective: Tensor
    """The loss to minimise, a scalar with gradients: the sum over heads of the weighted loss's mean. The mean is over
    the batch's labels of a head, or over `counts` labels."""
    loss: Tensor
    """Mean unweighted loss over each head's labels, without gradients; 0 for a head without labels. It is the
    cross-entropy in nats, unless the objective is one of `train.loss.objectives`. Except with these, a label outside
    the reduced vocabulary (`MedusaHeads.vocabulary`) counts as 0 here. In `correct` it counts as wrong."""
    correct: Tensor
    """Number of labels that are the head's best guess. With a teacher, a label is the backbone's best token."""
    total: Tensor  # number of labels of each head
    confidence: Tensor | None = None
    """Mean loss of the confidences over each head's labels in nats, also over labels outside the vocabulary."""

    @property
    def sums(self) -> Tensor:
        """The sums [3, K] of losses, right guesses and labels of each head, which can be added up over batches.

        With confidences [4, K], the last sum is that of their losses."""
        further = [] if self.confidence is None else [self.confidence * self.total]
        return torch.stack([self.loss * self.total, self.correct, self.total, *further])


def head_losses(
    heads: MedusaHeads,
    inputs: HeadInputs,
    labels: Tensor,
    lm_head: nn.Module | None,
    weighting: Weighting = PAPERS_WEIGHTING,
    teacher: BackboneTeacher | None = None,
    backend: str = "auto",
    counts: Tensor | None = None,
    in_place: bool = False,
) -> HeadLosses:
    """Compute the losses and accuracies of all K heads on a batch, from their `inputs` at the R positions with labels.

    `labels` [K, R] are token ids, `IGNORE` where a head has no label. With a `teacher`, only the places of `IGNORE` are
    used, not the ids. `lm_head` is the backbone's, for heads that share it. `backend` is one of `BACKENDS`.

    `counts` [K] is the number of labels of each head in an optimiser step, by default in this batch. The objectives of
    a step's batches add up to the objective of one large batch. `in_place`: the gradient of LM heads that learn is
    added to their `.grad` here, and not in the backward, so that there is only one (see `ChunkedLoss`); the backends
    plain and liger do not do this."""
    labelled = (labels != IGNORE).sum(1)  # also labels outside the reduced vocabulary: they are misses
    counts = (labelled if counts is None else counts).clamp_min(1)
    if backend == "plain":
        return head_losses_plain(heads, inputs, labels, lm_head, weighting, teacher, counts)
    features = heads.features(inputs)  # [K, R, H]
    places = _places(heads, labels, teacher)
    weight, bias = _lm_heads(heads, lm_head)
    # Float16 has no room for factors of 1 / the labels of a large step, so the batch's share in them is applied last.
    part, asked = labelled.max().clamp_min(1) / counts.max(), counts
    share = 1.0 if in_place else part / part.frexp().mantissa  # a power of two, by which a product is exact
    counts = counts * share
    edges = heads.edge_rows
    if backend == "liger":
        if edges is not None:  # heads without edges have no confidence
            raise RequestError("training.loss_backend liger has no edges; take auto")
        objective, loss, correct = _head_losses_liger(features, places, weight, bias, counts, weighting)
    else:
        if not torch.is_grad_enabled():
            weight, edges = weight.detach(), None if edges is None else edges.detach()  # autograd functions cannot tell
        settings = (weighting, teacher, in_place, heads.is_confident)
        objective, loss, correct, overlaps = ChunkedLoss.apply(features, weight, bias, places, counts, *settings, edges)
    found = HeadLosses(objective * share, loss * counts / labelled.clamp_min(1), correct, labelled)
    if not heads.is_confident:
        return found
    sure = heads.confidence(features).float()
    each = nn.functional.binary_cross_entropy_with_logits(sure, overlaps, reduction="none")  # [K, R]
    each = each * heads.confidence_weights(features)
    return _with_confidence(found, each, labels, asked, weighting)


def head_losses_plain(
    heads: MedusaHeads,
    inputs: HeadInputs,
    labels: Tensor,
    lm_head: nn.Module | None,
    weighting: Weighting = PAPERS_WEIGHTING,
    teacher: BackboneTeacher | None = None,
    counts: Tensor | None = None,
) -> HeadLosses:
    """Compute the same as `head_losses` in the simplest way, for tests: all logits at once, and autograd."""
    weight, bias = _lm_heads(heads, lm_head)  # a shared LM head may be in bfloat16, and the heads in float32
    features = heads.features(inputs)
    logits = heads.logits(features, lambda x: nn.functional.linear(x.to(weight.dtype), weight, bias))
    soft = None if teacher is None else teacher.targets(slice(None), labels)
    log_p = (logits.float() / (1.0 if soft is None else soft.temperature)).log_softmax(-1)  # [K, R, V]
    places = _places(heads, labels, teacher) if soft is None else soft.labels
    at_label = log_p.gather(-1, places.clamp_min(0)[..., None])[..., 0]
    accepted, each = at_label.exp(), -at_label  # [K, R] probability of acceptance, and loss
    if soft is not None:
        wanted = soft.distributions[soft.which]
        each = -(wanted * log_p).sum(-1)
        if soft.acceptance is not None:
            accepted = soft.acceptance.probability(wanted, log_p.exp())
            each = soft.acceptance.loss(accepted, each)
    labelled, total = places != IGNORE, (labels != IGNORE).sum(1)
    weighted = (each * weighting(accepted, labelled) * labelled).sum(1)
    counts = (total if counts is None else counts).clamp_min(1)
    loss = (each * labelled).sum(1) / total.clamp_min(1)
    correct = ((log_p.argmax(-1) == places) & labelled).sum(1)
    found = HeadLosses((weighted / counts).sum(), loss.detach(), correct, total)
    if not heads.is_confident:
        return found
    if soft is None:
        wanted = nn.functional.one_hot(places.clamp_min(0), log_p.shape[-1]).float()
    missing = 1 - wanted.sum(-1)  # the probability of tokens that the heads do not guess among
    variation = ((log_p.exp() - wanted).abs().sum(-1) + missing) / 2
    target, sure = ((1 - variation) * labelled).detach(), heads.confidence(features).float().sigmoid()
    each = (-target * sure.log() - (1 - target) * (1 - sure).log()) * heads.confidence_weights(features)
    return _with_confidence(found, each, labels, counts, weighting)


def _with_confidence(
    found: HeadLosses, each: Tensor, labels: Tensor, counts: Tensor, weighting: Weighting
) -> HeadLosses:
    """Add the loss of confidences [K, R] at each position to the losses of guesses; `counts` as in `head_losses`."""
    sums = (each * (labels != IGNORE)).sum(1)
    weights = head_weights(len(sums), weighting.decay).to(sums.device)  # dpace weights are those of guesses
    objective = found.objective + (weights * sums / counts).sum()
    return found._replace(objective=objective, confidence=sums.detach() / found.total.clamp_min(1))


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
    """The weights of the K heads' LM heads and `None`, or weights [V, H] and bias of the shared LM head.

    Own LM heads are [K, H, V], and one for all heads is [1, H, V]. H is the hidden size, V the number of tokens that
    heads guess among."""
    if heads.lm_heads is not None:
        return heads.lm_heads, None
    assert lm_head is not None
    rows = rows_for(heads, lm_head)
    return rows.weight, rows.bias


def _head_losses_liger(
    features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor | None, counts: Tensor, weighting: Weighting
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `ChunkedLoss` returns with Liger's fused linear cross-entropy, head by head, in Liger's chunks."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses, shares = [], []
    for head, feature in enumerate(features):
        weight = weights if weights.dim() == 2 else weights[head % len(weights)].T
        out = liger_fused_linear_cross_entropy(
            feature.to(weight.dtype), weight, labels[head], bias, ignore_index=IGNORE, return_token_accuracy=True
        )
        losses.append(out.loss)
        shares.append(out.token_accuracy)
    total = (labels != IGNORE).sum(1)
    loss = torch.where(total > 0, torch.stack(losses), 0.0)  # Liger returns NaN for a head without labels
    share = torch.where(total > 0, torch.stack(shares), 0.0)
    loss = loss * total / counts
    objective = (loss * head_weights(len(total), weighting.decay).to(loss.device)).sum()
    return objective, loss.detach(), (share * total).round().long()
