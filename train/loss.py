"""What heads are taught, and how wrong they are, in chunks of positions: K x T x V logits are never held.

Shapes: K heads, R positions that are taught, C of them in a chunk, H hidden size, V vocabulary.

Head k at position t is taught about the token at t + k + 2. The backbone's own prediction of that token is its LM head
on its hidden state at t + k + 1: that is the teacher, and it costs no forward beyond the one that heads need anyway.

    objective   target of a head                                              known as
    text        the token that stands there                                   labels
    argmax      the token that the backbone finds most probable there         labels (`backbone_choices`)
    distill     the backbone's distribution there, softmax(logits / temperature)   `Teacher`, made chunk by chunk
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import places_of
from train.labels import FIRST_OFFSET, IGNORE

BACKENDS = ("auto", "chunked", "plain", "liger")
WEIGHTINGS = ("decay", "dpace")
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Float32 logits of a chunk, all heads together: a core's share of the cache, or what a GPU needs to be busy."""
MIN_ROWS = 24  # of a chunk, whatever V is: with fewer, reading the LM head costs more than multiplying by it
MIN_ROWS_OWN = 40  # every chunk also reads and writes the gradient of each own LM head


class HeadLosses(NamedTuple):
    """What training needs to know about a batch."""

    objective: Tensor
    """[K] each head's part of what is minimised: weighted cross-entropies in nats, averaged over its labels; carries
    gradients."""
    loss: Tensor
    """[K] mean cross-entropy in nats over the head's labels, unweighted, 0 where it has none; no gradients. A label
    that the head cannot guess (`MedusaHeads.vocabulary`) counts as 0 here, and as wrong in `correct`."""
    correct: Tensor
    """[K] how many labels are the head's best guess; of a distribution, its most probable token."""
    total: Tensor
    """[K] how many labels there are."""


@dataclass(frozen=True)
class Weighting:
    """How much a head's error counts.

    `decay`: head k counts decay^k: a far head matters only where all nearer ones were right (paper section 2.2.1).

    `dpace`: each position's own share in the expected number of accepted guesses (D-PACE, arXiv 2605.18810). If head i
    is right with probability q_i, a chain gains E = sum_m q_0 q_1 ... q_m tokens, and

        dE / d log q_j  =  sum_{m >= j} q_0 q_1 ... q_m  =:  w_j

    so -sum_j w_j log q_j with w held fixed has the gradient of -E. With q_i the head's probability of its label,
    untrained heads would get no weight, so q_i is lifted to (1 - smoothing) q_i + smoothing first. Where a text ends
    before head i's label, q_i is 0.
    """

    kind: str = "decay"
    decay: float = 0.8
    smoothing: float = 0.5

    def __call__(self, probability: Tensor, taught: Tensor) -> Tensor:
        """[K, C] probabilities of the labels, and where there is a label -> [K, C] weights, without gradient."""
        if self.kind == "decay":
            return head_weights(len(taught), self.decay).to(probability.device)[:, None] * taught
        lifted = ((1 - self.smoothing) * probability.detach() + self.smoothing) * taught
        gains = lifted.cumprod(0)  # of each prefix of the chain of heads
        return gains.flip(0).cumsum(0).flip(0) * taught


@dataclass(frozen=True)
class Teacher:
    """The backbone's own distributions, a few positions at a time."""

    hidden: Tensor
    """[N, H] of all positions of a batch, rows one after another."""
    position: Tensor
    """[R] which of the N positions each taught one is."""
    lm_head: nn.Module
    temperature: float = 1.0
    hard_label_weight: float = 0.0
    """Of the target that goes to the most probable token, whatever its probability."""
    vocabulary: Tensor | None = None
    """[N] tokens that the heads guess among; the distributions are those given that one of them comes, [D, N]."""

    @torch.no_grad()
    def targets(self, rows: slice, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For positions `rows` with `labels` [K, C]: distributions [D, V], which one a head learns [K, C], new labels.

        Head k at t is taught what the backbone says at t + k + 1, so neighbours share distributions: D is about C + K.
        The new labels are the most probable of all tokens: their places in the heads' vocabulary, if they have one, and
        IGNORE where it does not hold them.
        """
        reach = torch.arange(len(labels), device=labels.device)[:, None] + (FIRST_OFFSET - 1)
        wanted = (self.position[rows] + reach).clamp_max(len(self.hidden) - 1)  # beyond the end nothing is taught
        where, index = wanted.unique(return_inverse=True)
        soft = self.lm_head(self.hidden[where]).float()
        best = soft.argmax(-1)
        if self.vocabulary is not None:
            best = places_of(self.vocabulary, best, soft.shape[-1])
            soft = soft[:, self.vocabulary.to(soft.device)]
        labels = torch.where((labels == IGNORE) | (best[index] < 0), IGNORE, best[index])
        soft = soft.div_(self.temperature).softmax(-1)
        if self.hard_label_weight:
            soft.mul_(1 - self.hard_label_weight)
            soft.scatter_add_(1, best.clamp_min(0)[:, None], torch.full_like(soft[:, :1], self.hard_label_weight))
        return soft, index, labels


def head_weights(num_heads: int, decay: float) -> Tensor:
    """[K] decay^k."""
    return decay ** torch.arange(num_heads, dtype=torch.float32)


def head_losses(
    heads: MedusaHeads,
    inputs: HeadInputs,
    labels: Tensor,
    lm_head: nn.Module | None,
    weighting: Weighting = Weighting(),
    teacher: Teacher | None = None,
    backend: str = "auto",
) -> HeadLosses:
    """Losses and accuracies of all heads.

    Args:
        inputs: of the heads at the R taught positions.
        labels: [K, R] tokens, or IGNORE where a head is not taught; with a `teacher` only that matters.
        lm_head: the backbone's, for heads that share it: the rows that they use (`medusa.vocabulary.rows_for`).
        backend: chunked (auto's choice), plain (all logits at once) or liger (a GPU and labels only).
    """
    if backend == "plain":
        return head_losses_plain(heads, inputs, labels, lm_head, weighting, teacher)
    features = heads.features(inputs)  # [K, R, H]
    places = _places(heads, labels, teacher)
    if backend == "liger":
        return _over_all(_head_losses_liger(heads, features, places, lm_head, weighting), labels)
    own = heads.lm_heads
    weight, bias = (own, None) if own is not None else _linear(lm_head)
    figures = _ChunkedLoss.apply(features, weight, bias, places, weighting, teacher)
    return _over_all(HeadLosses(*figures), labels)


def _places(heads: MedusaHeads, labels: Tensor, teacher: Teacher | None) -> Tensor:
    """Where the labels [K, R] stand among the heads' logits; IGNORE also where heads never guess them.

    Such a label is a miss for certain. There is nothing to learn from it, and D-PACE's chain ends before it, as where a
    text ends. (A teacher says itself which of its tokens heads can guess.)
    """
    if heads.vocabulary is None or teacher is not None:
        return labels
    assert heads.config.vocab_size is not None
    places = places_of(heads.vocabulary, labels.clamp_min(0), heads.config.vocab_size)
    return torch.where((labels == IGNORE) | (places < 0), IGNORE, places)


def _over_all(losses: HeadLosses, labels: Tensor) -> HeadLosses:
    """Means over all `labels` [K, R], those included that the heads cannot guess: they are misses."""
    counts = (labels != IGNORE).sum(1)
    share = losses.total / counts.clamp_min(1)
    return HeadLosses(losses.objective * share, losses.loss * share, losses.correct, counts)


def head_losses_plain(
    heads: MedusaHeads,
    inputs: HeadInputs,
    labels: Tensor,
    lm_head: nn.Module | None,
    weighting: Weighting = Weighting(),
    teacher: Teacher | None = None,
) -> HeadLosses:
    """The obvious version, with all logits at once and autograd's gradients: the oracle; see `head_losses`."""

    def shared(features: Tensor) -> Tensor:
        """The backbone's LM head, which may be kept in bfloat16 beside heads in float32."""
        assert lm_head is not None
        return lm_head(features.to(next(lm_head.parameters()).dtype))

    logits = heads(inputs, None if lm_head is None else shared)
    log_p = logits.float().log_softmax(-1)  # [K, R, V]
    if teacher is None:
        places = _places(heads, labels, teacher)
        cross_entropy = -log_p.gather(-1, places.clamp_min(0)[..., None])[..., 0]
    else:
        soft, index, places = teacher.targets(slice(None), labels)
        cross_entropy = -(soft[index] * log_p).sum(-1)
    taught, count = places != IGNORE, (labels != IGNORE).sum(1)
    mean = taught / count.clamp_min(1)[:, None]
    probability = log_p.gather(-1, places.clamp_min(0)[..., None])[..., 0].exp()
    objective = (cross_entropy * weighting(probability, taught) * mean).sum(1)
    correct = ((log_p.argmax(-1) == places) & taught).sum(1)
    return HeadLosses(objective, (cross_entropy * mean).sum(1).detach(), correct, count)


def require_backend(backend: str, objective: str, weighting: str) -> None:
    """Raises:
    RequestError: there is no such backend, it is not installed, or it cannot do what is asked of it."""
    if backend not in BACKENDS:
        raise RequestError(f"training.loss_backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend != "liger":
        return
    if objective == "distill" or weighting != "decay":
        raise RequestError("training.loss_backend liger has labels and head_weighting decay only; take chunked")
    if importlib.util.find_spec("liger_kernel") is None:
        raise RequestError("training.loss_backend liger needs the package liger_kernel and a GPU; take auto")


def _head_losses_liger(
    heads: MedusaHeads, features: Tensor, labels: Tensor, lm_head: nn.Module | None, weighting: Weighting
) -> HeadLosses:
    """Liger's fused linear cross-entropy, head by head; it chunks on its own, in one kernel a chunk."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses, shares = [], []
    for head, feature in enumerate(features):
        weight, bias = (heads.lm_heads[head].T, None) if heads.lm_heads is not None else _linear(lm_head)
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


def _linear(lm_head: nn.Module | None) -> tuple[Tensor, Tensor | None]:
    if not isinstance(lm_head, nn.Linear):
        raise TypeError(f"the backbone's LM head is a {type(lm_head).__name__}; a Linear is needed here")
    return lm_head.weight, lm_head.bias


def chunk_rows(num_heads: int, vocab_size: int, device: str, least: int = MIN_ROWS) -> int:
    """Positions in a chunk."""
    budget = CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"])
    return max(least, budget // (4 * num_heads * vocab_size))


class _ChunkedLoss(torch.autograd.Function):
    """`head_losses_plain` with the gradients made in the forward, chunk by chunk; no logits are kept.

    The weights are part of the forward, since an own LM head's gradient is a sum over positions that cannot be weighted
    afterwards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_KRH: Tensor,
        weight: Tensor,  # [V, H] shared, or [K, H, V]
        bias_V: Tensor | None,
        labels: Tensor,
        weighting: Weighting,
        teacher: Teacher | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device = x_KRH.device.type
        # A shared LM head may be kept in bfloat16 beside heads in float32, and autocast asks for it too.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        num_heads, positions, _ = x_KRH.shape
        own = weight.dim() == 3
        matrix = weight.to(dtype) if own else weight.to(dtype).T  # [(K,) H, V]
        grad_x = torch.empty_like(x_KRH) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] and own else None  # a shared one is frozen
        counts = (labels != IGNORE).sum(1)
        totals = _Totals(*(x_KRH.new_zeros(num_heads, dtype=kind) for kind in (torch.float, torch.float, torch.long)))
        step = chunk_rows(num_heads, matrix.shape[-1], device, MIN_ROWS_OWN if own else MIN_ROWS)
        with torch.autocast(device, enabled=False):
            for start in range(0, positions, step):
                rows = slice(start, start + step)
                x_KCH, target, soft = x_KRH[:, rows].to(dtype), labels[:, rows], None
                if teacher is not None:
                    *soft, target = teacher.targets(rows, target)
                mean = (target != IGNORE) / counts.clamp_min(1)[:, None]
                place = None if grad_x is None else grad_x[:, rows]
                _chunk(totals, x_KCH, matrix, bias_V, target, soft, mean, weighting, place, grad_weight)
                del soft  # or the next chunk's would be made beside it
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(totals.loss, totals.correct, counts)
        return *totals, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = grads[0][:, None, None]  # of each head
        # An own LM head's gradient is the largest thing here: scaled in place, so a second backward is an error.
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_weight is None else grad_weight.mul_(scale),
            *(None,) * 4,
        )


class _Totals(NamedTuple):
    """Sums over chunks, all [K]; see `HeadLosses`."""

    objective: Tensor
    loss: Tensor
    correct: Tensor


def _chunk(
    totals: _Totals,
    x_KCH: Tensor,
    matrix: Tensor,
    bias_V: Tensor | None,
    target_KC: Tensor,
    soft: list[Tensor] | None,
    mean_KC: Tensor,
    weighting: Weighting,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Add a chunk to `totals` and its gradients to `grad_x` [K, C, H] and `grad_weight` [K, H, V].

    A function of its own, so that a chunk's logits are gone before the next chunk's are made.
    """
    logits = _times(x_KCH, matrix).float()  # [K, C, V]; ends up as the gradient
    if bias_V is not None:
        logits += bias_V
    taught = target_KC != IGNORE
    target_KC1 = target_KC.clamp_min(0)[..., None]
    at_label, cross_entropy = [], []
    for head, target in enumerate(target_KC1):  # one at a time: what is made on the way has the size of one's logits
        log_p = logits[head].log_softmax(-1)
        found = log_p.gather(1, target)[:, 0]
        totals.correct[head] += ((log_p.argmax(-1) == target[:, 0]) & taught[head]).sum()
        at_label.append(found)
        gradient = torch.exp(log_p, out=logits[head])
        if soft is None:
            cross_entropy.append(-found)
            gradient.scatter_add_(1, target, torch.full_like(found, -1.0)[:, None])
        else:
            distributions, index = soft
            wanted = distributions[index[head]]
            cross_entropy.append(-torch.linalg.vecdot(wanted, log_p))
            gradient -= wanted
            del wanted
        del log_p
    entropies = torch.stack(cross_entropy)
    weights = weighting(torch.stack(at_label).exp(), taught) * mean_KC
    totals.loss.add_((entropies * mean_KC).sum(1))
    totals.objective.add_((entropies * weights).sum(1))
    if grad_x is not None or grad_weight is not None:
        gradient_KCV = logits.to(matrix.dtype)
        if grad_x is not None:
            grad_x.copy_(_times(gradient_KCV, matrix.mT).float() * weights[..., None])
        if grad_weight is not None:
            _add_weight_gradient(grad_weight, (x_KCH * weights[..., None]).to(matrix.dtype), gradient_KCV)


def _times(x_KCA: Tensor, matrix: Tensor) -> Tensor:
    """x [K, C, A] times one matrix [A, B] or one a head [K, A, B] -> [K, C, B]."""
    if matrix.dim() == 3:
        return torch.bmm(x_KCA, matrix)
    # Flat, because `matmul` may copy the matrix for each head otherwise.
    return (x_KCA.flatten(0, 1) @ matrix).unflatten(0, x_KCA.shape[:2])


def _add_weight_gradient(total_KHV: Tensor, x_KCH: Tensor, gradient_KCV: Tensor) -> None:
    """Add x^T g to `total`, in place and head by head."""
    for total, x, gradient in zip(total_KHV, x_KCH, gradient_KCV, strict=True):
        if total.dtype == x.dtype:
            total.addmm_(x.T, gradient)
        else:
            total += x.T @ gradient


@torch.no_grad()
def backbone_choices(backbone: Backbone, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """What the backbone itself would have put at each position of a text: its argmax there [B, T].

    On sampled text this is the token that greedy decoding takes after that prefix. The first position keeps its token.
    """
    flat = hidden[:, :-1].flatten(0, 1)
    rows = chunk_rows(1, backbone.vocab_size, flat.device.type)
    chosen = torch.cat([backbone.lm_head(part).argmax(-1) for part in flat.split(rows)])
    return torch.cat([input_ids[:, :1], chosen.reshape(len(input_ids), -1)], dim=1)
