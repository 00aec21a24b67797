"""Steps with a whole draft, a smaller one or none, in any order: texts stay the same, and so do later drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra serve")

from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import DynamicTree, smaller, with_shortlist
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.serve.adaptive import AdaptiveStepper, drafts_of
from decode.serve.batch import RunningBatch
from decode.serve.pace import Pace
from decode.serve.worker import BatchRow, BatchWorker
from decode.settings import Settings
from decode.strategies.contrastive import Amateur
from decode.texts import TextGenerator, stepper_for
from medusa.shipped import named_trees
from medusa.tree import Tree
from tests.decode.serve.server_tools import PROMPTS, expected, said
from tests.decode.serve.server_tools import decode as decode_rows
from tests.decode.serve.test_joining import GREEDY, KINDS, alone, arrivals, decode
from tests.helpers import random_ids, random_tree, shared_model, weekly

RULE = AcceptanceRule("rejection")


class ByLot(Pace):
    """Chooses drafts at random, in runs of some steps."""

    def __init__(self, nodes: list[int], seed: int = 0) -> None:
        super().__init__(nodes)
        self.rng = random.Random(seed)
        self.chosen = 0

    def choose(self, texts: int) -> int:
        if self.rng.random() < 0.5:
            self.chosen = self.rng.randrange(len(self.nodes))
        return self.chosen


def adapting(factory: DrafterFactory) -> tuple[Callable[[Any], AdaptiveStepper], Pace]:
    """What makes adaptive steppers of others, and their pace."""
    drafts = drafts_of(factory)
    pace = ByLot([1 if draft is None else draft.num_nodes for draft in drafts])
    return lambda stepper: AdaptiveStepper(stepper, drafts, pace), pace


@pytest.mark.parametrize(
    "kind",
    [
        *["eagle", "eagle-3, variants", "mtp", "model", "dynamic", "ngram", "lookahead", "mix, shared"],
        *weekly("eagle, window", "prefix", "medusa", "mix"),
    ],
)
def test_texts_are_those_of_generate(kind: str, factory_of: Any) -> None:
    """Greedy, sampled and penalised texts join and leave while the drafts change."""
    model, asked, factory = shared_model(), arrivals(KINDS, 8), factory_of(kind)
    changed, pace = adapting(factory)
    assert decode(model, factory, asked, changed=changed) == alone(model, asked)
    assert min(pace.steps) > 1, pace.steps


@pytest.mark.parametrize("kind", ["eagle-3, variants", "eagle, window", "prefix", "model", *weekly("eagle", "mtp")])
def test_drafts_after_plain_steps_are_those_of_a_new_session(kind: str, factory_of: Any) -> None:
    """Also if a text has joined meanwhile, or has just joined, and another has left, in whose place it is then."""
    model, factory = shared_model(), factory_of(kind)
    pace = Pace([factory.num_nodes, 1])

    def whole(requests: Any) -> Any:
        return stepper_for(model, factory, requests, RULE, keep_drafts=True)

    def adaptive(requests: Any) -> AdaptiveStepper:
        stepper = AdaptiveStepper(whole(requests), [factory, None], pace)
        stepper.keep_drafts = True
        return stepper

    def requested(text: list[int], tokens: int) -> Any:
        return prepare(model, [text], do_sample=False, max_new_tokens=tokens, eos_token_id=None)

    batch = RunningBatch(adaptive)
    texts, compared = iter(random_ids(5 + row, seed=row) for row in range(4)), 0
    for number, choice in enumerate([0, 1, 1, 1, 0, 1, 1, 0, 1, 0]):
        for tokens in {0: (6, 40), 3: (40,), 7: (40,)}.get(number, ()):
            batch.join(requested(next(texts), tokens))
        if number == 7:  # the text that has just joined takes the place of another, before it was drafted for
            batch.end(batch.rows[0])
        pace.choose = lambda texts, choice=choice: choice  # type: ignore[method-assign]
        before = {row: batch.sequences.tail(row, 0) for row in batch.rows}
        for row, draft in batch.step().drafts.items():
            if choice == 1:
                assert len(draft.ids) == 1, "a plain step"
                continue
            fresh = RunningBatch(whole)
            fresh.join(requested(before[row], 5))
            assert draft.ids == fresh.step().drafts[0].ids, (number, row)
            compared += 1
    assert compared > 6


def test_contrastive_texts_are_those_without_drafts(factory_of: Any) -> None:
    model, asked, factory = shared_model(), arrivals([GREEDY, KINDS[1]], 6), factory_of("medusa")
    amateur = Amateur(shared_model(seed=5))
    changed, pace = adapting(factory)
    assert decode(model, factory, asked, changed=changed, amateur=amateur) == decode(
        model, None, asked, amateur=amateur
    )
    assert min(pace.steps) > 1, pace.steps


def test_a_smaller_tree_is_a_part_of_the_tree() -> None:
    for tree in (Tree.from_paths(named_trees()["mc_sim_7b_63"]), random_tree(30, seed=1)):
        found = smaller(with_shortlist(tree, 20), 9)
        assert isinstance(found, Tree)
        assert set(found.rank_paths) < set(tree.rank_paths)
        assert (found.num_nodes, found.shortlist) == (9, 20)
        # A child is never more probable than its parent, nor a sibling than the one with a better rank.
        assert {path[:-1] for path in found.rank_paths} <= {(), *found.rank_paths}
    dynamic = DynamicTree.over_heads(12, 4, (1.0, 2.0, 3.0, 4.0))
    found = smaller(dynamic, 3)
    assert (found.num_nodes, found.max_depth, found.temperatures) == (3, 2, dynamic.temperatures)


@pytest.mark.parametrize(
    ("how", "adapts"),
    [
        ({}, True),
        ({"temperature": 0.5}, True),
        ({"temperature": 1.0, "draft": "sample"}, False),
        ({"temperature": 1.0, "acceptance": "typical"}, False),
        ({"acceptance": "topk:2"}, False),
    ],
)
def test_the_server_adapts_if_texts_do_not_depend_on_drafts(
    generator: TextGenerator, how: dict[str, Any], adapts: bool
) -> None:
    worker, settings = BatchWorker(generator, 2, adapts=True), Settings(max_new_tokens=12 if adapts else 4, **how)
    rows = [
        BatchRow(generator.tokenizer(prompt)["input_ids"], settings, seed, lambda event: None)
        for seed, prompt in enumerate(PROMPTS[:2])
    ]
    told = decode_rows(worker, *rows)
    assert (sum(worker.adapting.pace.steps) > 0) == adapts
    shown = worker.metrics.response().body.decode()
    for nodes, steps in zip(worker.adapting.pace.nodes, worker.adapting.pace.steps, strict=True):
        assert f'medusa_draft_steps_total{{nodes="{nodes}"}} {float(steps)}' in shown
    if not how:
        assert list(map(said, told)) == [expected(generator, prompt, settings) for prompt in PROMPTS[:2]]
