"""Best-first beam search (Meister, Vieira, Cotterell 2020, arXiv 2007.03909): what beam search finds, for fewer calls.

Beam search keeps the k best beginnings of each length, and reads all of them on to the end. Best-first takes the most
promising beginning of any length instead, but at most k of each length. Scores only fall as a text grows, so beginnings
of a length come in the order of their scores: the first k are the beam. And the first finished text that comes up is
the best one, as nothing in the queue can still beat it; whatever waits there is never read.

What is counted as a call is a beginning whose continuations were scored. Beginnings lie in one KV cache as a tree.

Shapes: W beginnings of a forward, A of their ancestors, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.masks import LayerKinds, grown_masks
from decode.ops.fast_topk import top_k
from decode.ops.grouped_attention import grouped
from decode.prefill import prefill
from decode.request import require_fitting
from decode.strategies.options import SearchOptions
from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone
from medusa.errors import RequestError, RunError


class Hypothesis(NamedTuple):
    """A finished text."""

    ids: list[int]
    """The new tokens, the EOS that ended it included."""
    log_probability: float
    score: float
    """`log_probability / len(ids) ** length_penalty`, by which the best one is chosen."""
    finish_reason: str


@dataclass
class Search:
    """What a search found, and what it cost."""

    hypotheses: list[Hypothesis] = field(default_factory=list)
    """Best first."""
    calls: int = 0
    """Beginnings that were scored, the prompt among them."""
    read: int = 0
    """As many went through the model: more than `calls` where forwards are filled up beforehand."""
    forwards: int = 0
    dropped: int = 0
    """Beginnings that `max_queued` had no room for; with 0, beam search finds the same."""

    def beam_calls(self, num_beams: int) -> int:
        """What beam search needs at the least: it reads `num_beams` of each length to where the best text ends."""
        return 1 + num_beams * (len(self.hypotheses[0].ids) - 1)


@dataclass(eq=False)
class _Beginning:
    """A text that may go on; with `is_end` one that is finished."""

    ids: tuple[int, ...]
    log_probability: float
    is_end: bool
    parent: _Beginning | None
    slots: tuple[int, ...] = ()
    """Where its tokens lie in the cache, behind the prompt; once it was read."""
    following: list[tuple[int, float]] | None = None
    """The best tokens behind it and their log-probabilities; once it was read."""


class Scorer(Protocol):
    """A model behind one prompt."""

    def prompt(self) -> Tensor:
        """Logits [V] behind the prompt."""
        ...

    def __call__(self, beginnings: Sequence[_Beginning]) -> Tensor:
        """Logits [W, V] behind the prompt and each beginning; a beginning comes after the one it goes on from."""
        ...


@torch.inference_mode()
def best_first_beam(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[int],
    *,
    num_beams: int = SearchOptions.num_beams,
    max_new_tokens: int = 256,
    length_penalty: float = SearchOptions.length_penalty,
    num_return_sequences: int = 1,
    eos_token_id: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    max_queued: int | None = None,
) -> Search:
    """The texts that beam search finds: those of `model.generate` with `num_beams` and `early_stopping="never"`.

    Args:
        model: any causal model; one that cannot hold a tree reads every beginning from the start of the prompt.
        input_ids: one prompt, [T] or [1, T].
        length_penalty: scores are log-probabilities over length to this power, as in transformers; 0: just these.
            Above 0, what a beginning may still reach is bounded by the greatest length, and more has to be read.
        num_return_sequences: so many of the best ones, at most `num_beams`.
        eos_token_id: what ends a text; by default what the model's generation config says, with -1 nothing.
        batch_size: beginnings that a forward takes, by default `num_beams`: the next in the queue are read beforehand,
            some in vain. The text is the same; with 1 only what is needed is read.
        max_queued: beginnings that may wait (article, section 5.3: memory-reduced); the worst are dropped, so another
            text than beam search's may be found. `None`: all.

    Raises:
        RequestError: an option out of range, or a prompt that does not fit.
        RunError: `max_queued` dropped all that could have been finished."""
    batch_size = num_beams if batch_size is None else batch_size
    backbone, prompt = Backbone(model), torch.as_tensor(input_ids).flatten().tolist()
    for name, value in (
        ("num_beams", num_beams),
        ("max_new_tokens", max_new_tokens),
        ("num_return_sequences", num_return_sequences),
        ("batch_size", batch_size),
    ):
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1")
    if num_return_sequences > num_beams:
        raise RequestError(f"num_return_sequences is {num_return_sequences}; {num_beams} beams give no more than that")
    if max_queued is not None and max_queued < num_beams:
        raise RequestError(f"max_queued is {max_queued}; it must be at least num_beams, {num_beams}")
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    require_fitting([prompt], backbone)
    longest = max_new_tokens if backbone.context is None else min(max_new_tokens, backbone.context - len(prompt))
    if longest < 1:
        raise RequestError(f"the prompt fills the backbone's context of {backbone.context}; there is nothing to search")
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id if model.generation_config else None
    ends = {-1 if eos_token_id is None else eos_token_id} if not isinstance(eos_token_id, Sequence) else {*eos_token_id}
    queue = _Queue(num_beams, longest, length_penalty, max_queued)
    return _search(scorer_for(model, prompt), queue, ends - {-1}, num_return_sequences, batch_size)


def _search(scorer: Scorer, queue: _Queue, ends: set[int], wanted: int, batch_size: int) -> Search:
    found, root = Search(), _Beginning((), 0.0, False, None)
    root.following = _best_of(scorer.prompt()[None], queue.num_beams, ends)[0]
    found.read = found.forwards = 1
    here: _Beginning | None = root
    while here is not None:
        if here.is_end:
            length = len(here.ids)
            reason = "eos" if here.ids[-1] in ends else "length"
            score = here.log_probability / length**queue.length_penalty
            found.hypotheses.append(Hypothesis([*here.ids], here.log_probability, score, reason))
            if len(found.hypotheses) == wanted:
                break
        else:
            if here.following is None:
                batch = [here, *queue.next_to_read(batch_size - 1)]
                for beginning, best in zip(batch, _best_of(scorer(batch), queue.num_beams, ends), strict=True):
                    beginning.following = best
                found.read, found.forwards = found.read + len(batch), found.forwards + 1
            assert here.following is not None, "it was just read"
            found.calls += 1
            for token, log_p in here.following:
                ids = (*here.ids, token)
                is_end = token in ends or len(ids) == queue.longest
                queue.push(_Beginning(ids, here.log_probability + log_p, is_end, here))
        here = queue.pop()
    found.dropped = queue.dropped
    if not found.hypotheses:
        raise RunError(f"max_queued {queue.max_queued} dropped all that could have been finished; allow more, or all")
    return found


def _best_of(logits: Tensor, num_beams: int, ends: set[int]) -> list[list[tuple[int, float]]]:
    """Logits [W, V] -> of each the tokens that a beam could take, and their log-probabilities.

    Of one beginning's continuations no more than the k best can be among the k best of all that do not end, and an end
    counts if it is among the k best of all.
    """
    log_p = logits.float().log_softmax(-1)
    best = top_k(log_p, min(num_beams + len(ends), log_p.shape[-1]))
    return [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


class _Queue:
    """Beginnings, the most promising first, of each length no more than a beam has room for."""

    def __init__(self, num_beams: int, longest: int, length_penalty: float, max_queued: int | None) -> None:
        self.num_beams, self.longest, self.length_penalty = num_beams, longest, length_penalty
        self.max_queued = max_queued
        self.heap: list[tuple[float, int, _Beginning]] = []
        self.number = count()  # of those that promise as much, the first
        self.taken: Counter[int] = Counter()
        """Of each length, how many were read on: the beam."""
        self.seen: dict[int, list[float]] = defaultdict(list)
        """Of each length, the log-probabilities of all that came up."""
        self.dropped = 0

    def promise(self, beginning: _Beginning) -> float:
        """The score of a finished text, and for others one that no continuation exceeds.

        A text only loses log-probability, and divided by the greatest length to a positive power that is least; for
        negative powers by its own. Of one length both kinds come in the order of log-probabilities, ends at the latest.
        """
        length = self.longest if self.length_penalty > 0 and not beginning.is_end else len(beginning.ids)
        return beginning.log_probability / length**self.length_penalty

    def push(self, beginning: _Beginning) -> None:
        heapq.heappush(self.heap, (-self.promise(beginning), next(self.number), beginning))
        if self.max_queued is not None and len(self.heap) > self.max_queued:
            live = [entry for entry in self.heap if self._has_room(entry[2])]
            self.heap = heapq.nsmallest(self.max_queued, live)  # sorted, which is a heap
            self.dropped += len(live) - len(self.heap)

    def pop(self) -> _Beginning | None:
        """The most promising one that beam search would have kept; `None`: there is no more."""
        while self.heap:
            beginning = heapq.heappop(self.heap)[2]
            length, log_p = len(beginning.ids), beginning.log_probability
            rank = sum(other > log_p for other in self.seen[length])
            kept = rank < self.num_beams if beginning.is_end else self._has_room(beginning)
            self.seen[length].append(log_p)
            if kept:
                self.taken[length] += not beginning.is_end
                return beginning
        return None

    def next_to_read(self, most: int) -> list[_Beginning]:
        """Those that will come up next as far as one can tell now."""
        if not most:
            return []
        waiting = (entry for entry in self.heap if not entry[2].is_end and entry[2].following is None)
        best = heapq.nsmallest(most, (entry for entry in waiting if self._has_room(entry[2])))
        return [beginning for _, _, beginning in best]

    def _has_room(self, beginning: _Beginning) -> bool:
        return beginning.is_end or self.taken[len(beginning.ids)] < self.num_beams


def scorer_for(model: PreTrainedModel, prompt: list[int]) -> Scorer:
    """On a cache where the model can hold a tree; longrope would turn all of it anew at its boundary."""
    try:
        require_tree_forward(model)
    except RequestError:
        return WholeTexts(model, prompt)
    backbone = Backbone(model)
    return WholeTexts(model, prompt) if backbone.rope_boundary is not None else OnTree(backbone, prompt)


class WholeTexts:
    """Every text from its start, without a cache: for any causal model, and to compare with."""

    def __init__(self, model: PreTrainedModel, prompt: list[int]) -> None:
        self.model, self.start = model, prompt

    def prompt(self) -> Tensor:
        return self([_Beginning((), 0.0, False, None)])[0]

    def __call__(self, beginnings: Sequence[_Beginning]) -> Tensor:
        texts = [[*self.start, *beginning.ids] for beginning in beginnings]
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in enumerate(texts):  # padded on the right, where a causal model never looks
            ids[row, : len(text)] = torch.tensor(text)
        logits = self.model(input_ids=ids.to(self.model.device), use_cache=False).logits
        last = torch.tensor([len(text) - 1 for text in texts], device=logits.device)
        return logits[torch.arange(len(texts), device=logits.device), last]


class OnTree:
    """The prompt once in a cache, and behind it every beginning that was read, each one token: a tree that grows."""

    def __init__(self, backbone: Backbone, prompt: list[int]) -> None:
        self.backbone, self.start = backbone, prompt
        self.cache = TreeCache(backbone.model.config, 1, len(prompt) + 256)
        self.layers = LayerKinds(backbone.config)
        self.depths: list[int] = []
        """Of the nodes in the slots behind the prompt: positions from its end."""

    def prompt(self) -> Tensor:
        ids = torch.tensor([self.start], device=self.backbone.device)
        return prefill(self.backbone, self.cache, ids, [len(self.start)]).logits[0]

    def __call__(self, beginnings: Sequence[_Beginning]) -> Tensor:
        backbone, device = self.backbone, self.backbone.device
        for slot, beginning in enumerate(beginnings, len(self.depths)):
            assert beginning.parent is not None
            beginning.slots = (*beginning.parent.slots, slot)
        self.depths += [len(beginning.ids) - 1 for beginning in beginnings]
        depth = torch.tensor([self.depths[-len(beginnings) :]], device=device)  # [1, W]
        deepest = int(depth.max()) + 1
        # Shorter lines see their own slot more than once, which is no more than once.
        lines = [b.slots + b.slots[-1:] * (deepest - len(b.slots)) for b in beginnings]
        starts, of_slot = torch.tensor([len(self.start)], device=device), torch.tensor(self.depths, device=device)
        with grouped(backbone.config):
            logits = backbone.forward(
                torch.tensor([[beginning.ids[-1] for beginning in beginnings]], device=device),
                self.cache,
                position_ids=len(self.start) + depth,
                attention_mask=grown_masks(
                    self.layers, backbone.dtype, starts, torch.tensor([lines], device=device), depth, of_slot
                ),
            ).logits
        self.cache.commit_prompt([len(beginnings)])
        return logits[0]
