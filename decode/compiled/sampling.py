"""Decisions of compiled steps: the options of sampling and the tokens of each text are tensors, with one row per text.

So another temperature, top-k, top-p, min-p or repetition penalty compiles nothing, and the rows of a batch may differ.
The token after every node is decided at once, and the longest path of nodes that hold the decided tokens is accepted,
as in greedy decoding. A draw is an argmax too: that of scores plus Gumbel noise (Gumbel 1954; Maddison et al. 2014).
The noise is a hash of the text's seed, the position and the token. A walk reads it once at each position, so that every
token has its own, and a seed gives the same text with any tree, in any batch.

Shapes: B rows of the batch, N nodes of a draft, D its depth, V vocabulary, K candidates for cuts, P positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import EtaLogitsWarper, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from decode.accept import Acceptance, accept_greedy, accept_longest
from decode.draft import Draft
from decode.ops.draws import NO_TOKEN
from decode.ops.fast_topk import most_probable
from decode.ops.fast_topk import top_k as most_probable_ones
from decode.ops.transfer import keep_rows, on_device
from decode.rules import AcceptanceRule
from decode.sequences import Sequences
from decode.step import PART, State
from decode.target import SCORES_ONLY, Target, processed, settings_of
from medusa.errors import NotCompilableError, OptionError

CANDIDATES = 1024
"""The most probable tokens among which top-k, top-p and min-p cut, if they are enough; else all tokens are sorted."""
UNDECIDED = -2
"""The token of a node whose cut reaches beyond the candidates; the host then decides on it (`Sampler.finish`)."""
WORD = 0xFFFFFFFF
OFF = 2.0  # a top-p that cuts nothing, whatever the rounding of sums


class RowOptions(NamedTuple):
    """The options of a row that are numbers, each with the value that changes nothing, in the order of their effect."""

    penalty: float = 1.0
    temperature: float = 1.0
    top_k: float = 0
    top_p: float = OFF
    min_p: float = 0.0

    @classmethod
    def read(cls, processors: LogitsProcessorList) -> tuple[RowOptions, LogitsProcessorList]:
        """Split a row's processors into numbers and the rest, which changes the scores after them."""
        found: dict[str, float] = {}
        rest = list(processors)
        for name, kind in NUMBERS.items():
            if rest and type(rest[0]) is kind and _is_usual(rest[0]):
                found[name] = getattr(rest.pop(0), name)
        return cls(**found), LogitsProcessorList(rest)

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


NUMBERS: dict[str, type[LogitsProcessor]] = {
    "penalty": logits_process.RepetitionPenaltyLogitsProcessor,
    "temperature": logits_process.TemperatureLogitsWarper,
    "top_k": logits_process.TopKLogitsWarper,
    "top_p": logits_process.TopPLogitsWarper,
    "min_p": logits_process.MinPLogitsWarper,
}
"""The processors that are numbers, in the order in which transformers applies them."""


def _is_usual(processor: LogitsProcessor) -> bool:
    """Whether a processor removes tokens wholly, down to one, and reads the whole text, as `generate` asks for."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    return (
        getattr(processor, "filter_value", -torch.inf) == -torch.inf
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and (ignored is None or not torch.as_tensor(ignored).any())
    )


class Kind(NamedTuple):
    """What the code of decisions is compiled for; the numbers of `RowOptions` are no part of it."""

    rule: AcceptanceRule | None  # one that tests all nodes at once; `None`: one that walks
    is_argmax: bool  # whether an argmax over raw logits decides
    draws: bool
    candidates: int  # among which tokens are cut off; 0: no row cuts
    rest: list[tuple[type, dict[str, object]]]  # the other processors, by their settings

    @classmethod
    def of(cls, target: Target, rule: AcceptanceRule, vocab: int) -> Kind:
        """Find out what the texts of `target` need together, by `rule`; for errors see `of_rows`."""
        return functools.reduce(cls.joined, cls.of_rows(target, rule, vocab))

    @classmethod
    def of_rows(cls, target: Target, rule: AcceptanceRule, vocab: int) -> list[Kind]:
        """Find out what each text of `target` needs.

        Raise a `RequestError` if another logits processor reads the text, or differs between rows, or if scores are
        requested."""
        rows = [RowOptions.read(request.processors) for request in target.of_rows]
        others = [type(p).__name__ for _, rest in rows for p in rest if not isinstance(p, SCORES_ONLY)]
        if others:
            way_out = "use only temperature, top-k, top-p, min-p, a repetition penalty and the like, or leave it out"
            raise OptionError("compile", f"cannot be combined with {others[0]}, which reads the text; {way_out}")
        if any(isinstance(p, EtaLogitsWarper) for _, rest in rows for p in rest):
            raise OptionError("compile", "cannot be combined with eta_cutoff; use epsilon_cutoff, or leave it out")
        if target.kept_scores is not None or target.kept_logits is not None:
            raise NotCompilableError("a compiled step gives no output_scores or output_logits")
        kinds = []
        for request, (options, rest) in zip(target.of_rows, rows, strict=True):
            candidates, walks = 0, rule.kind.walks
            if options.cuts:
                # Others read all scores, and ties with the last of k tokens are kept.
                enough = not rest and walks and (options.top_k < CANDIDATES or options.top_k >= vocab)
                candidates = min(CANDIDATES, vocab) if enough else vocab
            is_argmax = walks and not request.do_sample and not request.processors
            how = is_argmax, request.do_sample and walks, candidates, settings_of(rest)
            kinds.append(cls(None if walks else rule, *how))
        functools.reduce(cls.joined, kinds)  # whether they fit together
        return kinds

    def joined(self, other: Kind) -> Kind:
        """The kind that decides for the texts of both, each as its own kind does; for errors see `of_rows`."""
        if self.rest != other.rest:
            raise OptionError("compile", "needs the same typical_p and epsilon_cutoff in all rows of a batch")
        draws, candidates = self.draws or other.draws, max(self.candidates, other.candidates)
        return Kind(self.rule, self.is_argmax and other.is_argmax, draws, candidates, self.rest)

    @property
    def work(self) -> tuple[bool, bool, int]:
        """What grows with the work of a decision, to compare kinds that decide for the same texts."""
        return not self.is_argmax, self.draws, self.candidates


class Sampler:
    """Decides which nodes of drafts are accepted; its tensors stay at their addresses (`Sampler.buffers`)."""

    def __init__(
        self,
        kind: Kind,
        target: Target,
        rows: int,
        max_depth: int,
        vocab: int,
        device: torch.device,
        all_kinds: bool = False,
    ) -> None:
        """Make a sampler of texts like those of `target`, with drafts of depth `max_depth`.

        With `all_kinds` it can later take any kind with the same `Kind.rest` (`show`)."""
        self.kind, self.vocab = kind, vocab
        self.rest = RowOptions.read(target.of_rows[0].processors)[1]
        width = vocab if all_kinds or not kind.is_argmax else 0
        self.numbers = torch.zeros(rows, len(RowOptions._fields) + 1, dtype=torch.float64, device=device)
        """[B, 6]: the `RowOptions` of each row, and 1 if it samples."""
        self.seeds = torch.zeros(rows, 2, dtype=torch.long, device=device)  # two words of 32 bits
        self.seen = torch.zeros(rows, width, dtype=torch.bool, device=device)  # the tokens of each text, without root
        self.noise = torch.zeros(rows, max_depth + 1 if all_kinds or kind.draws else 0, width, device=device)
        # Of the last node on each path, for decisions of the host.
        self.last_scores = torch.zeros(rows, vocab if all_kinds or self.may_miss else 0, device=device)
        self.last_position = torch.zeros(rows, dtype=torch.long, device=device)
        self.undecided = torch.zeros(1, dtype=torch.bool, device=device)  # whether steps wait for the host
        self.of_rows = self.buffers[:-1]  # of all rows, of which a step sees the first ones (`show`)

    @property
    def may_miss(self) -> bool:
        """Whether a cut may reach beyond the candidates."""
        return 0 < self.kind.candidates < self.vocab

    @property
    def buffers(self) -> list[Tensor]:
        """All that steps read and change."""
        held = [self.numbers, self.seeds, self.seen, self.noise, self.last_scores, self.last_position]
        return [*held, self.undecided]

    def show(self, kind: Kind, rows: int) -> None:
        """Decide on so many rows, the first ones in memory, by the code of `kind`."""
        self.kind = kind
        self.numbers, self.seeds, self.seen, self.noise, self.last_scores, self.last_position = (
            tensor[:rows] for tensor in self.of_rows
        )

    def begin(self, target: Target, sequences: Sequences, start: int = 0) -> None:
        """Decide for the texts `sequences`, whose prompts are read, as `target` asks, in the rows from `start` on."""
        self.undecided.zero_()
        numbers, seeds, seen, *_ = (tensor[start : start + len(sequences)] for tensor in self.of_rows)
        if not seen.shape[1]:  # it only takes argmaxes
            return
        options = [RowOptions.read(request.processors)[0] for request in target.of_rows]
        samples = [float(request.do_sample) for request in target.of_rows]
        numbers.copy_(on_device([[*o, s] for o, s in zip(options, samples, strict=True)], numbers.device))
        seen.zero_()
        for row, one in enumerate(options):
            if one.penalty != 1:
                seen[row, sequences.prefix(row)[0]] = True
        if target.do_sample and self.kind.rule is None:
            seeds.copy_(target.draws.block(2, seeds.device) * 2**32)

    def select(self, left: Sequence[int]) -> None:
        """Keep only the rows at the places `left`, in this order, because the texts of the others have ended."""
        keep_rows(self.of_rows[:3], left)

    def __call__(self, draft: Draft, logits: Tensor, state: State) -> Acceptance:
        """Decide on a draft from the `logits` [B, N, V] after its nodes; rows without a text are among the B."""
        reader = state.reader
        return self.decide(draft, logits, reader.cache.filled, reader.depth_limit(draft), state.alive)

    def decide(
        self,
        draft: Draft,
        logits: Tensor,
        filled: Tensor,
        depth_limit: Tensor | None = None,
        alive: Tensor | None = None,
    ) -> Acceptance:
        """Decide on a draft from the `logits` [B, N, V] after its nodes, which follow texts of `filled` [B] tokens.

        `alive` [B] is 0 for rows without a text; for `depth_limit` see `decode.accept.accept_greedy`. Next roots may be
        `NO_TOKEN` or, if `may_miss`, `UNDECIDED`. In steps that follow the latter, lengths are 0, and nothing that
        later steps read changes until `finish`. So a step can start before the host knows whether it has to decide."""
        if self.kind.is_argmax:
            return accept_greedy(draft, most_probable(logits), depth_limit)
        scores = self._penalised(draft, logits) / self._number("temperature")
        position = filled[:, None] + torch.arange(draft.topology.max_depth + 1, device=filled.device)
        if self.kind.rule is None:
            noise = None
            if self.kind.draws:
                self.noise.copy_(self._noise(position))  # else torch.compile computes it again for each node
                noise = self.noise[torch.arange(len(filled), device=filled.device)[:, None], draft.topology.depth]
            best = self._decided(scores, noise, self.kind.candidates)
            accepted = accept_greedy(draft, best, depth_limit)
        else:
            shown, _ = self._shown(scores, self.kind.candidates)
            parts = shown.split(max(1, PART // shown[0].numel()))
            accepted = accept_longest(draft, parts, self.kind.rule.passes, depth_limit)
        written = draft.ids.gather(1, accepted.path.clamp_min(0))
        if not self.may_miss:
            self.seen.scatter_(1, written, True)
            return accepted
        waits, missing = self.undecided.clone(), accepted.next_root == UNDECIDED
        if alive is not None:
            missing = missing & (alive > 0)
        self.seen.scatter_(1, written, self.seen.gather(1, written) | ~waits)
        at = accepted.end[:, None, None].expand(-1, -1, scores.shape[-1])
        self.last_scores.copy_(torch.where(waits, self.last_scores, scores.gather(1, at)[:, 0]))
        self.last_position.copy_(torch.where(waits, self.last_position, filled + accepted.length - 1))
        self.undecided.copy_(waits | missing.any())
        root = torch.where(waits | ((accepted.next_root == UNDECIDED) & ~missing), 0, accepted.next_root)
        return accepted._replace(length=torch.where(waits, 0, accepted.length), next_root=root)

    def finish(self, root: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Decide on the next roots [R] that are `UNDECIDED` in `root`, by sorting all tokens; the host does this.

        `rows`: the places that the texts had in the step that left them undecided, if they have moved since. A step
        that has started meanwhile does nothing, and the next one goes on."""
        count, size = len(root), len(self.numbers)
        was = list(range(count)) if rows is None else list(rows)
        at = on_device(was + [0] * (size - count), root.device)
        scores, position = (tensor.index_select(0, at)[:, None] for tensor in self.of_rows[-2:])
        noise = self._noise(position) if self.kind.draws else None
        token = self._decided(scores, noise, self.vocab)[:count, 0]
        self.undecided.zero_()
        return torch.where(root == UNDECIDED, token, root)

    def _number(self, name: str) -> Tensor:
        """An option of the rows, [B, 1, 1]."""
        return self.numbers[:, RowOptions._fields.index(name), None, None].float()

    def _penalised(self, draft: Draft, logits: Tensor) -> Tensor:
        """Apply the repetition penalty to the logits [B, N, V], by each text and the path to each node."""
        scores, penalty = logits.float(), self._number("penalty")
        paths = draft.topology.paths.clamp_min(0)  # their padding becomes the root, which is on every path
        ids = draft.ids[:, None].expand(-1, paths.shape[1], -1).gather(2, paths.expand(len(scores), -1, -1))
        of_paths = _penalty(scores.gather(2, ids), penalty)
        return torch.where(self.seen[:, None], _penalty(scores, penalty), scores).scatter(2, ids, of_paths)

    def _noise(self, position: Tensor) -> Tensor:
        """The noise [B, P, V] of draws at `position` [B, P]; zeros for greedy rows."""
        return gumbel(self.seeds, position, self.vocab) * self.numbers[:, -1, None, None].float()

    def _decided(self, scores: Tensor, noise: Tensor | None, candidates: int) -> Tensor:
        """Decide on the tokens [B, N] after nodes with `scores` [B, N, V] and `noise`; they may be `UNDECIDED`."""
        shown, floor = self._shown(scores, candidates)
        if noise is not None:
            shown = shown + noise
        found = shown.argmax(-1, keepdim=True)
        token = found[..., 0]
        if floor is not None:
            token = token.masked_fill(scores.gather(-1, found)[..., 0] <= floor, UNDECIDED)
        if noise is not None:  # NaN wins an argmax; a greedy text goes on after it, as in `model.generate`
            broken = ~shown.gather(-1, found)[..., 0].isfinite()
            token = token.masked_fill(broken & (self.numbers[:, -1:] > 0), NO_TOKEN)
        return token

    def _shown(self, scores: Tensor, candidates: int) -> tuple[Tensor, Tensor | None]:
        """Apply top-k, top-p, min-p and the other processors to `scores` [B, N, V], which become -inf where they cut.

        Only the most probable `candidates` many are sorted. Where they are not enough, nothing is cut, and the second
        result [B, N] is the score up to which that may be wrong; elsewhere -inf. `None`: all cuts are known."""
        floor = None
        if candidates:
            kept, floor = self._cut(scores, candidates)
            scores = scores.masked_fill(~kept, -torch.inf)
        if self.rest:
            flat = scores.flatten(0, 1)
            scores = processed(self.rest, flat.new_zeros(len(flat), 1, dtype=torch.long), flat).view_as(scores)
        return scores, floor

    def _cut(self, scores: Tensor, candidates: int) -> tuple[Tensor, Tensor | None]:
        """Find the tokens [B, N, V] that top-k, top-p and min-p leave; the second result is that of `_shown`.

        Where top-p ends among equal scores, it leaves any of them, as in transformers, whose sort is not stable."""
        top_k, top_p, min_p = self.numbers[:, 2:5, None, None].unbind(1)
        values, ids = most_probable_ones(scores, candidates)
        p = (values - values[..., :1]).exp().double()
        no_limit = (top_k == 0) | (top_k >= self.vocab)
        place = (top_k.long() - 1).clamp(0, candidates - 1).expand(-1, scores.shape[1], -1)
        among = no_limit | (values >= values.gather(-1, place))  # ties with the last of k tokens are kept
        mass = torch.where(among, p, 0)
        total = mass.sum(-1, keepdim=True)
        if candidates < self.vocab:
            everything = (scores - values[..., :1]).exp().sum(-1, keepdim=True)
            total = torch.where(no_limit, everything.double(), total)
        left = among & (mass.cumsum(-1) - mass < top_p * total) & (p >= min_p)
        left = left.index_fill(-1, left.new_zeros(1, dtype=torch.long), True)  # the best one, also with top-p 0
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ids, left)
        if candidates == self.vocab:
            return kept, None
        ties, more = ~no_limit & among[..., -1:], no_limit & left[..., -1:]
        floor = torch.where(more & ((top_p < 1) | (min_p > 0)), values[..., -1:].double(), -torch.inf)
        return kept | more, torch.where(ties, torch.inf, floor)[..., 0]


def _penalty(scores: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def gumbel(seeds: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [B, P, V] for `vocab` tokens at each `position` [B, P] of texts with `seeds` [B, 2] of 32 bits."""
    first = mixed(mixed(seeds[:, :1]) ^ position)
    second = mixed(seeds[:, 1:] ^ first)
    token = torch.arange(vocab, device=seeds.device)
    word = mixed(mixed(token ^ first[..., None]) ^ second[..., None])
    u = ((word.float() + 0.5) * 2**-32).clamp_max(1 - 2**-24)  # near 0 it has all 32 bits, and there the best draws are
    return -torch.log(-torch.log1p(-u))


def mixed(word: Tensor) -> Tensor:
    """Hash 32-bit words, held in int64, one to one (constants: Wellons, hash-prospector); no product overflows."""
    word = ((word ^ (word >> 15)) * 0x2C1B3C6D) & WORD
    word = ((word ^ (word >> 12)) * 0x297A2D39) & WORD
    return word ^ (word >> 15)
