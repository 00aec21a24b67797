"""Samples many decoding steps from one fixed context, and tests their tokens.

A faulty draft can only change the tokens after the root, because the root comes from the backbone's own logits. So the
root is fixed, and the tokens after it are sampled. They must follow the target, which is the backbone's distribution
after temperature, top-k, top-p and penalties. Drafting, forwards and acceptance are the production code. Only the
decoding loop differs: all R draws (sampled steps) share the backbone's forwards. With `--compile`, the compiled code of
the sampler decides on the draws; the forwards stay eager, as other rounding would be taken for a difference.

Shapes: V vocabulary, N nodes of a draft, R draws, F first tokens: the most probable tokens after the root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from decode.accept import accept_longest, accept_sampled, accept_walk, ended_at, pack
from decode.bench.losslessness.cases import MAX_CHILDREN, SLOW_SHARE, Case, Rule
from decode.bench.losslessness.chi2 import combined, goodness_of_fit
from decode.bench.losslessness.compiled import CompiledDecisions
from decode.draft import Draft, Frontier
from decode.drafters.base import DrafterFactory
from decode.drafters.heads import HeadsDrafter
from decode.drafters.levelwise import LevelwiseDrafter
from decode.ops.draws import SharedDraws
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.session import Session
from decode.settings import Settings
from decode.step import State
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.inputs import HeadInputs
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, over_all

PATIENCE = 4  # a drafter that drafts nothing after this many times its `warm_up` steps is used as it is
STAR = 256  # nodes of a tree that tries many tokens after the root
TEXTS = 8  # texts of a forward without a tree
FIRST_TOKENS = 32  # the second token is tested after each of so many first tokens
MAX_ROWS = 50_000  # draws that are taken together; fewer for a large vocabulary
MAX_SCORES = 2**28  # scores that are cached, 1 GiB of float32

Take = Callable[[int], Tensor]  # samples that many steps: what `decode.accept.pack` returns
OnDraws = Callable[[int], object]  # receives the number of draws that have just been taken


def require_room(prompts: Sequence[Sequence[int]], settings: Settings, model: PreTrainedModel) -> None:
    """Raise RequestError if a prompt plus two tokens exceeds the context of the backbone or contrastive amateur."""
    models = {"backbone": model} | ({} if settings.amateur is None else {"amateur": settings.amateur.model})
    longest = max(map(len, prompts))
    for name, some in models.items():
        context = Backbone(some).context
        if context is not None and longest > context - 2:
            raise RequestError(
                f"a prompt to draw from has {longest} tokens, but may have {context - 2}: the {name}'s context ends at "
                f"{context}; shorten it, leave it out by --skip-long, or put shorter ones first and choose with "
                "--sampled-prompts"
            )


class FixedContext:
    """The text that all draws of an experiment continue: a prompt and a fixed root, with the session that holds them.

    The root is the most probable token after the prompt, or after the greedy steps that a drafter needs to warm up."""

    def __init__(self, model: PreTrainedModel, prompt: list[int], settings: Settings, source: DrafterFactory) -> None:
        """Prefill the prompt, warm up the drafter and fix the root; raise RequestError if the prompt is too long."""
        require_room([prompt], settings, model)
        requests = prepare(model, [prompt], seeds=[0], **replace(settings, stop=()).generate_kwargs())
        self.model, self.source, self.amateur, self.processors = model, source, settings.amateur, requests[0].processors
        if self.amateur is not None:
            self.amateur.require_fitting(model, requests)
        slack = max(source.num_nodes, STAR)
        self.session = Session(model, requests, slack=slack, heads=source.heads, readers=self.amateur)
        self.drafter = source.start(self.session)
        root, hidden = self.session.prefill(most_probable_first=True)
        self.state = State(self.session.reader, self.session.heads_cache, root, hidden)
        self.session.sequences.extend(0, root.tolist())
        self._warm_up(source.warm_up)
        self.root = int(self.state.root)
        self.text = self.session.sequences.tail(0, 0)

    @property
    def frontier(self) -> Frontier:
        """What drafters read."""
        return self.state.frontier()

    def _warm_up(self, steps: int) -> None:
        """Take at least `steps` greedy steps of one token each, and more (up to a limit) until the drafter drafts."""
        session, sequences = self.session, self.session.sequences
        room = (session.backbone.context or 1 << 30) - 2
        for step in range(steps * PATIENCE):
            draft = self.drafter.propose(self.frontier)
            ready = step >= steps and draft.topology.num_nodes > 1
            if ready or sequences.finish_reason[0] is not None or sequences.lengths[0] > room:
                return
            readout = session.reader(draft)
            root = session.target.next([0], sequences, readout.logits[:, 0], most_probable_only=True)
            accepted = ended_at(draft, draft.ids.new_zeros(1), root.to(draft.ids.device))
            self.state.compact(draft, readout, accepted)
            self.state.count([1])
            sequences.extend(0, self.state.root.tolist())

    def first_head(self) -> Tensor | None:
        """Compute the first head's distribution after the root, [V tokens] on the CPU; `None` if there are no heads."""
        heads, backbone, frontier = self.source.heads, self.session.backbone, self.frontier
        if heads is None:
            return None
        hidden = frontier.hidden[:, None].to(heads.device, heads.dtype)
        root = heads.embed(frontier.root[:, None, None], backbone.embed)
        logits = heads(HeadInputs(hidden, root, frontier.context_kv), lm_head_for(heads, backbone), 1)
        logits = over_all(heads, logits[:, :, 0], backbone.vocab_size)
        return self.session.target.draft_probabilities([0], logits.transpose(0, 1))[0, 0].cpu()

    def expected(self, texts: Sequence[list[int]]) -> Tensor:
        """Compute the target's scores (processed logits) [texts, V] after whole texts of one length, without a tree."""
        ids = torch.tensor(texts, device=self.session.backbone.device)
        found: list[Tensor] = []
        for part in ids.split(TEXTS):
            logits = self.model(input_ids=part, use_cache=False).logits[:, -1]
            if self.amateur is not None:
                theirs = self.amateur.model(input_ids=part, use_cache=False).logits[:, -1]
                logits = self.amateur.contrast(logits, theirs)
            found += map(self.processors, part.split(1), logits.float().split(1))
        return torch.cat(found)

    def verified(self, tokens: Sequence[int] | None = None) -> Tensor:
        """Compute the target's scores [1, V] after the root, by a forward over a tree, as decoding does.

        With `tokens`, compute the scores after the root and each of these tokens, [number of tokens, V]."""
        device, found = self.session.backbone.device, []
        for start in range(0, len(tokens or [0]), STAR - 1):
            part = list(tokens or ())[start : start + STAR - 1]
            star = Tree.from_paths([rank] for rank in range(len(part))).to(device)
            scores = self.scores_of_nodes(Draft(torch.tensor([[self.root, *part]], device=device), Topology.of(star)))
            found.append(scores[1:] if part else scores)
        return torch.cat(found)

    def logits_of_nodes(self, draft: Draft) -> Tensor:
        """Compute the logits [N, V] after each node of a draft for one text. The KV cache drops the draft."""
        logits = self.session.reader(draft).logits[0]
        for cache in self.session.reader.caches:
            cache.keep([0])
        return logits

    def scores_of_nodes(self, draft: Draft) -> Tensor:
        """Compute the target's scores [N, V] after each node of a draft for one text."""
        session, logits = self.session, self.logits_of_nodes(draft)
        paths = [path[path >= 0] for path in draft.topology.paths[0, :, 1:]]
        prefixes = [session.sequences.prefix(0, draft.ids[0, path]) for path in paths]
        return torch.cat([session.target.scores(0, *pair) for pair in zip(prefixes, logits, strict=True)])


class Experiment:
    """Samples many decoding steps from one fixed context, and tests their tokens against the target distribution."""

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        source: DrafterFactory,
        prompt: list[int],
        settings: Settings,
        random: Generator,
        compiled: CompiledDecisions | None = None,
    ) -> None:
        """Prefill `prompt`. Compute the target's scores after the root and after each of the most probable next tokens.

        Random numbers come from `random`, on the backbone's device. With `compiled`, rules that draw on chosen drafts
        do so by compiled code. Raises RequestError if the prompt is too long, or if compiled steps cannot sample so."""
        self.settings, self.draws, self.compiled = settings, SharedDraws(random), compiled
        self.source = source.reshaped(lambda tree: tree.clip(2))  # deeper nodes decide on tokens that are not counted
        self.context = context = FixedContext(model, prompt, settings, self.source)
        self.vocab = context.session.backbone.vocab_size
        self.head = context.first_head()
        # Below float32, rounding in forwards without a tree differs so much from that in tree forwards that a million
        # draws show it. The size of the tree matters as well. So the target then comes from the forwards of the draws.
        self.is_independent = model.dtype in (torch.float32, torch.float64)
        self.after_root = context.expected([context.text])[0] if self.is_independent else context.verified()[0]
        self.firsts = self.after_root.softmax(-1).topk(min(FIRST_TOKENS, self.vocab)).indices.tolist()
        texts = [[*context.text, token] for token in self.firsts]
        self.after_firsts = context.expected(texts) if self.is_independent else context.verified(self.firsts)
        # Cache of the target's scores [V] after the root and one more token, by this token; from tree forwards.
        self.known = {} if self.is_independent else dict(zip(self.firsts, self.after_firsts, strict=True))

    @torch.inference_mode()
    def run(self, rule: Rule, number: int, draws: int, on_progress: OnDraws = lambda draws: None) -> Case:
        """Sample `draws` steps with `rule`, and test their tokens. `number`: the prompt's index, for the result.

        If `rule.whole`, or with compiled code, so many steps take too long, and one of `SLOW_SHARE` is sampled."""
        applied = AcceptanceRule(rule.acceptance, self.settings.epsilon, self.settings.delta)
        truncate = applied if applied.kind.truncates else None
        after_root, after_firsts = self.after_root, self.after_firsts
        share = SLOW_SHARE if rule.whole or self.compiled is not None else 1  # so many times less memory, too
        at_once = max(1_000, min(MAX_ROWS, 2**27 // self.vocab)) // share
        if rule.draft == "sample":
            take = self._sampled(truncate, rule.whole)
        else:
            draft = self.context.drafter.propose(self.context.frontier)
            scores = self.context.scores_of_nodes(draft)
            take = self._chosen(applied, draft, _truncated(scores, truncate))
            if self.compiled is not None and applied.kind.walks:
                logits = self.context.logits_of_nodes(draft)
                take = self.compiled.begin(applied, self.context.session, draft, logits, at_once)
            if not self.is_independent:
                after_root, after_firsts = scores[0], self._of_firsts(draft, scores)
        draws = -(-draws // share)
        first, second, accepted_tokens = self._count(
            take, draws, lambda counted: on_progress(share * counted), not applied.kind.walks, at_once
        )
        truncated = truncate if rule.against == "truncated target" else None
        target = _truncated(after_root, truncated).double().softmax(-1).cpu()
        after = _truncated(after_firsts, truncated).double().softmax(-1).cpu()
        about = number, self.settings.temperature, self.settings.top_p, rule
        first_fit = goodness_of_fit(first, target)
        second_fit = combined([goodness_of_fit(counts, p) for counts, p in zip(second, after, strict=True)])
        return Case(*about, first_fit, second_fit, first / draws, target, self.head, accepted_tokens / draws)

    def _count(
        self, take: Take, draws: int, on_progress: OnDraws, same: bool, at_once: int
    ) -> tuple[Tensor, Tensor, int]:
        """Take `draws` decoding steps with `take`, and count the tokens that they write.

        Return how often each of V tokens came first after the root [V], and how often each came second after each of
        the F most probable first tokens [F, V]. The third result is the number of accepted tokens. With `same`, all
        steps give the same result, so one is taken and counted `draws` times; else up to `at_once` are taken together.
        """
        first = torch.zeros(self.vocab, dtype=torch.long)
        second = torch.zeros(len(self.firsts), self.vocab, dtype=torch.long)
        place = torch.full((self.vocab,), -1).index_copy_(0, torch.tensor(self.firsts), torch.arange(len(self.firsts)))
        accepted_tokens = 0
        for start in range(0, draws, draws if same else at_once):
            rows, weight = (1, draws) if same else (min(at_once, draws - start), 1)
            packed = take(rows)
            more, next_root, path = packed[:, 0] - 1, packed[:, 1], packed[:, 2:]
            deepest = path.shape[1] - 1
            one = torch.where(more > 0, path[:, min(1, deepest)], next_root).cpu()
            two = torch.where(more > 1, path[:, min(2, deepest)], next_root).cpu()
            first += weight * one.bincount(minlength=self.vocab)
            both = (more.cpu() > 0) & (place[one] >= 0)
            cells = place[one[both]] * self.vocab + two[both]
            second += weight * cells.bincount(minlength=second.numel()).view_as(second)
            accepted_tokens += weight * int(more.sum())
            on_progress(weight * rows)
        return first, second, accepted_tokens

    def _of_firsts(self, draft: Draft, scores: Tensor) -> Tensor:
        """Return the scores [F, V] after `firsts`: from `scores` [N, V] if drafted, else those in `after_firsts`."""
        found = self.after_firsts.clone()
        for token, depth, after in zip(draft.ids[0].tolist(), draft.topology.depth[0].tolist(), scores, strict=True):
            if depth == 1 and token in self.firsts:
                found[self.firsts.index(token)] = after
        return found

    def _chosen(self, rule: AcceptanceRule, draft: Draft, scores: Tensor) -> Take:
        """Make a function that samples steps on one draft of best guesses, which has N nodes with `scores` [N, V]."""

        def of_nodes(rows: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            return scores, nodes

        def decide(rows: Tensor, scores: Tensor, index: Tensor) -> Tensor:
            return self.draws.tokens(rows, scores.softmax(-1), index)

        def take(rows: int) -> Tensor:
            many = Draft(draft.ids.expand(rows, -1), draft.topology)
            if not rule.kind.walks:
                return pack(many, accept_longest(many, [scores.expand(rows, -1, -1)], rule.passes))
            return pack(many, accept_walk(many, of_nodes, decide))

        return take

    def _sampled(self, truncate: AcceptanceRule | None, whole: bool = False) -> Take:
        """Make a function that samples steps, each on a newly sampled draft. `truncate` cuts off unlikely tokens.

        Unless `whole`, nodes keep `MAX_CHILDREN` children."""
        context = self.context
        # Draws must not choose nodes, so the candidates of a dynamic tree replace the tree.
        narrow = self.source.reshaped(lambda tree: narrowed(tree.candidates, MAX_CHILDREN))
        source = self.source if whole else narrow
        drafter = source.start(context.session, drawn=True)
        assert isinstance(drafter, HeadsDrafter | LevelwiseDrafter), "drafters that can draw have these shapes"
        root_scores = _truncated(context.verified(), truncate)

        def take(rows: int) -> Tensor:
            draft = drafter.draw(context.frontier, context.session.target, self.draws, rows)

            def after(walking: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor]:
                if depth == 1:
                    tokens, index = draft.ids[walking, nodes].unique(return_inverse=True)
                    return _truncated(self._after(tokens.tolist()), truncate), index
                return root_scores, torch.zeros_like(walking)  # after the root; third tokens are not counted

            return pack(draft, accept_sampled(draft, after, self.draws))

        return take

    def _after(self, tokens: list[int]) -> Tensor:
        """Return the target's scores [number of tokens, V] after the root and each of `tokens`. Results are cached."""
        found = self.known
        if missing := [token for token in tokens if token not in found]:
            found = found | dict(zip(missing, self.context.verified(missing), strict=True))
        if len(found) * self.vocab < MAX_SCORES:
            self.known = found
        return torch.stack([found[token] for token in tokens])


def narrowed(tree: Tree, num_children: int) -> Tree:
    """Make a copy of a tree in which each node keeps only its first `num_children` children, with their subtrees."""
    kept = [bool((tree.order[[n for n in line if n >= 0]] < num_children).all()) for line in tree.paths.tolist()]
    narrow = Tree.from_paths([path for path, keep in zip(tree.rank_paths, kept[1:], strict=True) if keep])
    return replace(narrow, shortlist=tree.shortlist)


def _truncated(scores: Tensor, by: AcceptanceRule | None) -> Tensor:
    return scores if by is None else scores.masked_fill(~by.passes(scores), -torch.inf)
