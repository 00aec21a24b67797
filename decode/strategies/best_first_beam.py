"""Best-first beam search (Meister, Vieira, Cotterell 2020, arXiv 2007.03909): beam search in fewer model calls.

Beam search expands the k best hypotheses of each length. Best-first beam search takes the best hypothesis of any length
from a priority queue, and expands at most k hypotheses of each length. Scores only fall as a text grows. So hypotheses
of one length leave the queue in the order of their scores, and the first k are the beam. The first finished text that
leaves the queue is the best one, because no other hypothesis can exceed its score.

A scorer predicts the next tokens of several hypotheses in one forward, with one KV cache for all if the model allows.

Shapes: W hypotheses that one forward reads, V vocabulary."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.ops.fast_topk import top_k
from decode.reader import Reader
from decode.request import require_fitting
from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone
from medusa.errors import RequestError, RunError
from medusa.tree_support import LayerTypes, longrope_boundary, slot_limit


@dataclass(eq=False)
class Partial:
    """A hypothesis of beam search: its new tokens, their cache slots and, after the model read it, its next tokens."""

    ids: tuple[int, ...] = ()
    log_probability: float = 0.0
    is_end: bool = False  # whether the text is finished
    slots: tuple[int, ...] = ()  # cache slots, counted from the prompt's end, of the tokens that the model has read
    following: list[tuple[int, float]] | None = None  # the best ones, with log-probabilities


Scorer = Callable[[Sequence[Partial]], Tensor]
"""A function from W hypotheses to logits [W, V] of their next tokens, called for parents before their children."""


def scorer_for(model: PreTrainedModel, prompt: list[int]) -> Scorer:
    """Make a predictor of next tokens: `OnTree`, or `WholeTexts` if the model cannot keep a tree in its KV cache."""
    try:
        require_tree_forward(model)
    except RequestError:
        return WholeTexts(model, prompt)
    backbone = Backbone(model)  # longrope changes the rotation of cached keys when a text crosses its boundary
    # States of recurrent layers follow one path, so they cannot stay in a cache with several. The cache has more slots
    # than a text, by which Llama 4 scales queries.
    is_kept_whole = not LayerTypes(backbone.config).has_states and slot_limit(backbone.config) is None
    rereads = backbone.rope_boundary is not None or not is_kept_whole
    return WholeTexts(model, prompt) if rereads else OnTree(backbone, prompt)


class WholeTexts:
    """A predictor of next tokens that reads every text from its start, without a KV cache."""

    def __init__(self, model: PreTrainedModel, prompt: list[int]) -> None:
        self.model, self.start = model, prompt

    def __call__(self, partials: Sequence[Partial]) -> Tensor:
        boundary = longrope_boundary(self.model)
        if boundary is not None and len({len(self.start) + len(partial.ids) > boundary for partial in partials}) > 1:
            return torch.cat([self([partial]) for partial in partials])  # the longest would rotate all of them
        texts = [[*self.start, *partial.ids] for partial in partials]
        # Texts are padded on the right, where no causal model attends.
        ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        logits = self.model(input_ids=ids.to(self.model.device), use_cache=False).logits
        last = torch.tensor([len(text) - 1 for text in texts], device=logits.device)
        return logits[torch.arange(len(texts), device=logits.device), last]


class OnTree:
    """A predictor of next tokens with one KV cache, which holds the prompt and all hypotheses read so far as a tree."""

    def __init__(self, backbone: Backbone, prompt: list[int]) -> None:
        self.backbone, self.start = backbone, prompt
        self.cache = TreeCache(backbone.model.config, 1, len(prompt) + 256, backbone.device)
        self.reader = Reader(backbone, self.cache)
        self.depths: list[int] = []  # position, from 0 after the prompt, of the token in each slot after the prompt

    def __call__(self, partials: Sequence[Partial]) -> Tensor:
        device, prompt_length = self.backbone.device, len(self.start)
        if not partials[0].ids:  # the root, which is read alone
            return self.reader.prefill(torch.tensor([self.start], device=device), [prompt_length]).logits
        for slot, partial in enumerate(partials, len(self.depths)):
            partial.slots = (*partial.slots, slot)
        self.depths += [len(partial.ids) - 1 for partial in partials]
        depth = torch.tensor([self.depths[-len(partials) :]], device=device)  # [1, W]
        deepest = int(depth.max()) + 1
        # Shorter paths repeat their own slot as padding.
        paths = [[p.slots + p.slots[-1:] * (deepest - len(p.slots)) for p in partials]]
        seen, of_slot = torch.tensor(paths, device=device), torch.tensor(self.depths, device=device)
        self.cache.open(len(partials))
        self.cache.append(len(partials))
        start = torch.tensor([prompt_length], device=device)
        masks = self.reader.grown_masks(start, seen, depth, of_slot)
        ids = torch.tensor([[partial.ids[-1] for partial in partials]], device=device)
        logits = self.reader.forward(ids, prompt_length + depth, masks).logits
        self.cache.keep([len(partials)])
        return logits[0]


class Hypothesis(NamedTuple):
    """A text that beam search has finished, with its score."""

    ids: list[int]  # the new tokens, including the EOS token if one ended the text
    log_probability: float
    score: float  # log_probability / len(ids) ** length_penalty, which ranks the texts
    finish_reason: str


@dataclass
class Search:
    """The best texts, and how many hypotheses were expanded (`calls`), read and dropped, in how many forwards."""

    hypotheses: list[Hypothesis] = field(default_factory=list)  # the finished texts, best first
    calls: int = 0  # hypotheses that were expanded, the prompt included
    read: int = 0  # hypotheses that the model read; some are read in advance and never expanded
    forwards: int = 0
    dropped: int = 0  # hypotheses dropped by `max_queued`; if 0, the texts are those of beam search

    def beam_calls(self, num_beams: int) -> int:
        """A lower bound on beam search's `calls`: 1 for the prompt, `num_beams` per later token of the best text."""
        return 1 + num_beams * (len(self.hypotheses[0].ids) - 1)


@torch.inference_mode()
def best_first_beam(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[int],
    *,
    num_beams: int = 4,
    max_new_tokens: int = 256,
    length_penalty: float = 0.0,
    num_return_sequences: int = 1,
    eos_token_id: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    max_queued: int | None = None,
) -> Search:
    """Find the texts of beam search (`num_beams`, `early_stopping="never"`) with fewer forwards, by best-first search.

    Of the model's generation config, only the end tokens are applied: no penalties, banned tokens or stop strings.

    Args:
        model: any causal model; one without tree attention reads each hypothesis from the start of the prompt.
        input_ids: one prompt, [T] or [1, T].
        length_penalty: the power of the length that divides log-probabilities; above 0, more hypotheses are read.
        num_return_sequences: how many of the best texts to return, at most `num_beams`.
        eos_token_id: tokens that end a text; -1: none; by default those of the model's generation config.
        batch_size: hypotheses per forward, by default `num_beams`. Above 1, a forward also reads the next ones in the
            queue, some of which are never expanded. The texts are the same.
        max_queued: the most hypotheses in the queue (section 5.3 of the paper); `None`: no limit. The worst
            hypotheses are dropped, so the texts may differ from those of beam search.

    Raises:
        RequestError: an option is out of range, or the prompt does not fit into the context.
        RunError: `max_queued` dropped all hypotheses that could have been finished."""
    batch_size = num_beams if batch_size is None else batch_size
    backbone, prompt = Backbone(model), torch.as_tensor(input_ids).flatten().tolist()
    counts = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    for name, value in (counts | {"num_return_sequences": num_return_sequences}).items():
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1")
    if num_return_sequences > num_beams:
        raise RequestError(f"num_return_sequences is {num_return_sequences}; {num_beams} beams give no more than that")
    if max_queued is not None and max_queued < num_beams:
        raise RequestError(f"max_queued is {max_queued}; it must be at least num_beams, {num_beams}")
    require_fitting([prompt], backbone)
    longest = max_new_tokens if backbone.context is None else min(max_new_tokens, backbone.context - len(prompt))
    if longest < 1:
        raise RequestError(f"the prompt fills the backbone's context of {backbone.context}; give a shorter one")
    if eos_token_id is None and model.generation_config is not None:
        eos_token_id = model.generation_config.eos_token_id
    given = eos_token_id if isinstance(eos_token_id, Sequence) else [eos_token_id]
    ends = {token for token in given if token is not None and token >= 0}
    queue = _Queue(num_beams, longest, length_penalty, max_queued)
    return _search(scorer_for(model, prompt), queue, ends, num_return_sequences, batch_size)


def _search(scorer: Scorer, queue: _Queue, ends: set[int], wanted: int, batch_size: int) -> Search:
    found = Search()
    here: Partial | None = Partial()
    while here is not None and len(found.hypotheses) < wanted:
        length = len(here.ids)
        if here.is_end:
            reason = "eos" if here.ids[-1] in ends else "length"
            found.hypotheses.append(Hypothesis([*here.ids], here.log_probability, queue.bound(here), reason))
        else:
            if here.following is None:
                batch = [here, *queue.next_to_read(batch_size - 1)]
                for partial, best in zip(batch, _best_of(scorer(batch), queue.num_beams, ends), strict=True):
                    partial.following = best
                found.read, found.forwards = found.read + len(batch), found.forwards + 1
            assert here.following is not None, "it was just read"
            found.calls += 1
            for token, log_p in here.following:
                is_end = token in ends or length + 1 == queue.longest
                queue.push(Partial((*here.ids, token), here.log_probability + log_p, is_end, here.slots))
        here = queue.pop()
    found.dropped = queue.dropped
    if not found.hypotheses:
        raise RunError(f"max_queued {queue.max_queued} dropped all hypotheses; raise max_queued, or leave it out")
    return found


def _best_of(logits: Tensor, num_beams: int, ends: set[int]) -> list[list[tuple[int, float]]]:
    """For each row of `logits` [W, V], list next tokens for the beam, with log-probabilities; `ends` end a text."""
    # The `num_beams` + `len(ends)` most probable tokens are enough: at least `num_beams` of them do not end the text.
    log_p = logits.float().log_softmax(-1)
    best = top_k(log_p, min(num_beams + len(ends), log_p.shape[-1]))
    return [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


class _Queue:
    """A queue of hypotheses, best upper bound first, which gives out at most `num_beams` of each length to expand."""

    def __init__(self, num_beams: int, longest: int, length_penalty: float, max_queued: int | None) -> None:
        self.num_beams, self.longest, self.length_penalty = num_beams, longest, length_penalty
        self.max_queued = max_queued
        self.heap: list[tuple[float, int, Partial]] = []
        self.number = count()  # breaks ties: the first hypothesis wins
        self.taken: Counter[int] = Counter()  # hypotheses given out to expand, by length; these are the beam
        self.seen: dict[int, list[float]] = defaultdict(list)  # log-probabilities of all that left the queue, by length
        self.dropped = 0

    def bound(self, partial: Partial) -> float:
        """The score of a finished hypothesis, or an upper bound for all continuations of an unfinished one.

        No text is likelier than its start. With a `length_penalty` above 0, the bound assumes the greatest length."""
        length = self.longest if self.length_penalty > 0 and not partial.is_end else len(partial.ids)
        return partial.log_probability / length**self.length_penalty

    def push(self, partial: Partial) -> None:
        heapq.heappush(self.heap, (-self.bound(partial), next(self.number), partial))
        if self.max_queued is not None and len(self.heap) > self.max_queued:
            live = [entry for entry in self.heap if self._in_beam(entry[2])]
            self.heap = heapq.nsmallest(self.max_queued, live)  # sorted, which is a heap
            self.dropped += len(live) - len(self.heap)

    def pop(self) -> Partial | None:
        """Remove and return the best hypothesis that beam search would also keep; `None` if nothing is left."""
        while self.heap:
            partial = heapq.heappop(self.heap)[2]
            length, log_p = len(partial.ids), partial.log_probability
            rank = sum(other > log_p for other in self.seen[length])
            kept = rank < self.num_beams if partial.is_end else self._in_beam(partial)
            self.seen[length].append(log_p)
            if kept:
                self.taken[length] += not partial.is_end
                return partial
        return None

    def next_to_read(self, most: int) -> list[Partial]:
        """Up to `most` hypotheses that no forward has read and that the search probably expands next."""
        unread = (e for e in self.heap if not e[2].is_end and e[2].following is None and self._in_beam(e[2]))
        return [entry[2] for entry in heapq.nsmallest(most, unread)]

    def _in_beam(self, partial: Partial) -> bool:
        return partial.is_end or self.taken[len(partial.ids)] < self.num_beams
