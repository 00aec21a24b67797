"""Very many draws from one fixed context through the production acceptance code, counted against the target.

In Medusa the root comes from the backbone's own logits and proves nothing: drafts could only spoil the tokens after it.
All draws go through production code: prefill, drafter, verification of the tree, processors, acceptance. Only the loop
around it is our own, because R rows share one forward.

Shapes: V vocabulary, N nodes, R draws, F first tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.accept import Acceptance, Truncation, accept_longest, accept_walk, typical
from decode.bench.chi2 import combined, goodness_of_fit
from decode.bench.losslessness.cases import Case, Rule
from decode.bench.losslessness.context import FixedContext
from decode.draft import Draft
from decode.drafters.base import DrafterFactory
from decode.drafters.heads import HeadsDrafter
from decode.drafters.levelwise import LevelwiseDrafter
from decode.loop import Acceptor
from decode.ops.draws import SharedDraws
from decode.rejection import accept_sampled
from decode.settings import Settings
from medusa.tree import Layout, Tree

FIRST_TOKENS = 32  # first tokens, the most probable ones, after which the second is tested
MAX_ROWS = 50_000  # draws that walk at a time, fewer for a large vocabulary
MAX_CHILDREN = 2  # that a node of a sampled tree keeps: each more multiplies the pasts that rows can have
KNOWN_VALUES = 2**28  # scores that are kept, 1 GiB of float32

Take = Callable[[int], tuple[Draft, Acceptance]]
"""Draws a number of rows: their drafts and what was accepted of them."""
OnDraws = Callable[[int], object]
"""Receives the number of draws just taken."""


class Experiment:
    """Draws from one context by any rule."""

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        source: DrafterFactory,
        prompt: list[int],
        settings: Settings,
        generator: torch.Generator,
    ) -> None:
        """`settings`: temperature, top-k and the like; `generator`: of all draws, on the backbone's device.

        Raises:
            RequestError: the prompt is too long (`decode.bench.losslessness.context.require_room`)."""
        self.settings, self.draws = settings, SharedDraws(generator)
        self.source = source.reshaped(_two_deep)  # deeper nodes decide on tokens that are not counted
        self.context = FixedContext(model, prompt, settings, self.source)
        self.vocab = self.context.session.backbone.vocab_size
        self.head = self.context.first_head()
        # The target comes from plain forwards. Below float32 these differ from the tree's own by more than a million
        # draws can overlook, and so do two trees of different sizes. There the target comes from the forwards that are
        # drawn from: it is measured, not exact.
        self.is_independent = model.dtype in (torch.float32, torch.float64)
        text = self.context.text
        self.after_root = self.context.expected([text])[0] if self.is_independent else self.context.verified([[]])[0]
        self.firsts = self.after_root.softmax(-1).topk(min(FIRST_TOKENS, self.vocab)).indices.tolist()
        self.known: dict[int, Tensor] = {}
        """Scores [V] after the root and a token, from tree forwards."""
        if self.is_independent:
            self.after_firsts = self.context.expected([[*text, token] for token in self.firsts])
        else:
            self.after_firsts = self.context.verified([[token] for token in self.firsts])
            self.known = dict(zip(self.firsts, self.after_firsts, strict=True))

    @torch.inference_mode()
    def run(self, rule: Rule, number: int, draws: int, on_progress: OnDraws = lambda rows: None) -> Case:
        """Take `draws` steps by `rule` and count their tokens against the target. `number` is that of the prompt."""
        truncation = Truncation(self.settings.epsilon, self.settings.delta)
        truncate = truncation if rule.acceptance == "typical-sampled" else None
        after_root, after_firsts = self.after_root, self.after_firsts
        if rule.draft == "sample":
            take = self._sampled(truncate)
        else:
            draft = self.context.drafter.propose(self.context.frontier)
            scores = self.context.scores_of_nodes(draft)
            take = self._chosen(rule, draft, _truncated(scores, truncate))
            if not self.is_independent:
                after_root, after_firsts = scores[0], self._of_firsts(draft, scores)
        first, second, accepted_tokens = self._count(take, draws, on_progress, rule.acceptance == "typical")
        truncated = truncation if rule.against == "truncated target" else None
        target = _truncated(after_root, truncated).double().softmax(-1).cpu()
        after = _truncated(after_firsts, truncated).double().softmax(-1).cpu()
        found = goodness_of_fit(first, target)
        then = combined([goodness_of_fit(counts, p) for counts, p in zip(second, after, strict=True)])
        return Case(
            prompt=number,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            rule=rule,
            first=found,
            second=then,
            joint=combined([found, then]),
            frequencies=first / draws,
            target=target,
            draft=None if self.head is None else self.head.cpu(),
            mean_accepted=accepted_tokens / draws,
        )

    def _count(self, take: Take, draws: int, on_progress: OnDraws, same: bool) -> tuple[Tensor, Tensor, int]:
        """Counts of the first drafted tokens [V] and of the second after each [F, V], and all accepted tokens.

        `same`: all draws have the same outcome, so one of them counts for all."""
        first = torch.zeros(self.vocab, dtype=torch.long)
        second = torch.zeros(len(self.firsts), self.vocab, dtype=torch.long)
        place = torch.full((self.vocab,), -1)
        place[self.firsts] = torch.arange(len(self.firsts))
        accepted_tokens = 0
        at_once = max(1_000, min(MAX_ROWS, 2**27 // self.vocab))
        for start in range(0, draws, draws if same else at_once):
            weight = draws if same else 1
            rows = min(at_once, draws - start)
            draft, accepted = take(rows)
            written = torch.cat([draft.ids.gather(1, accepted.path.clamp_min(0)), accepted.next_root[:, None]], dim=1)
            more = accepted.length - 1
            one = torch.where(more > 0, written[:, min(1, written.shape[1] - 1)], accepted.next_root).cpu()
            two = torch.where(more > 1, written[:, min(2, written.shape[1] - 1)], accepted.next_root).cpu()
            first += weight * one.bincount(minlength=self.vocab)
            both = (more.cpu() > 0) & (place[one] >= 0)
            cells = place[one[both]] * self.vocab + two[both]
            second += weight * cells.bincount(minlength=second.numel()).view_as(second)
            accepted_tokens += weight * int(more.sum())
            on_progress(draws if same else rows)
        return first, second, accepted_tokens

    def _of_firsts(self, draft: Draft, scores: Tensor) -> Tensor:
        """Scores [N, V] of the nodes of a draft -> [F, V] after the first tokens; others are not counted."""
        found = self.after_firsts.clone()
        for node in (draft.topology.depth[0] == 1).nonzero()[:, 0].tolist():
            token = int(draft.ids[0, node])
            if token in self.firsts:
                found[self.firsts.index(token)] = scores[node]
        return found

    def _chosen(self, rule: Rule, draft: Draft, scores: Tensor) -> Take:
        """Draws with `draft topk`: one draft, one forward, and rows that walk over its scores [N, V]."""

        def of_nodes(rows: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
            return scores, nodes

        def decide(rows: Tensor, scores: Tensor, index: Tensor) -> Tensor:
            return self.draws.tokens(rows, scores.softmax(-1), index)

        def take(rows: int) -> tuple[Draft, Acceptance]:
            if rule.acceptance == "typical":
                passes = Acceptor("typical", self.settings.epsilon, self.settings.delta).passes
                assert passes is not None
                return draft, accept_longest(draft, of_nodes, passes)
            many = Draft(draft.ids.expand(rows, -1), draft.topology)
            return many, accept_walk(many, of_nodes, decide)

        return take

    def _sampled(self, truncate: Truncation | None) -> Take:
        """Draws with `draft sample`: every row draws its own tree from the drafter's distributions."""
        context = self.context
        drafter = self.source.reshaped(_drawable).start(context.session)
        assert isinstance(drafter, HeadsDrafter | LevelwiseDrafter), "drafters that can draw have these shapes"
        root_scores = _truncated(context.verified([[]]), truncate)

        def take(rows: int) -> tuple[Draft, Acceptance]:
            draft = drafter.draw(context.frontier, context.session.target, self.draws, rows)

            def after(walking: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
                if int(draft.topology.depth[0, nodes[0]]) == 1:  # all rows that walk have the same depth
                    tokens, index = draft.ids[walking, nodes].unique(return_inverse=True)
                    return _truncated(self._after(tokens.tolist()), truncate), index
                return root_scores, torch.zeros_like(walking)  # after the root; deeper, the third token is not counted

            return draft, accept_sampled(draft, after, self.draws)

        return take

    def _after(self, tokens: list[int]) -> Tensor:
        """Scores [len(tokens), V] after the root and each token, kept for later draws while memory allows."""
        missing = [token for token in tokens if token not in self.known]
        fresh: dict[int, Tensor] = {}
        if missing:
            fresh = dict(zip(missing, self.context.verified([[token] for token in missing]), strict=True))
            if (len(self.known) + len(fresh)) * self.vocab < KNOWN_VALUES:
                self.known |= fresh
        return torch.stack([fresh[token] if token in fresh else self.known[token] for token in tokens])


def _two_deep(tree: Layout) -> Layout:
    return tree.clip(2) if tree.max_depth > 2 else tree


def _drawable(tree: Layout) -> Tree:
    """A tree for drawn drafts. Draws may not choose nodes, so a dynamic tree is replaced by its candidates."""
    return narrowed(tree.candidates, MAX_CHILDREN)


def narrowed(tree: Tree, num_children: int) -> Tree:
    """The nodes of `tree` that are, like all nodes above them, among the first `num_children` children."""
    kept = [bool((tree.order[[n for n in line if n >= 0]] < num_children).all()) for line in tree.paths.tolist()]
    return Tree.from_paths([path for path, keep in zip(tree.rank_paths, kept[1:], strict=True) if keep])


def _truncated(scores: Tensor, truncation: Truncation | None) -> Tensor:
    if truncation is None:
        return scores
    return scores.masked_fill(~typical(scores.softmax(-1), *truncation), -torch.inf)
