"""Lossless sampling as a distribution: both forms of rejection, on vocabularies small enough to enumerate.

The production acceptance code writes texts of three tokens (vocabulary of six) step by step, as in the loop. The
joint counts of all 216 texts are compared with exact probabilities. A correct sampler fails with probability 1e-5;
planted faults must fail by a wide margin, which proves that the tests have power.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import decode.accept
from decode.accept import Acceptance, Scores, accept_sampled, accept_walk, residual
from decode.bench.losslessness.chi2 import GoodnessOfFit, goodness_of_fit
from decode.draft import Draft, Frontier, Proposal
from decode.drafters.heads import sampled_draft
from decode.drafters.layouts import with_shortlist
from decode.drafters.trained_heads import heads_drafter
from decode.ops.draws import (
    MASS_LEFT,
    NO_TOKEN,
    QuickDraws,
    RowDraws,
    SharedDraws,
    cumulative,
    draw_distinct,
    invert,
    invert_by_blocks,
)
from decode.request import prepare
from decode.rules import typical
from decode.target import Target
from decode.topology import Topology
from medusa import Tree
from medusa.backbone import Backbone
from tests.helpers import BLOCK_FORMS, random_heads, shared_model, weekly

WORDS, TOKENS, DRAWS = 6, 3, 100_000
FALSE_ALARM = 1e-5
TREE = Tree.from_paths([[0], [1], [3], [0, 0], [0, 2], [1, 0], [3, 0], [0, 0, 0]])  # ranks have gaps
PROCESSORS: dict[str, list[Any]] = {
    "plain": [],
    "warpers": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8)],
    "penalties": [RepetitionPenaltyLogitsProcessor(2.0), NoRepeatNGramLogitsProcessor(1), TemperatureLogitsWarper(1.3)],
}
Take = Callable[[Draft, Any, Any], Acceptance]


class Language:
    """A language model and heads as tables: p and q for every text of up to TOKENS - 1 tokens after token 0.

    A text is a number in base WORDS and a length; tables are indexed by `offset[length] + number`.
    """

    def __init__(self, seed: int, processors: list[Any], warp_q: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.offset = torch.tensor([sum(WORDS**n for n in range(length)) for length in range(TOKENS + 2)])
        self.texts = texts = [
            [0, *self.words(number, length)] for length in range(TOKENS) for number in range(WORDS**length)
        ]
        logits = 1.2 * torch.randn(len(texts), WORDS, generator=generator)
        guesses = logits[:, None] + torch.randn(len(texts), 3, WORDS, generator=generator)  # three heads, half right
        warp = LogitsProcessorList(processors)
        scores = torch.cat([warp(torch.tensor([text]), logits[i : i + 1].clone()) for i, text in enumerate(texts)])
        # What is written behind TOKENS words is looked at by nobody.
        self.scores = torch.cat([scores, torch.zeros(1, WORDS)])
        scale = 0.7 if warp_q and processors else 1.0
        self.q = torch.cat([(guesses / scale).softmax(-1), torch.full((1, 3, WORDS), 1 / WORDS)])

    @staticmethod
    def words(number: int, length: int) -> list[int]:
        return [number // WORDS**place % WORDS for place in reversed(range(length))]

    def row(self, number: Tensor, length: Tensor) -> Tensor:
        """The table rows with the texts' distributions."""
        return torch.where(length < TOKENS, self.offset[length.clamp_max(TOKENS)] + number, len(self.scores) - 1)

    def draft(self, form: str, root: Tensor, contexts: Tensor, context: Tensor, noise: SharedDraws) -> Draft:
        """Draft after the texts of the table rows `contexts` [C]: row b has the root `root[b]` and `context[b]`."""
        q = self.q[contexts]
        if form == "sample":
            return sampled_draft(root, Topology.of(TREE), q, context, noise)
        best = q.topk(TREE.max_rank + 1).indices  # [C, 3, ranks]
        ids = best[:, TREE.depth[1:] - 1, TREE.rank[1:]][context]
        return Draft(torch.cat([root[:, None], ids], dim=1), Topology.of(TREE))

    def joint(self) -> Tensor:
        """Probabilities [WORDS ** TOKENS] of all texts."""
        p, chance = self.scores.double().softmax(-1), torch.ones(1).double()
        for length in range(TOKENS):
            start = int(self.offset[length])
            chance = (chance[:, None] * p[start : start + WORDS**length]).flatten()
        return chance


class BlockDrafted(Language):
    """The same language with the drafts of a block drafter, which has random weights and `shortlist` candidates."""

    def __init__(self, name: str, shortlist: int) -> None:
        super().__init__(0, [])
        model, tree = shared_model(vocab_size=WORDS), with_shortlist(TREE, shortlist)
        self.heads, self.backbone = random_heads(model, 3, **BLOCK_FORMS[name]), Backbone(model, [1, 0])
        sampling = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 0.8}
        self.target = Target(prepare(model, [[1]], [0], **sampling))
        self.drafters = {
            "topk": heads_drafter(self.heads, self.backbone, tree),
            "sample": heads_drafter(self.heads, self.backbone, tree, self.target),
        }

    @torch.no_grad()
    def draft(self, form: str, root: Tensor, contexts: Tensor, context: Tensor, noise: SharedDraws) -> Draft:
        drafter: Any = self.drafters[form]
        ids, of_children = root[:, None].repeat(1, TREE.num_nodes), root[:, None].repeat(1, TREE.num_nodes)
        q = [torch.empty(0, WORDS)]
        for number, row in enumerate(contexts.tolist()):
            text, here = torch.tensor([[1, 3, *self.texts[row]]]), context == number
            hidden = self.backbone.hidden_states(text[:, :-1], use_cache=False)
            place = torch.tensor([hidden.shape[1] - 1])
            kv = self.heads.inputs(hidden, text, self.backbone.embed, place=place).context_kv
            start = Frontier(text[:, -1], hidden[:, -1], [0], kv)
            if form == "topk":
                ids[here] = drafter.propose(start).ids
                continue
            part = drafter.draw(start, self.target, noise, int(here.sum()))
            ids[here], of_children[here] = part.ids, part.proposal.of_children + sum(map(len, q))
            q.append(part.proposal.q)
        return Draft(ids, Topology.of(TREE), Proposal(torch.cat(q), of_children) if form == "sample" else None)


def texts_written(language: Language, form: str, take: Take, seed: int, draws: int = DRAWS) -> Tensor:
    """Counts [WORDS ** TOKENS] of texts; each step drafts, accepts and draws the next root."""
    noise = SharedDraws(torch.Generator().manual_seed(seed))
    number, length = torch.zeros(draws, dtype=torch.long), torch.zeros(draws, dtype=torch.long)
    while len(open_rows := (length < TOKENS).nonzero()[:, 0]):
        at, size = number[open_rows], length[open_rows]
        contexts, context = language.row(at, size).unique(return_inverse=True)
        root = at % WORDS  # of the text's last word; the walk never looks at it
        draft = language.draft(form, root, contexts, context, noise)
        target = target_of(language, draft, at, size)
        accepted = take(draft, target, noise)
        written = draft.ids.gather(1, accepted.path.clamp_min(0))
        for depth in range(1, TREE.max_depth + 2):
            more = accepted.length - depth  # > 0: a node of this depth; 0: the next root
            token = torch.where(more > 0, written[:, min(depth, TREE.max_depth)], accepted.next_root)
            goes_on = (more >= 0) & (size < TOKENS)
            at, size = torch.where(goes_on, at * WORDS + token, at), size + goes_on.long()
        number[open_rows], length[open_rows] = at, size
    return number.bincount(minlength=WORDS**TOKENS)


def target_of(language: Language, draft: Draft, number: Tensor, length: Tensor) -> Scores:
    """The target after a text and a node's path; rows with the same text share their distributions."""

    def scores(rows: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        at, size = number[rows], length[rows]
        for depth in range(1, TREE.max_depth + 1):
            node = TREE.paths[nodes, depth]
            token = draft.ids[rows, node.clamp_min(0)]
            goes_on = (node >= 0) & (size < TOKENS)
            at, size = torch.where(goes_on, at * WORDS + token, at), size + goes_on.long()
        places, index = language.row(at, size).unique(return_inverse=True)
        return language.scores[places], index

    return scores


def by_walk(draft: Draft, target: Any, noise: Any) -> Acceptance:
    def decide(rows: Tensor, scores: Tensor, index: Tensor) -> Tensor:
        return noise.tokens(rows, scores.softmax(-1), index)

    return accept_walk(draft, target, decide)


def each_its_own(draft: Draft, target: Any, noise: Any, lazy: bool) -> Acceptance:
    """Rejection sampling with a distribution per row, as for a batch of texts."""

    def each(rows: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        scores, index = target(rows, nodes, depth)
        return scores[index], torch.arange(len(index))

    return accept_sampled(draft, each, noise, lazy=lazy)


TAKE: dict[str, Take] = {"topk": by_walk, "sample": accept_sampled}


def outcome(form: str, processors: str, take: Take | None = None, draws: int = DRAWS) -> GoodnessOfFit:
    language = Language(0, PROCESSORS[processors])
    return goodness_of_fit(texts_written(language, form, take or TAKE[form], 0, draws), language.joint())


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("form", TAKE)
def test_texts_have_the_targets_distribution(form: str, processors: str) -> None:
    """The false-alarm rate is 1e-5 for each case."""
    assert outcome(form, processors).p_value > FALSE_ALARM


@pytest.mark.parametrize("lazy", [False, True])
def test_texts_have_the_targets_distribution_without_shared_distributions(lazy: bool) -> None:
    """The code that decodes a batch, where every row has its own distributions."""

    def take(draft: Draft, target: Any, noise: Any) -> Acceptance:
        return each_its_own(draft, target, noise, lazy)

    assert outcome("sample", "penalties", take).p_value > FALSE_ALARM


def other_paths(draft: Draft, target: Any, noise: Any) -> Acceptance:
    """Accept with the draft distributions of other paths."""
    assert draft.proposal is not None
    q, of_children = draft.proposal
    return accept_sampled(draft._replace(proposal=Proposal(q.roll(1, 0), of_children)), target, noise)


@pytest.mark.parametrize(
    ("name", "shortlist"),
    [
        ("dflash", WORDS),
        ("dflash, markov", 4),
        ("dflash, pairwise", 4),
        *weekly(("dflash", 4), ("dflash, markov", WORDS), ("dflash, pairwise", WORDS)),
    ],
)
def test_texts_of_block_drafters_have_the_targets_distribution(name: str, shortlist: int) -> None:
    """With edges of each kind, and with all words or only some of them as candidates."""
    language = BlockDrafted(name, shortlist)

    def p_value(form: str, take: Take) -> float:
        return goodness_of_fit(texts_written(language, form, take, 0, DRAWS // 4), language.joint()).p_value

    assert min(p_value(form, take) for form, take in TAKE.items()) > FALSE_ALARM
    assert p_value("sample", other_paths) < FALSE_ALARM / 1000, "no power"


# Planted faults: each must be found, by the same test, a thousand times below its threshold.


FAULTS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "q left out": ("passes_ratio", lambda u, p, q: u < p),
    "residual not normalised": ("residual", lambda p, q: (p - q).clamp_min(1e-9)),
    "residual left out": ("residual", lambda p, q: p),
    "siblings with replacement": ("without", lambda q, token: q),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of `decode.accept` is replaced."""
    monkeypatch.setattr(decode.accept, *FAULTS[fault])
    assert outcome("sample", "plain", draws=DRAWS // 2).p_value < FALSE_ALARM / 1000


@pytest.mark.parametrize("form", TAKE)
def test_a_skipped_warper_is_found(form: str) -> None:
    """The target of the walk lacks the temperature of the text."""
    plain, warped = Language(0, []), Language(0, [TemperatureLogitsWarper(0.9)])
    counts = texts_written(plain, form, TAKE[form], 0)
    assert goodness_of_fit(counts, warped.joint()).p_value < FALSE_ALARM / 1000
    assert goodness_of_fit(counts, plain.joint()).p_value > FALSE_ALARM


@pytest.mark.parametrize("form", TAKE)
def test_typical_sampled_follows_the_truncated_target(form: str) -> None:
    language = Language(3, [])
    whole = language.joint()
    p = language.scores.softmax(-1)
    language.scores = language.scores.masked_fill(~typical(p, 0.3, 0.6), -torch.inf)
    counts = texts_written(language, form, TAKE[form], 0)
    assert goodness_of_fit(counts, language.joint()).p_value > FALSE_ALARM
    assert goodness_of_fit(counts, whole).p_value < FALSE_ALARM / 1000


def test_sampled_drafts_over_a_tiny_vocabulary_keep_the_target() -> None:
    """q gives mass to two tokens, but the tree needs three children, so the third has no distribution."""
    language = Language(4, [])
    few = language.q.scatter(-1, language.q.topk(4, largest=False).indices, 0)
    language.q = few / few.sum(-1, keepdim=True)
    assert goodness_of_fit(texts_written(language, "sample", accept_sampled, 0), language.joint()).p_value > FALSE_ALARM


@pytest.mark.parametrize("rest", [1e-5, 1e-7, 2e-9, 1e-12])
def test_a_confident_wrong_head_keeps_the_target(rest: float) -> None:
    """q leaves `rest` for five tokens: siblings are drawn from it exactly, or not at all if sums cannot resolve it."""
    others = torch.tensor([0.1, 0.15, 0.2, 0.25, 0.3])
    p = torch.tensor([[0.3, 0.25, 0.02, 0.2, 0.13, 0.1]])
    context, tree = torch.zeros(DRAWS, dtype=torch.long), Tree.top_k([3])
    q = torch.cat([others[:2] * rest, torch.ones(1), others[2:] * rest])[None, None]
    noise = SharedDraws(torch.Generator().manual_seed(0))
    draft = sampled_draft(context, Topology.of(tree), q, context, noise)
    accepted = accept_sampled(draft, lambda rows, nodes, depth: (p.log(), rows * 0), noise)
    drafted = draft.ids.gather(1, accepted.path[:, 1:2].clamp_min(0))[:, 0]
    tokens = torch.where(accepted.length > 1, drafted, accepted.next_root)
    assert goodness_of_fit(tokens.bincount(minlength=WORDS), p[0]).p_value > FALSE_ALARM
    second = draft.ids[draft.ids[:, 1] == 2, 2]
    if rest > MASS_LEFT:
        law = torch.cat([others[:2], torch.zeros(1), others[2:]])
        assert goodness_of_fit(second.bincount(minlength=WORDS), law).p_value > FALSE_ALARM
    else:
        assert (second == 2).all()


def test_residuals() -> None:
    """Worked by hand; without mass, as rounding can leave it, a draw from p itself is right."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    q = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.8, 0.2, 0.0], [0.5, 0.3, 0.2]]))


def test_acceptance_rises_as_q_approaches_p() -> None:
    """If q = p, the first child is always accepted (Leviathan et al. 2023, section 3: 1 - total variation)."""
    language = Language(5, [])
    p = language.scores[:1].softmax(-1)
    tree, context = Tree.chain(1), torch.zeros(50_000, dtype=torch.long)
    noise = SharedDraws(torch.Generator().manual_seed(0))
    q_far = (language.scores[:1].flip(-1)).softmax(-1)
    for q, share in ((p, 1.0), (q_far, float(torch.minimum(p, q_far).sum()))):
        draft = sampled_draft(context, Topology.of(tree), q[None], context, noise)
        accepted = accept_sampled(draft, lambda rows, nodes, depth: (language.scores[:1], rows * 0), noise)
        assert abs(float((accepted.length == 2).double().mean()) - share) < 5 * (0.25 / len(context)) ** 0.5


# The draws themselves.


def test_draws_without_replacement_have_the_exact_distribution() -> None:
    """Ordered triples of different tokens have probability q(a) q(b) / (1 - q(a)) q(c) / (1 - q(a) - q(b))."""
    q = torch.tensor([[0.05, 0.4, 0.0, 0.25, 0.3], [0.2] * 5])
    generator = torch.Generator().manual_seed(0)
    for which in range(2):
        u = torch.rand(200_000, 3, dtype=torch.float64, generator=generator)
        drawn = draw_distinct(q, torch.full((len(u),), which), u)
        counts = (drawn[:, 0] * 25 + drawn[:, 1] * 5 + drawn[:, 2]).bincount(minlength=125)
        p = q[which].double()
        law = torch.zeros(5, 5, 5).double()
        for a, b, c in [(a, b, c) for a in range(5) for b in range(5) for c in range(5) if len({a, b, c}) == 3]:
            law[a, b, c] = p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
        assert goodness_of_fit(counts, law / law.sum()).p_value > FALSE_ALARM


def one_gap_after_another(q: torch.Tensor, index: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """What `draw_distinct` computes, by the plain rule: numbers move over each interval that is cut out, in order."""
    sums = cumulative(q)
    start = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], dim=1)
    tokens = torch.zeros(u.shape, dtype=torch.long)
    for at in range(u.shape[1]):
        gone = tokens[:, :at].sort(-1).values
        low, high = start[index[:, None], gone], sums[index[:, None], gone]
        left = 1 - (high - low).sum(-1)
        x = u[:, at] * left.clamp_min(0)
        for gap in range(at):
            x = torch.where(x >= low[:, gap], x - low[:, gap] + high[:, gap], x)
        tokens[:, at] = torch.where(left > MASS_LEFT, invert(sums, index, x).clamp_min(0), tokens[:, 0])
    return tokens


@pytest.mark.parametrize("sharpness", [0.0, 3.0, 30.0])
def test_draws_without_replacement_follow_the_plain_rule(sharpness: float) -> None:
    """Also where little or nothing is left. Numbers near the end of an interval may round to its neighbour."""
    generator = torch.Generator().manual_seed(1)
    q = (sharpness * torch.randn(7, 40, generator=generator)).softmax(-1)
    q[3] = F.one_hot(torch.tensor(5), 40)
    q[4, 10:], q[5] = 0, torch.nan
    q[4] /= q[4].sum()
    index = torch.randint(7, (20_000,), generator=generator)
    u = torch.rand(20_000, 12, dtype=torch.float64, generator=generator)
    found, expected = draw_distinct(q, index, u), one_gap_after_another(q, index, u)
    assert (found != expected).any(1).sum() <= 1
    unlike = found[:, :, None] != found[:, None, :]
    repeats = found == found[:, :1]  # the first token stands for "nothing is left"
    assert (unlike | repeats[:, :, None] & repeats[:, None, :] | torch.eye(12, dtype=torch.bool)).all()


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    """This includes the ends of [0, 1), where cumulative sums are equal."""
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    ends = torch.tensor([0.0, 2**-53, 0.25, 0.5 - 2**-54, 0.5, 1 - 2**-53], dtype=torch.float64)
    for which in range(2):
        index = torch.full((len(ends),), which)
        tokens = invert(cumulative(p), index, ends)
        assert (p[which][tokens] > 0).all()
        assert (p[which][draw_distinct(p, index, ends[:, None])[:, 0]] > 0).all()
        assert (p[which][invert_by_blocks(p, index, ends)] > 0).all()


def test_a_distribution_of_nan_changes_no_draw_from_others() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(5, 8, generator=generator).softmax(-1)
    index, u = torch.arange(100) % 5, torch.rand(100, 3, dtype=torch.float64, generator=generator)
    tokens, distinct = invert(cumulative(q), index, u[:, 0]), draw_distinct(q, index, u)
    q[[1, 3]] = torch.nan
    broken = (index == 1) | (index == 3)
    assert torch.equal(invert(cumulative(q), index, u[:, 0]), tokens.masked_fill(broken, NO_TOKEN))
    assert torch.equal(draw_distinct(q, index, u), distinct.masked_fill(broken[:, None], 0))


@pytest.mark.parametrize("size", [5, 128, 300])
def test_draws_by_blocks_follow_their_distributions(size: int) -> None:
    """Rows share three distributions, one of them NaN; in the first, half of the tokens have no probability."""
    generator = torch.Generator().manual_seed(size)
    p = (2 * torch.randn(3, size, generator=generator)).softmax(-1)
    p[0, : size // 2] = 0
    p[0] /= p[0].sum()
    p[2] = torch.nan
    index, draws = torch.arange(DRAWS) % 3, QuickDraws([torch.Generator().manual_seed(1)])
    u = draws.uniforms(torch.zeros(1, dtype=torch.long), DRAWS)[0]
    tokens = invert_by_blocks(p, index, u)
    for row in (0, 1):
        counts = tokens[index == row].bincount(minlength=size)
        assert goodness_of_fit(counts, p[row]).p_value > FALSE_ALARM
        assert goodness_of_fit(counts, p[row].roll(1)).p_value < FALSE_ALARM / 1000
    assert (tokens[index == 2] == NO_TOKEN).all()


def test_a_quick_draw_depends_on_its_own_seed_alone() -> None:
    p, rows = torch.randn(4, 200).softmax(-1), torch.arange(4)
    together = QuickDraws([torch.Generator().manual_seed(seed) for seed in range(4)]).tokens(rows, p, rows)
    alone = [
        QuickDraws([torch.Generator().manual_seed(row)]).tokens(rows[:1], p[row][None], rows[:1]) for row in range(4)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_both_kinds_of_draws_have_the_same_distribution() -> None:
    """A million rows invert cumulative sums; a batch calls `torch.multinomial` row by row, like `generate`."""
    p = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.0, 0.1, 0.3, 0.6]])
    generator, rows = torch.Generator().manual_seed(0), 20_000
    index = torch.arange(rows) % 2
    for draws in (SharedDraws(generator), RowDraws([generator] * rows)):
        tokens = draws.tokens(torch.arange(rows), p, index)
        for which in range(2):
            assert goodness_of_fit(tokens[index == which].bincount(minlength=4), p[which]).p_value > FALSE_ALARM
        uniform = draws.uniforms(torch.arange(rows), 1)[:, 0]
        assert uniform.dtype == torch.float64
        cells = (uniform * 8).long().bincount(minlength=8)
        assert goodness_of_fit(cells, torch.full((8,), 1 / 8)).p_value > FALSE_ALARM
