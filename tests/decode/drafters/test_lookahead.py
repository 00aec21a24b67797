"""decode/drafters/lookahead.py: the window as a tree, its predictions compared with plain forwards, never accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode import generate
from decode.bench.losslessness.cases import RULES, passes
from decode.bench.losslessness.experiment import Experiment
from decode.bench.methods import plain_method
from decode.draft import Draft, Frontier, SideBranch
from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext
from decode.drafters.lookahead import LookaheadConfig, LookaheadDrafter, Pool, window_topology
from decode.drafters.tries import Trie, chain, draft_of
from decode.reader import visible_slots
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.sequences import Sequences
from decode.session import Session
from decode.settings import Settings
from decode.strategies.contrastive import Amateur
from medusa.tree_support import LayerKind
from tests.decode.drafters.test_drafters import PROMPTS
from tests.decode.drafters.test_ngram import Request
from tests.decode.drafters.test_paths import path_to
from tests.helpers import FIRST_TRANSFORMERS, plain, random_ids, run_steps, tiny_model, weekly

CPU = torch.device("cpu")
NEW = 20
PLAN = LookaheadConfig(window=4, n=4, guesses=3)


# The window as a tree


def test_worked_example_of_a_window() -> None:
    """Three columns and three levels: the picture in the module's docstring, ordered root a1 a2 b0 b1 b2 c0 c1 c2."""
    window = window_topology(3, 3, CPU)
    assert window.parent.tolist() == [[0, 0, 1, 0, 1, 2, 3, 4, 5]]
    assert window.depth.tolist() == [[0, 1, 2, 1, 2, 3, 2, 3, 4]]
    seen = [
        "x........",  # root
        "xx.......",  # a1
        "xxx......",  # a2
        "x..x.....",  # b0
        "xx..x....",  # b1
        "xxx..x...",  # b2
        "x..x..x..",  # c0
        "xx..x..x.",  # c1
        "xxx..x..x",  # c2
    ]
    assert window.ancestors[0].tolist() == [[mark == "x" for mark in line] for line in seen]


def test_worked_example_of_a_window_with_a_draft() -> None:
    """The text x y, and two guesses after the root, g h and g i. The window (two columns, two levels) has the slots
    after the guesses, and neither attends to the other."""
    trie = Trie(9)
    trie.add([5, 6])
    trie.add([5, 7])
    window = SideBranch(torch.tensor([[1, 2, 3]]), window_topology(2, 2, CPU), lambda logits: None)
    whole = draft_of([trie], torch.tensor([4]))._replace(side_branches=(window,)).whole
    assert whole.ids.tolist() == [[4, 5, 6, 7, 1, 2, 3]]
    assert whole.topology.depth.tolist() == [[0, 1, 2, 2, 1, 1, 2]]
    assert whole.topology.parent.tolist() == [[0, 0, 1, 1, 0, 0, 4]]
    paths = [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 3], [0, 4, -1], [0, 5, -1], [0, 4, 6]]
    assert whole.topology.paths.tolist() == [paths]
    seen = [
        "xx x......",  # root
        "xx xx.....",  # g
        "xx xxx....",  # h
        "xx xx.x...",  # i
        "xx x...x..",  # a1
        "xx x....x.",  # b0
        "xx x...x.x",  # b1
    ]
    expected = [[mark == "x" for mark in line.replace(" ", "")] for line in seen]
    lengths = torch.tensor([2])
    assert visible_slots(whole.topology, lengths, 9)[0].tolist() == expected
    assert visible_slots(whole.topology, lengths, 9, LayerKind(window=2))[0].tolist() == [
        [mark == "x" for mark in line.replace(" ", "")]
        for line in (".x x......", ".. xx.....", ".. .xx....", ".. .x.x...", ".. x...x..", ".. x....x.", ".. ....x.x")
    ], "a window of two positions: itself and the one before"


# The pool


def test_a_pool_keeps_the_latest_ngrams() -> None:
    pool = Pool(2)
    for ngram in ([1, 2, 3], [1, 4, 5], [2, 9, 9], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert list(pool.guesses(1)) == [(6, 7), (2, 3)], "4 5 was the oldest: 2 3 came again"
    assert list(pool.guesses(2)) == [(9, 9)]
    assert list(pool.guesses(3)) == []


class Jacobi:
    """A slow, simple version: one plain forward for every column, and a list of all n-grams."""

    def __init__(self, model: Any, plan: LookaheadConfig, text: list[int]) -> None:
        self.model, self.plan = model, plan
        self.levels = [[0] * plan.window for _ in range(plan.n - 1)]
        for level in range(plan.n - 1):
            for column in range(plan.window):
                self.levels[level][column] = text[(column * len(text) // plan.window + level) % len(text)]
        self.made: list[tuple[int, ...]] = []

    def guesses(self, text: list[int], count: int) -> list[tuple[int, ...]]:
        latest = dict.fromkeys(ngram[1:] for ngram in reversed(self.made) if ngram[0] == text[-1])
        return [guess[:count] for guess in list(latest)[: self.plan.guesses]]

    def step(self, text: list[int]) -> None:
        self.levels[0][0] = text[-1]
        answers = []
        for column in range(self.plan.window):
            line = text + self.levels[0][1 : column + 1] + [level[column] for level in self.levels[1:]]
            with torch.no_grad():
                answers.append(int(self.model(input_ids=torch.tensor([line])).logits[0, -1].argmax()))
            self.made.append((*(level[column] for level in self.levels), answers[-1]))
        self.levels = [*self.levels[1:], answers]


@pytest.mark.parametrize("family", ["mistral, window", "gpt2", *weekly("llama")])
def test_drafts_equal_plain_jacobi_iteration(family: str) -> None:
    """Compare every step of a text, with cache, masks and positions, for two rows of different length."""
    model = tiny_model(family, dtype=torch.float64)
    prompts, plan, checked = [PROMPTS[0], [3, 1, 2]], PLAN, 0
    requests = prepare(model, prompts, max_new_tokens=NEW, do_sample=False)
    session = Session(model, requests, slack=99)
    drafter = drafter_factory("lookahead:window=4,n=4,guesses=3", DrafterContext(model)).start(session)
    oracles: dict[int, Jacobi] = {}

    class Watched:
        def propose(self, frontier: Frontier) -> Draft:
            nonlocal checked
            draft = drafter.propose(frontier)
            for index, row in enumerate(frontier.rows):
                text = session.sequences.tail(row, 0)
                oracle = oracles.setdefault(row, Jacobi(model, plan, text))
                count = min(plan.n, session.sequences.tokens_left(row)) - 1
                guesses = oracle.guesses(text, count)
                expected = {guess[:end] for guess in guesses for end in range(1, len(guess) + 1)}
                found = {tuple(path_to(draft, index, node)[1:]) for node in range(1, draft.topology.num_nodes)}
                assert expected <= found
                if len(frontier.rows) == 1:
                    assert expected == found
                checked += len(expected)
                if draft.side_branches:
                    oracle.step(text)
            return draft

    for _ in run_steps(session, Watched(), AcceptanceRule("greedy")):
        pass
    assert session.sequences.new_ids == [plain(model, prompt, max_new_tokens=NEW) for prompt in prompts]
    assert checked > 50, "hardly anything was drafted: no power"


# Never text


@pytest.mark.parametrize("contrasted", [False, True])
def test_a_window_is_never_accepted(llama: Any, contrasted: bool) -> None:
    """The window contains the coming text, yet every step writes only the root; its predictions are the target's."""
    amateur = Amateur(tiny_model("llama", seed=5, num_hidden_layers=1)) if contrasted else None
    text = plain_method(llama, Settings(max_new_tokens=NEW, amateur=amateur))([PROMPTS[0]])[0].new_ids
    assert (text == plain(llama, PROMPTS[0], max_new_tokens=NEW)) != contrasted
    requests = prepare(llama, [PROMPTS[0]], max_new_tokens=NEW, do_sample=False)
    session = Session(llama, requests, slack=99, readers=amateur)
    heard: list[torch.Tensor] = []

    class Knows:
        def propose(self, frontier: Frontier) -> Draft:
            ahead = text[len(session.sequences.new_ids[0]) :]
            line = (ahead + [0] * 4)[:4]
            aside = SideBranch(torch.tensor([line]), chain(5, CPU), heard.append)
            return Draft(frontier.root[:, None], chain(1, CPU), side_branches=(aside,))

    taken = run_steps(session, Knows(), AcceptanceRule("greedy"))
    assert [step.lengths[0] for step in taken] == [1] * NEW
    assert session.sequences.new_ids[0] == text
    answers = [logits.argmax(-1)[0].tolist() for logits in heard]
    assert answers[0] == text[2:6], "it was read, at the right places"
    assert len(answers) == NEW - 1


# The text


@pytest.mark.skipif(FIRST_TRANSFORMERS, reason="transformers 5.17 itself fails after the boundary of longrope")
def test_a_window_across_the_boundary_of_longrope() -> None:
    """Its deepest position must not change the forward's RoPE frequencies; the text is read again at 32 tokens."""
    model = tiny_model("phi3, longrope")
    for length in (9, 25):
        prompt = random_ids(length, seed=4)
        out = generate(
            model, None, torch.tensor([prompt]), drafter="lookahead:window=9,n=5", max_new_tokens=30, do_sample=False
        )
        assert out[0, length:].tolist() == plain(model, prompt, max_new_tokens=30)


def test_repeated_proposals_are_equal(llama: Any) -> None:
    source = drafter_factory("lookahead:window=4", DrafterContext(llama))
    made = Experiment(llama, source, PROMPTS[0], Settings(temperature=1.0), torch.Generator())
    first, second = (made.context.drafter.propose(made.context.frontier) for _ in range(2))
    with torch.inference_mode():
        made.context.verified()
        made.context.session.reader(second)
        made.context.session.reader.cache.keep([0])
    third = made.context.drafter.propose(made.context.frontier)
    assert first.ids.tolist() == second.ids.tolist() == third.ids.tolist()
    assert first.side_branches[0].ids.tolist() == third.side_branches[0].ids.tolist()


# Samples


def experiment(model: Any) -> Experiment:
    source, settings = drafter_factory("lookahead:window=8,guesses=8", DrafterContext(model)), Settings(temperature=0.6)
    return Experiment(model, source, PROMPTS[2], settings, torch.Generator().manual_seed(0))


def test_samples_have_the_targets_distribution(llama: Any) -> None:
    """Through the production code, 100,000 draws, some steps into the text; false alarm below 1e-4."""
    made = experiment(llama)
    written = made.context.text[len(PROMPTS[2]) :]
    assert len(written) > 16
    assert written == plain(llama, PROMPTS[2], max_new_tokens=len(written))
    case = made.run(RULES[0], 0, 100_000)
    assert passes([case])
    assert case.mean_accepted > 1, "hardly anything was accepted: no power"


def test_a_draft_that_attends_to_the_window_is_detected(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the candidates' masks show them the window."""
    inner = Draft.whole.fget  # type: ignore[attr-defined]

    def leaking(self: Draft) -> Draft:
        whole = inner(self)
        whole.topology.ancestors[:, 1 : self.topology.num_nodes, self.topology.num_nodes :] = True
        return whole

    made = experiment(llama)
    monkeypatch.setattr(Draft, "whole", property(leaking))
    assert not passes([made.run(RULES[0], 0, 100_000)])


def test_the_window_is_dropped_at_the_end_of_the_text() -> None:
    """With room for the root and two tokens another step can be drafted; with less, n-grams are not needed."""
    for room, there in ((4, True), (3, False)):
        sequences = Sequences([Request([1, 2, 3], room)], None, CPU)  # type: ignore[list-item]
        sequences.extend(0, [4])
        drafter = LookaheadDrafter(sequences, PLAN, CPU)
        assert bool(drafter.propose(Frontier(torch.tensor([4]), torch.zeros(1, 1), [0])).side_branches) == there
