"""The rule that chooses drafts, on times and texts that are made up: no step is decoded, and no clock is read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import pytest

from decode.serve.pace import HORIZON, TRIES, Pace

NODES = [8, 3, 1]


@dataclass
class MadeUp:
    """Steps whose mean times are `ms(texts, draft)`, and whose mean tokens in one text are `tau(draft)`."""

    ms: Callable[[int, int], float]
    tau: Callable[[int], float] = lambda draft: [2.9, 2.0, 1.0][draft]
    after_a_change: float = 1.0  # by how many times a step is slower after another draft
    pace: Pace = field(default_factory=lambda: Pace(NODES))
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    last: int = -1

    def step(self, texts: int) -> tuple[int, float, int]:
        """One step: the draft, its seconds and its tokens."""
        draft = self.pace.choose(texts)
        ms = self.ms(texts, draft) * self.rng.lognormvariate(0, 0.05) * (8 if self.rng.random() < 0.01 else 1)
        ms *= self.after_a_change if draft != self.last else 1
        self.last, deeper = draft, self.tau(draft) - 1
        tokens = sum(1 + round(self.rng.expovariate(1 / deeper)) if deeper else 1 for _ in range(texts))
        self.pace.add(texts, draft, ms / 1000, tokens)
        return draft, ms / 1000, tokens

    def run(self, texts: int, steps: int) -> Counter[int]:
        """The number of steps with each draft."""
        return Counter(self.step(texts)[0] for _ in range(steps))


def by_nodes(texts: int, draft: int) -> float:
    """The whole draft is fastest for one text, a smaller one for eight, and none for 64."""
    return 10 + 0.1 * texts * NODES[draft] ** 1.6 if draft < 2 else 9 + 0.2 * texts


@pytest.mark.parametrize(("texts", "best"), [(1, 0), (8, 1), (64, 2)])
def test_the_fastest_draft_is_taken(texts: int, best: int) -> None:
    made_up = MadeUp(by_nodes)
    made_up.run(texts, 50 + 4 * TRIES)
    assert made_up.run(texts, 1000)[best] > 950
    assert sum(made_up.pace.steps) == 1050 + 4 * TRIES


def test_each_number_of_texts_has_its_own_times() -> None:
    """Also if the draft changes after every second step, and the first step after a change takes 30 times as long."""
    made_up = MadeUp(by_nodes, after_a_change=30)
    found = {texts: Counter[int]() for texts in (1, 2, 8, 7, 64)}
    for _ in range(300):
        for texts, chosen in found.items():
            chosen += made_up.run(texts, 2)
    assert {texts: chosen.most_common(1)[0][0] for texts, chosen in found.items()} == {1: 0, 2: 0, 8: 1, 7: 1, 64: 2}


@pytest.mark.parametrize("slower", [1.02, 1.3, 5.0])
def test_measuring_other_drafts_loses_little(slower: float) -> None:
    """Whatever they lose, and also if the first step after a change takes three times as long."""
    made_up = MadeUp(lambda texts, draft: 10 if draft == 2 else 10 * slower * made_up.tau(draft), after_a_change=3)
    made_up.run(8, 100)
    steps = [made_up.step(8) for _ in range(8000)]
    plain = [seconds / tokens for draft, seconds, tokens in steps if draft == 2]
    seconds, tokens = (sum(step[place] for step in steps) for place in (1, 2))
    assert len(plain) < len(steps)
    assert seconds / tokens < fmean(plain) * 1.015


def test_a_change_of_the_texts_is_noticed() -> None:
    predictable = False
    made_up = MadeUp(by_nodes, tau=lambda draft: [3.5, 2.0, 1.0][draft] if predictable else [1.05, 1.04, 1.0][draft])
    made_up.run(8, 200)
    assert made_up.run(8, 1000)[2] > 950
    predictable = True
    made_up.run(8, 4000)
    assert made_up.run(8, 1000)[2] < 50
    predictable = False
    made_up.run(8, 2 * HORIZON)
    assert made_up.run(8, 1000)[2] > 900


def test_a_draft_is_not_tried_with_more_texts_if_it_was_slower_with_fewer() -> None:
    made_up = MadeUp(lambda texts, draft: [60, 11, 10][draft])
    made_up.run(2, 100)
    found = made_up.run(16, 200)
    assert found[0] == 0
    assert found[1] > 150


def test_a_draft_is_not_tried_if_a_smaller_one_takes_too_long_already() -> None:
    made_up = MadeUp(lambda texts, draft: 10 if draft == 2 or texts < 8 else [90, 40, 10][draft], rng=random.Random(1))
    made_up.run(2, 100)
    found = made_up.run(16, 200)
    assert found[0] == 0
    assert found[1] <= 2 * TRIES


def test_drafts_that_were_not_tried_are_measured_from_time_to_time() -> None:
    """The prediction was wrong: with many texts, the whole draft takes hardly longer than none."""
    made_up = MadeUp(lambda texts, draft: [60, 11, 10][draft] if texts < 8 else [12, 11, 10][draft])
    made_up.run(2, 100)
    made_up.run(16, 6000)
    assert made_up.run(16, 1000)[0] > 950


def test_a_draft_that_is_not_tried_with_many_texts_is_measured_no_oftener_with_few() -> None:
    made_up = MadeUp(lambda texts, draft: [60, 11, 10][draft])
    made_up.run(2, 100)
    made_up.run(16, 4000)
    made_up.ms = lambda texts, draft: [60, 11, 10][draft] / 10  # as if there had been ten times as many steps
    assert made_up.run(2, 1000)[0] < 30


def test_few_slow_steps_change_nothing() -> None:
    """For example, because another process had the CPU."""
    made_up = MadeUp(by_nodes)
    made_up.run(8, 200)
    for _ in range(2):
        draft = made_up.pace.choose(8)
        made_up.pace.add(8, draft, 1.0, 8)
    assert made_up.run(8, 100)[1] > 90


def test_a_coarse_clock_stops_nothing() -> None:
    made = MadeUp(lambda texts, draft: 0.0)
    for texts in (1, 4, 8):
        assert made.run(texts, 100).total() == 100
