"""Evidence that decoding with heads changes nothing: the experiments behind `medusa verify`.

Greedy: the same prompts with and without heads; where texts part, the gap between the two tokens' logits tells a tie
that rounding broke from an error. Sampling: from one fixed context, very many draws through the production acceptance
code, counted against the target (docs/exactness.md).

Shapes: V vocabulary, N nodes, R draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from decode.accept import Acceptance, accept_sampled, accept_typical, accept_walk, ended_at, typical
from decode.bench.chi2 import Comparison, compare, together
from decode.bench.methods import Method
from decode.draft import Draft, DrafterContext, DrafterFactory
from decode.drafters import DrafterLike, drafter_factory
from decode.drafters.dynamic_tree import DynamicTree, Layout
from decode.drafters.heads import HeadsDrafter
from decode.drafters.paths import PathDrafter
from decode.loop import Session
from decode.request import prepare, require_amateur
from decode.sampling import SharedDraws, Truncation
from decode.settings import Settings
from decode.strategies.contrastive import Amateur, Contrast
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, over_all

CAUTION = 4.0  # how much more often than it says so small a p-value comes, at the most: see `decode.bench.chi2.LEAST`
FALSE_ALARM = 1e-4
"""Chance that the draws of `medusa verify` fail although nothing is wrong: over all of its tests together, and as far
as the chi-square law holds (docs/exactness.md)."""
TIE = 1e-5
"""In float32, a gap between logits below which their order is a matter of the order of additions."""
FIRST_TOKENS = 32  # first tokens, the most probable ones, after which the second is tested
ROWS = 50_000  # draws that walk at a time, fewer where the vocabulary is large
PATIENCE = 4  # times as many steps as a drafter wants to see, at most, before it is tried as it is
WIDEST = 2  # children that a node of a sampled tree keeps: each more multiplies the pasts that rows can have


@dataclass
class Divergence:
    """Where the text with heads leaves the plain one."""

    prompt: int
    position: int
    """Index of the first new token that differs."""
    plain_token: int | None
    """`None` where that text had ended already."""
    medusa_token: int | None
    gap: float | None
    """Logit of the plain token less that of the other, by a plain forward over the text that they share."""
    top2_gap: float
    """Logit of the most probable token less that of the second, there."""
    bound: float
    """Up to which the gap is put down to rounding; see `tie_bound`."""

    @property
    def is_rounding(self) -> bool:
        return self.gap is not None and abs(self.gap) <= self.bound and self.top2_gap <= self.bound


def tie_bound(dtype: torch.dtype, top: float) -> float:
    """The gap of logits up to which rounding may decide, where the largest one is `top`.

    float64: none is allowed. float32: 1e-5. Below: four units in the last place of the largest logit; the same number
    computed twice, in another order, may be two such units off, and so may the other one.
    """
    if dtype == torch.float64:
        return 0.0
    return TIE if dtype == torch.float32 else 4 * torch.finfo(dtype).eps * abs(top)


@dataclass
class Greedy:
    """Outcome of the greedy comparison."""

    prompts: int
    equal: int
    divergences: list[Divergence]

    @property
    def ties(self) -> int:
        return sum(divergence.is_rounding for divergence in self.divergences)

    @property
    def passed(self) -> bool:
        return self.ties == len(self.divergences)

    def to_dict(self) -> dict[str, Any]:
        told = [asdict(d) | {"is_rounding": d.is_rounding} for d in self.divergences]
        return {"prompts": self.prompts, "equal": self.equal, "rounding_ties": self.ties, "divergences": told}


def compare_greedy(
    model: PreTrainedModel,
    plain: Method,
    medusa: Method,
    prompts: Sequence[list[int]],
    batch_size: int = 1,
    on_progress: Callable[[], None] = lambda: None,
    amateur: Amateur | None = None,
) -> Greedy:
    """Decode `prompts` one by one without heads, and in batches of `batch_size` with them.

    `amateur`: whom both methods contrast the backbone with."""
    divergences = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        for offset, (prompt, found) in enumerate(zip(batch, medusa(batch), strict=True)):
            expected = plain([prompt])[0].new_ids
            if found.new_ids != expected:
                divergences.append(_divergence(model, start + offset, prompt, expected, found.new_ids, amateur))
            on_progress()
    return Greedy(len(prompts), len(prompts) - len(divergences), divergences)


@torch.inference_mode()
def _divergence(
    model: PreTrainedModel,
    number: int,
    prompt: list[int],
    plain: list[int],
    medusa: list[int],
    amateur: Amateur | None = None,
) -> Divergence:
    at = next((i for i, (a, b) in enumerate(zip(plain, medusa, strict=False)) if a != b), min(len(plain), len(medusa)))
    ids = torch.tensor([prompt + plain[:at]], device=Backbone(model).device)
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].double()
    token, other = (text[at] if at < len(text) else None for text in (plain, medusa))
    if amateur is not None:
        theirs = amateur.model(input_ids=ids, use_cache=False).logits[0, -1].double()
        gap, top2_gap = _contrast_gaps(amateur.contrast, logits, theirs, token, other)
        parts = zip(amateur.contrast.weights, (logits, theirs), strict=True)
        bound = sum(weight * tie_bound(model.dtype, float(some.max())) for weight, some in parts)
        return Divergence(number, at, token, other, gap, top2_gap, bound)
    best = logits.topk(2).values
    gap = None if token is None or other is None else float(logits[token] - logits[other])
    bound = tie_bound(model.dtype, float(best[0]))
    return Divergence(number, at, token, other, gap, float(best[0] - best[1]), bound)


def _contrast_gaps(
    contrast: Contrast, expert: Tensor, amateur: Tensor, token: int | None, other: int | None
) -> tuple[float | None, float]:
    """Logits [V] of both models -> the gap of scores between two tokens, and of the two best words.

    Rounding can also move a word over the edge of plausibility, where its score is not small: the gap is then how far
    the word is from that edge."""
    scores, edge = contrast(expert, amateur), contrast.margin(expert)
    known = [word for word in (token, other) if word is not None]
    nearest = min((float(edge[word].abs()) for word in known), default=float("inf"))
    best = scores.topk(2).values
    gap = None
    if len(known) == 2:
        gap = float(scores[known[0]] - scores[known[1]])  # nan where neither is plausible
        gap = nearest if not abs(gap) <= nearest else gap
    return gap, min(float(best[0] - best[1]), nearest)


class Rule(NamedTuple):
    """What a case draws with."""

    acceptance: str
    draft: str
    against: str = "target"
    """target, or truncated target: what a sample of `typical-sampled` follows."""

    @property
    def is_judged(self) -> bool:
        """Whether it claims to draw from what it is compared with; a lossy rule is only seen to differ."""
        return self.acceptance == "rejection" or self.against == "truncated target"


RULES = (
    Rule("rejection", "topk"),
    Rule("rejection", "sample"),
    Rule("typical-sampled", "topk", "truncated target"),
    Rule("typical-sampled", "topk"),
    Rule("typical", "topk"),
)


def rules_for(source: DrafterFactory) -> list[Rule]:
    """Those that its drafts can be judged by."""
    return [rule for rule in RULES if rule.draft == "topk" or source.can_draw]


@dataclass
class Case:
    """One prompt, one target, one rule: counts of the first drafted token and of the second after it."""

    prompt: int
    temperature: float
    top_p: float
    rule: Rule
    first: Comparison
    """Of the first drafted token, the one after the root."""
    second: Comparison
    """Of the token after that, given the first, where the same step decided on both."""
    joint: Comparison
    """Both together."""
    frequencies: Tensor
    """[V] of the first drafted token."""
    target: Tensor
    """[V] what they are compared with."""
    draft: Tensor | None
    """[V] the first head's distribution, if heads draft."""
    mean_accepted: float
    """Drafted tokens accepted a step, from this context, by the tree that was tried: two levels of the user's at most,
    and of a drawn one two children a node."""

    def to_dict(self) -> Iterator[dict[str, Any]]:
        for tokens, found in ((1, self.first), (2, self.joint)):
            yield {
                "prompt": self.prompt,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tokens": tokens,
                "draft": self.rule.draft,
                "acceptance": self.rule.acceptance,
                "against": self.rule.against,
                "judged": self.rule.is_judged,
                "total_variation": found.total_variation,
                "expected_total_variation": found.expected_total_variation,
                "std_of_difference": found.std_of_difference,
                "expected_std": found.expected_std,
                "chi2": found.chi2,
                "degrees_of_freedom": found.degrees_of_freedom,
                "chi2_p_value": found.p_value,
                "impossible_draws": found.impossible,
                "mean_accepted": self.mean_accepted,
            }


def passes(cases: Sequence[Case]) -> bool:
    """No test of a rule that claims to be exact is below its share of the family-wise false-alarm rate."""
    return all(value >= threshold(cases) for value in p_values(cases))


def threshold(cases: Sequence[Case]) -> float:
    """FALSE_ALARM shared out evenly among the tests (Bonferroni), with room for what the chi-square law leaves out."""
    return FALSE_ALARM / CAUTION / max(len(p_values(cases)), 1)


def p_values(cases: Sequence[Case]) -> list[float]:
    """Of all tests that are judged."""
    judged = [case for case in cases if case.rule.is_judged]
    return [found.p_value for case in judged for found in (case.first, case.joint)]


def require_room(prompts: Sequence[Sequence[int]], backbone: Backbone, who: str = "backbone") -> None:
    """Raises:
    RequestError: behind a prompt the context has no room for a root and a token after which the second is drawn."""
    longest, context = max(map(len, prompts)), backbone.context
    if context is not None and longest > context - 2:
        raise RequestError(
            f"a prompt to draw from has {longest} tokens, but may have {context - 2}: the {who}'s context ends at "
            f"{context}; shorten it, or put shorter ones first and choose with --sampled-prompts"
        )


class Experiment:
    """Draws from one context: a prompt and a fixed root, the backbone's most probable token after it. (Where a drafter
    learns from steps: a prompt with what the backbone says next, up to a root behind which it drafts.)

    In Medusa the root comes from the backbone's own logits and proves nothing; what the heads could spoil are the
    tokens after it. Everything that is drawn goes through production code: prefill, heads, verification of the tree,
    warpers, acceptance. Only the loop around it is ours: R rows share the one forward.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        heads: MedusaHeads | None,
        tree: Layout | None,
        prompt: list[int],
        settings: Settings,
        generator: torch.Generator,
        drafter: DrafterLike = None,
    ) -> None:
        """`settings`: temperature, top-k and the like; `generator`: all randomness, on the backbone's device.

        Raises:
            RequestError: a prompt that `require_room` refuses."""
        self.model, self.settings, self.draws = model, settings, SharedDraws(generator)
        backbone = Backbone(model)
        require_room([prompt], backbone)
        self.amateur = settings.amateur
        if self.amateur is not None:
            require_room([prompt], Backbone(self.amateur.model), "amateur")
        requests = prepare(model, [prompt], seeds=[0], **settings.generate_kwargs())
        if self.amateur is not None:
            require_amateur(self.amateur, model, requests)
        source = drafter_factory(drafter, DrafterContext(model, heads, tree))
        self.source = source.reshaped(_two_deep)  # what is deeper decides on later tokens
        slack = max(source.num_nodes, STAR)
        self.session = Session(model, requests, slack=slack, heads=source.heads, amateur=self.amateur)
        self.drafter = self.source.start(self.session)
        self.frontier = self.session.prefill(most_probable_first=True)
        self.session.sequences.extend(0, self.frontier.root.tolist())
        self._warm_up()
        self.root = int(self.frontier.root)
        self.text = self.session.sequences.tail(0, 0)
        self.processors: LogitsProcessorList = requests[0].processors
        self.vocab = backbone.vocab_size
        self.q = self._first_head(source.heads)
        # The figures to compare with come from plain forwards. Below float32 these differ from the tree's own by more
        # than a million draws can overlook, and so do two trees of different size. So there they come from the very
        # forwards that are drawn from: measured, and not called exact.
        self.is_independent = model.dtype in (torch.float32, torch.float64)
        self.after_root = self.expected([self.text])[0] if self.is_independent else self.verified([[]])[0]
        self.firsts = self.after_root.softmax(-1).topk(min(FIRST_TOKENS, self.vocab)).indices.tolist()
        texts = [[*self.text, token] for token in self.firsts]
        self.after_firsts = (
            self.expected(texts) if self.is_independent else self.verified([[token] for token in self.firsts])
        )
        self._known: dict[int, Tensor] = (
            {} if self.is_independent else dict(zip(self.firsts, self.after_firsts, strict=True))
        )

    def _warm_up(self) -> None:
        """Drafters that learn from steps are shown some: greedy ones, without what they draft, until they draft."""
        session, sequences = self.session, self.session.sequences
        verifier = session.verifier()
        room = (session.backbone.context or 1 << 30) - 2
        steps = self.source.warm_up
        for step in range(steps * PATIENCE):
            draft = self.drafter.propose(self.frontier)
            ready = step >= steps and draft.topology.num_nodes > 1
            if ready or sequences.finish_reason[0] is not None or sequences.lengths[0] > room:
                return
            readout = verifier(draft)
            root = session.target.next([0], sequences, readout.logits[:, 0], most_probable_only=True)
            accepted = ended_at(draft, draft.ids.new_zeros(1), root.to(draft.ids.device))
            self.frontier = session.move_on(self.frontier, draft, readout, accepted, [1])
            sequences.extend(0, self.frontier.root.tolist())

    def _first_head(self, heads: MedusaHeads | None) -> Tensor | None:
        """[V] the distribution of the first head, if heads draft."""
        if heads is None:
            return None
        backbone = self.session.backbone
        hidden = self.frontier.hidden[:, None].to(heads.device, heads.dtype)
        root = backbone.embed(self.frontier.root[:, None, None]).to(hidden)
        inputs = HeadInputs(hidden, root, self.frontier.context_kv)
        logits = heads(inputs, lm_head_for(heads, backbone), 1)
        logits = over_all(heads, logits[:, :, 0], backbone.vocab_size)
        return self.session.target.draft_probabilities([0], logits.transpose(0, 1))[0, 0]

    def expected(self, texts: Sequence[list[int]]) -> Tensor:
        """The target's scores [len(texts), V] after texts of one length: plain forwards, transformers' warpers."""
        ids = torch.tensor(texts, device=self.session.backbone.device)
        logits = torch.cat([self._plain_logits(part) for part in ids.split(8)])
        rows = range(len(ids))
        return torch.cat([self.processors(ids[i : i + 1], logits[i : i + 1].float()) for i in rows])  # type: ignore[arg-type]

    def _plain_logits(self, ids: Tensor) -> Tensor:
        """Texts [R, T] -> [R, V] what follows them, before the warpers."""
        logits = self.model(input_ids=ids, use_cache=False).logits[:, -1]
        if self.amateur is None:
            return logits
        return self.amateur.contrast(logits, self.amateur.model(input_ids=ids, use_cache=False).logits[:, -1])

    def verified(self, paths: Sequence[list[int]]) -> Tensor:
        """Scores [len(paths), V] after the root and `paths` of at most one token, by the tree's own forward."""
        tokens = [path[0] for path in paths if path]
        found = []
        for start in range(0, max(len(tokens), 1), STAR - 1):
            part = tokens[start : start + STAR - 1]
            star = Tree.top_k([len(part)]) if part else Tree.chain(0)
            star = star.to(self.session.backbone.device)
            draft = Draft(torch.tensor([[self.root, *part]], device=star.depth.device), Topology.of(star))
            found += self._scores_of_nodes(draft)[1:] if part else self._scores_of_nodes(draft)
        return torch.cat(found)

    def _scores_of_nodes(self, draft: Draft) -> list[Tensor]:
        """Scores [1, V] after every node of a draft of one row, which is then forgotten by the cache."""
        session = self.session
        logits = session.verifier()(draft).logits[0]
        session.commit(draft.ids.new_zeros(1, 1), [0])
        scores = []
        for node, path in enumerate(draft.topology.paths[0, :, 1:]):
            prefix = session.sequences.prefix(0, draft.ids[0, path[path >= 0]])
            scores.append(session.target.scores(0, prefix, logits[node]))
        return scores

    @torch.inference_mode()
    def run(self, rule: Rule, number: int, draws: int, on_progress: Callable[[int], None] = lambda rows: None) -> Case:
        """`draws` steps by `rule`, counted against the target; `number` is the prompt's."""
        truncation = Truncation(self.settings.epsilon, self.settings.delta)
        truncate = truncation if rule.acceptance == "typical-sampled" else None
        first = torch.zeros(self.vocab, dtype=torch.long)
        second = torch.zeros(len(self.firsts), self.vocab, dtype=torch.long)
        place = torch.full((self.vocab,), -1)
        place[self.firsts] = torch.arange(len(self.firsts))
        accepted_tokens = 0
        after_root, after_firsts = self.after_root, self.after_firsts
        if rule.draft == "sample":
            take = self._sampled(truncate)
        else:
            draft = self.drafter.propose(self.frontier)
            scores = torch.cat(self._scores_of_nodes(draft))
            take = self._chosen(rule, draft, _truncated(scores, truncate))
            if not self.is_independent:
                after_root, after_firsts = scores[0], self._of_firsts(draft, scores)
        at_once = max(1_000, min(ROWS, 2**27 // self.vocab))
        for start in range(0, draws, at_once):
            rows = min(at_once, draws - start)
            draft, accepted = take(rows)
            written = torch.cat([draft.ids.gather(1, accepted.path.clamp_min(0)), accepted.next_root[:, None]], dim=1)
            more = accepted.length - 1
            one = torch.where(more > 0, written[:, min(1, written.shape[1] - 1)], accepted.next_root).cpu()
            two = torch.where(more > 1, written[:, min(2, written.shape[1] - 1)], accepted.next_root).cpu()
            weight = draws if rule.acceptance == "typical" else 1  # one outcome, however often it is drawn
            first += weight * one.bincount(minlength=self.vocab)
            both = (more.cpu() > 0) & (place[one] >= 0)
            second += weight * (place[one[both]] * self.vocab + two[both]).bincount(minlength=second.numel()).view_as(
                second
            )
            accepted_tokens += weight * int(more.sum())
            on_progress(rows if weight == 1 else draws)
            if weight > 1:
                break
        truncated = truncation if rule.against == "truncated target" else None
        target = _probabilities(after_root, truncated).cpu()
        after = _probabilities(after_firsts, truncated).cpu()
        found = compare(first, target)
        then = together([compare(counts, p) for counts, p in zip(second, after, strict=True)])
        return Case(
            prompt=number,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            rule=rule,
            first=found,
            second=then,
            joint=together([found, then]),
            frequencies=first / draws,
            target=target,
            draft=None if self.q is None else self.q.cpu(),
            mean_accepted=accepted_tokens / draws,
        )

    def _of_firsts(self, draft: Draft, scores: Tensor) -> Tensor:
        """Scores [N, V] of a draft's nodes -> [F, V] after the first tokens; nobody asks for those that it lacks."""
        found = self.after_firsts.clone()
        for node in (draft.topology.depth[0] == 1).nonzero()[:, 0].tolist():
            token = int(draft.ids[0, node])
            if token in self.firsts:
                found[self.firsts.index(token)] = scores[node]
        return found

    def _chosen(self, rule: Rule, draft: Draft, scores: Tensor) -> Callable[[int], tuple[Draft, Acceptance]]:
        """The heads' best guesses: one draft, one forward, and rows that walk over its scores [N, V]."""

        def of_nodes(rows: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
            return scores, nodes

        def decide(rows: Tensor, scores: Tensor, index: Tensor) -> Tensor:
            return self.draws.tokens(rows, scores.softmax(-1), index)

        def take(rows: int) -> tuple[Draft, Acceptance]:
            if rule.acceptance == "typical":
                return draft, accept_typical(draft, of_nodes, self.settings.epsilon, self.settings.delta)
            many = Draft(draft.ids.expand(rows, -1), draft.topology)
            return many, accept_walk(many, of_nodes, decide)

        return take

    def _sampled(self, truncate: Truncation | None) -> Callable[[int], tuple[Draft, Acceptance]]:
        """Every row draws a tree of its own from the drafter's distributions."""
        drafter = self.source.reshaped(_drawable).start(self.session)
        assert isinstance(drafter, HeadsDrafter | PathDrafter), "who can be drawn has these shapes"
        root_scores = _truncated(self.verified([[]]), truncate)

        def take(rows: int) -> tuple[Draft, Acceptance]:
            draft = drafter.draw(self.frontier, self.session.target, self.draws, rows)

            def after(walking: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
                depth = int(draft.topology.depth[0, nodes[0]])  # the same for all that walk
                if depth == 0:
                    return root_scores, torch.zeros_like(walking)
                if depth == 1:
                    tokens, index = draft.ids[walking, nodes].unique(return_inverse=True)
                    return _truncated(self._after(tokens.tolist()), truncate), index
                return root_scores, torch.zeros_like(walking)  # the third token, which nobody looks at

            return draft, accept_sampled(draft, after, self.draws)

        return take

    def _after(self, tokens: list[int]) -> Tensor:
        """Scores [len(tokens), V] after the root and each of `tokens`, verified once each as far as memory allows."""
        missing = [token for token in tokens if token not in self._known]
        if missing:
            fresh = dict(zip(missing, self.verified([[token] for token in missing]), strict=True))
            if (len(self._known) + len(fresh)) * self.vocab < 2**28:  # 1 GiB of float32
                self._known |= fresh
            known = self._known | fresh
        else:
            known = self._known
        return torch.stack([known[token] for token in tokens])


STAR = 256  # nodes of a forward that looks at many continuations of one root


def _two_deep(tree: Layout) -> Layout:
    return tree.clip(2) if tree.max_depth > 2 else tree


def _drawable(tree: Layout) -> Tree:
    """What is drawn may not choose the nodes, so of a dynamic tree the candidates stand for it."""
    return narrowed(tree.candidates if isinstance(tree, DynamicTree) else tree, WIDEST)


def narrowed(tree: Tree, widest: int) -> Tree:
    """The nodes of `tree` that are, like all above them, among the first `widest` children of their parents."""
    kept = [bool((tree.order[[n for n in line if n >= 0]] < widest).all()) for line in tree.paths.tolist()]
    return Tree.from_paths([path for path, keep in zip(tree.rank_paths, kept[1:], strict=True) if keep])


def _probabilities(scores: Tensor, truncation: Truncation | None) -> Tensor:
    return _truncated(scores, truncation).double().softmax(-1)


def _truncated(scores: Tensor, truncation: Truncation | None) -> Tensor:
    if truncation is None:
        return scores
    return scores.masked_fill(~typical(scores.softmax(-1), *truncation), -torch.inf)
