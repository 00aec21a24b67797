"""The figures of a benchmark, from methods with made-up times and texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.bench.benchmark import (
    STAGES,
    Contender,
    StageTimer,
    accepted_by_depth,
    accepted_by_node,
    run_rounds,
    summarize,
    tau_by_position,
    warm_up_batches,
)
from decode.bench.compare import Sample
from decode.bench.figures import AcceptedNode, MethodFigures, PositionFigures, Rate
from decode.bench.methods import plain_method
from decode.bench.report.plots import alone, tree
from decode.settings import Settings
from decode.texts import Result
from medusa.heads.guesses import MISSED
from tests.decode.bench.made_up import TOKENS, Fake, contenders, outcome
from tests.helpers import random_ids, tiny_model

PLAIN = Fake("p", [1.0])


def measured(
    medusa: Any, plain: Any = PLAIN, stock: Any = PLAIN, prompts: int = 1, rounds: int = 1, clock: Any = None
) -> dict[str, MethodFigures]:
    """The figures of three methods on prompts of one token; by default the other two take a second for each."""
    them = contenders(plain, stock, medusa)
    them[2].clock = clock
    run_rounds(them, [[[index]] for index in range(1, prompts + 1)], rounds)
    return summarize(them, [None] * prompts)


def test_the_documented_fields_are_present() -> None:
    content = {name: figures.to_json() for name, figures in measured(Fake("m", [1.0], 3), clock=StageTimer()).items()}
    keys = {"tokens_per_second", "tau", "steps", "new_tokens", "accepted_by_depth", "speedup", "speedup_vs_generate"}
    keys |= {"equal_to_plain", "by_category"}
    for name in ("plain", "transformers", "medusa"):
        assert keys <= content[name].keys()
        assert content[name]["tokens_per_second"].keys() == {"median", "min", "max"}
    assert content["medusa"]["step_ms"].keys() == set(STAGES)
    assert "step_ms" not in content["transformers"]
    assert content["medusa"]["by_category"] == {}


def test_tokens_per_second_are_all_tokens_over_all_seconds() -> None:
    """Two prompts, 12 tokens each, in 1 s and 3 s: 6 a second, not the mean of 12 and 4."""
    rate = measured(PLAIN, Fake("p", [9.0, 1.0, 3.0]), prompts=2)["plain"].tokens_per_second
    assert rate == Rate(6.0, 6.0, 6.0)


def test_stage_times_are_per_step_over_all_rounds_without_the_warm_up() -> None:
    """0.3 s for each prompt, which takes three steps; the warm-up of the plain method takes 100 s."""
    clock = StageTimer()

    def method(prompts: Any, on_step: Any = None, seeds: Any = None) -> list[Result]:
        clock.seconds["propose"] += 0.3
        return Fake("m", [1.0], 4)(prompts)

    figures = measured(method, Fake("p", [100.0, *[1.0] * 10]), prompts=2, rounds=5, clock=clock)
    assert figures["medusa"].step_ms["propose"] == pytest.approx(100.0)
    assert figures["plain"].tokens_per_second.min == 12.0


def test_the_texts_of_a_batch_share_the_times_of_their_steps() -> None:
    """Two batches of 0.3 s, whose longest texts take three steps."""
    clock = StageTimer()

    def method(prompts: Any, on_step: Any = None, seeds: Any = None) -> list[Result]:
        clock.seconds["propose"] += 0.3
        return [one for prompt in prompts for one in Fake("m", [1.0], 4 if prompt[0] % 2 else 12)([prompt])]

    plain = Contender("plain", Fake("p", [1.0]))
    them = [plain, Contender("transformers", plain.method), Contender("medusa", method, clock)]
    run_rounds(them, [[[0], [1]], [[2], [3]]], rounds=2)
    assert summarize(them, [None] * 4)["medusa"].step_ms["propose"] == pytest.approx(100.0)


def test_the_warm_up_decodes_each_batch_size_and_length() -> None:
    """Of one size, the longest, the shortest, and one for each 256 tokens between them; or everything."""

    def batch(size: int, longest: int) -> list[list[int]]:
        return [[0] * longest, *([[0]] * (size - 1))]

    batches = [batch(2, 900), batch(2, 100), batch(2, 400), batch(2, 700), batch(2, 500), batch(1, 40)]
    assert warm_up_batches(batches) == [batches[0], batches[4], batches[1], batches[5]]
    assert warm_up_batches(batches, everything=True) == [batches[at] for at in (0, 3, 4, 2, 1, 5)]
    assert warm_up_batches([batch(2, 5), batch(2, 5)]) == [batch(2, 5)]


def test_nothing_is_compiled_while_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts in batches of two leave a batch of one, which is another compiled step."""
    made: list[Any] = []
    monkeypatch.setattr("decode.compiled.region.compiled", lambda step, *how: made.append(step) or step)
    method = plain_method(tiny_model("llama", num_hidden_layers=1), Settings(max_new_tokens=8, compile=True))
    compiled = {True: 0, False: 0}

    def counted(prompts: Any, on_step: Any = None, seeds: Any = None) -> Any:
        before, found = len(made), method(prompts, on_step, seeds)
        compiled[seeds is not None] += len(made) - before
        return found

    them = contenders(counted, Fake("t", [1.0]), Fake("m", [1.0]))
    run_rounds(them, [[random_ids(4), random_ids(5)], [random_ids(4, seed=1)]], rounds=2)
    assert compiled == {False: 2, True: 0}, "two, in the warm-up"


def test_speedups_are_ratios_within_a_round() -> None:
    """The machine is ten times slower in the second round; every ratio is still 2."""
    slow = [1.0, 1.0, 10.0, 1.0]
    stock, medusa = (Fake("x", [factor * seconds for seconds in slow]) for factor in (4, 0.5))
    figures = measured(medusa, Fake("p", slow), stock, rounds=3)
    assert figures["medusa"].speedup == pytest.approx(2.0)
    assert figures["medusa"].speedup_vs_generate == pytest.approx(8.0)
    assert figures["plain"].speedup == 1.0
    assert figures["medusa"].tokens_per_second == Rate(24.0, pytest.approx(2.4), 24.0)


def test_methods_take_turns_to_run_first() -> None:
    order: list[str] = []
    them = contenders(*(Fake(name, [1.0], order=order) for name in "ptm"))
    progress = []
    run_rounds(them, [[[1]], [[2]]], rounds=2, on_progress=lambda: progress.append(1))
    assert order[:3] == ["p1", "t1", "m1"], "the warm-up"
    assert order[3:] == ["p1", "t1", "m1", "t2", "m2", "p2", "t1", "m1", "p1", "m2", "p2", "t2"]
    assert len(progress) == 4


def test_prompts_of_one_batch_share_its_seconds_and_are_drawn_together() -> None:
    them = contenders(PLAIN, PLAIN, Fake("m", [1.0]))
    run_rounds(them, [[[1], [2]], [[3]]], rounds=1)
    figures = summarize(them, [None] * 3)["medusa"]
    assert figures.tokens_per_second.median == pytest.approx(18.0)
    assert [prompt.batch for prompt in figures.prompts] == [0, 0, 1]
    sample = Sample.of(figures.prompts)
    assert sample.new_tokens.tolist() == [24.0, 12.0]
    assert sample.seconds.tolist() == [[1.0, 1.0]]


def test_accepted_by_depth_is_the_share_of_steps_that_reached_it() -> None:
    results = [Result([1], uncut_lengths=[1, 3]), Result([1], uncut_lengths=[2, 4])]
    assert accepted_by_depth(results) == [3 / 4, 2 / 4, 1 / 4]
    assert accepted_by_depth([Result([1], uncut_lengths=[1, 1])]) == []
    assert accepted_by_depth([]) == []


def test_tau_is_pooled_over_steps_and_averaged_over_texts() -> None:
    """A text of one step of 12 tokens, and seven texts of 12 steps: 96 tokens in 85 steps, or (12 + 7) / 8."""

    def method(prompts: Any, on_step: Any = None, seeds: Any = None) -> list[Result]:
        return [Fake("m", [1.0], 1 if prompt[0] > 1 else TOKENS)([prompt])[0] for prompt in prompts]

    figures = measured(method, prompts=8)["medusa"]
    assert (figures.tau, figures.mean_tau) == (96 / 85, 19 / 8)
    assert (figures.steps, figures.new_tokens) == (85, 96)
    assert figures.tau_interval is not None
    assert figures.mean_tau_interval is not None
    assert figures.tau_interval[0] < 96 / 85 < figures.tau_interval[1] < 2
    assert figures.mean_tau_interval[0] == 1, "draws without the short text"
    assert 2.4 < figures.mean_tau_interval[1] < 7


def test_equal_texts_are_the_share_of_prompts_with_the_same_text() -> None:
    def other(prompts: Any, on_step: Any = None, seeds: Any = None) -> list[Result]:
        results = Fake("m", [1.0])(prompts)
        for result in results:
            if result.input_ids == [3]:
                result.new_ids = [0] * TOKENS
        return results

    figures = measured(other, prompts=4)
    assert (figures["medusa"].equal_to_plain, figures["transformers"].equal_to_plain) == (0.75, 1.0)
    figures = measured(other, other, prompts=4)
    assert (figures["medusa"].equal_to_plain, figures["medusa"].equal_to_generate) == (1.0, 0.75)


def test_categories_have_separate_figures() -> None:
    """One category for all prompts is not repeated."""
    them = contenders(PLAIN, PLAIN, Fake("m", [9.0, 0.5, 0.25, 0.5]))
    run_rounds(them, [[[1]], [[2]], [[3]]], rounds=1)
    by_category = summarize(them, ["math", "code", None])["medusa"].by_category
    assert {name: figures.new_tokens for name, figures in by_category.items()} == {"math": 12, "code": 12}
    assert by_category["code"].speedup == pytest.approx(4.0)
    assert summarize(them, ["math"] * 3)["medusa"].by_category == {}


def test_prompts_without_new_tokens_give_no_error() -> None:
    """A prompt may fill the context, so that no token is written."""

    def nothing(prompts: Any, on_step: Any = None, seeds: Any = None) -> list[Result]:
        return [Result(list(prompt)) for prompt in prompts]

    figures = measured(nothing, nothing, nothing)["medusa"]
    assert (figures.new_tokens, figures.steps, figures.accepted_by_depth) == (0, 0, [])


def test_intervals_contain_the_figure_and_widen_with_the_spread() -> None:
    """The heads speed up only some prompts, so the interval is wide. A single measurement has none."""

    def spans(seconds: list[float]) -> tuple[float, Any]:
        figures = measured(Fake("m", [1.0, *seconds], 3), prompts=len(seconds))
        assert figures["plain"].speedup_interval == (1.0, 1.0)
        return figures["medusa"].speedup, figures["medusa"].speedup_interval

    alike, (low, high) = spans([0.5] * 8)
    assert (alike, low, high) == (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))
    mean, (low, high) = spans([0.25, 0.75] * 4)
    assert low < mean < high
    assert high - low > 0.5
    single = measured(PLAIN)["medusa"]
    assert (single.speedup_interval, single.tau_interval) == (None, None)


def test_figures_can_be_recomputed_from_the_prompts_in_the_json() -> None:
    figures = measured(Fake("m", [9.0, 0.5, 0.25], 4), prompts=2, rounds=2)["medusa"]
    prompts = figures.prompts
    assert sum(p.uncut_tokens for p in prompts) / sum(p.steps for p in prompts) == figures.tau
    rates = [sum(p.new_tokens for p in prompts) / sum(p.seconds[r] for p in prompts) for r in range(2)]
    assert figures.tokens_per_second.max == pytest.approx(max(rates))


def test_tau_by_position_groups_steps_by_their_start() -> None:
    bins = tau_by_position([Result([1], uncut_lengths=[4] * 5), Result([1], uncut_lengths=[1] * 17)])
    assert bins == [PositionFigures(0, (16 + 16) / 20, 20), PositionFigures(16, (4 + 1) / 2, 2)]


def test_accepted_nodes_are_counted_at_starts_of_steps() -> None:
    """The steps have 3, 1 and 2 tokens, and a last root; ranks between starts of steps do not count."""
    ranks = torch.tensor([[0, 2], [0, 0], [0, 0], [7, 0], [1, 9], [0, 0], [0, 0]])
    results = [Result([1], uncut_lengths=[3, 1, 2, 1])]
    assert accepted_by_node([ranks], results) == [
        AcceptedNode([0], 1 / 4),
        AcceptedNode([0, 2], 1 / 4),
        AcceptedNode([1], 1 / 4),
    ]
    beyond = torch.tensor([[0, MISSED, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])  # a node beyond the recorded guesses
    assert accepted_by_node([beyond], [Result([1], uncut_lengths=[4])]) == [AcceptedNode([0], 1.0)]


def test_tokens_of_ngrams_beyond_the_heads_are_no_nodes_of_theirs() -> None:
    """A mix accepts more tokens than there are heads; no node may count more often than the one before it."""
    ranks, results = torch.tensor([[1, 3], *[[0, 0]] * 8]), [Result([1], uncut_lengths=[7, 2])]
    found = accepted_by_node([ranks], results)
    assert found == [AcceptedNode([0], 0.5), AcceptedNode([1], 0.5), AcceptedNode([1, 3], 0.5)]
    alone(tree, found)  # is drawn


@pytest.mark.parametrize(
    ("drafter", "heads", "named"),
    [
        ("heads", "runs/h", "B with the heads runs/h"),
        ("ngram", "runs/h", "B with the drafter ngram"),
        ("mix:heads+ngram", "runs/h", "B with the drafter mix:heads+ngram (heads runs/h)"),
        ("blockwise", "runs/h", "B with the drafter blockwise (heads runs/h)"),
        ("ngram:n=2", None, "B with the drafter ngram:n=2"),
        ("of-another-package", "runs/h", "B with the drafter of-another-package (heads runs/h)"),
    ],
)
def test_the_headline_names_what_drafted(drafter: str, heads: str | None, named: str) -> None:
    assert outcome([1.0], backbone="B", drafter=drafter, heads=heads).subject == named
