"""Calibration: decoding follows the predictions, and no tree is better than the chosen one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.bench.calibration import calibrate, recording
from decode.bench.calibration.calibrate import time_steps
from decode.bench.calibration.recording import (
    OPENING_TOKENS,
    TEMPERATURES,
    Recording,
    grow,
    highest_tau,
    own_texts,
    path_counts,
    predicted_tau,
    record,
    starts,
)
from decode.bench.calibration.stored import (
    MIN_STEPS,
    Calibration,
    CalibrationPoint,
    RecordedTexts,
    TooFewStepsError,
    situation,
    store,
    stored,
    stored_fit,
)
from decode.bench.methods import medusa_method, plain_method
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import DynamicTree
from decode.drafters.mix import Mix
from decode.loop import Step
from decode.settings import Settings
from decode.texts import Decoding
from medusa import Tree
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import write_json
from medusa.heads.guesses import MISSED, accepted
from tests.helpers import random_heads, random_ids, random_tree, times_of_few_steps

SETTINGS = Settings(max_new_tokens=24)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate from a few short texts, so that a test takes little time."""
    monkeypatch.setattr(calibrate, "MIN_STEPS", 1)


def random_ranks(seed: int, positions: int = 60, heads: int = 4) -> Tensor:
    """Ranks like those of real heads: good guesses are more frequent; the last positions have no next tokens."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.multinomial(torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1]), positions * heads, True, generator=generator)
    ranks = torch.where(ranks == 4, MISSED, ranks).reshape(positions, heads)
    for head in range(heads):
        ranks[positions - head - 1 :, head] = MISSED
    return ranks


def starts_of(tree: Tree, ranks: Tensor) -> list[int]:
    return starts(accepted(tree, ranks), ranks.shape[1])


def test_steps_start_where_the_last_one_ended() -> None:
    """Ranks of head 1: right at positions 0, 3 and 4; the chain takes one more token there."""
    ranks = torch.tensor([[0], [1], [1], [0], [0], [1], [1]])
    assert starts_of(Tree.chain(1), ranks) == [0, 2, 3, 5]
    assert predicted_tau(Tree.chain(1), Recording([ranks])) == (2 + 1 + 2 + 1) / 4
    assert starts_of(Tree.chain(0), ranks) == [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def decoded(llama: Any) -> tuple[Any, Any, list[tuple[list[int], list[int]]]]:
    """Heads that sometimes guess correctly, and texts of the backbone."""
    heads = random_heads(llama, 3, lm_head="shared")
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(0.3)  # near the identity, whose guess is the token before
    prompts = [random_ids(5 + i, seed=i) for i in range(4)]
    results = plain_method(llama, SETTINGS)(prompts)
    return llama, heads, [(result.input_ids, result.new_ids) for result in results]


TREES = {"chain": Tree.chain(3), "4,3,2": Tree.top_k([4, 3, 2])}
TREES |= {"dynamic 20": DynamicTree.over_heads(20, 3, (0.7, 1.0, 1.5))}


@pytest.mark.parametrize("name", [*TREES, "sampled"])
def test_recorded_ranks_predict_every_step(decoded: Any, name: str) -> None:
    """Each step of real decoding, not only the mean, starts and ends where the replay of the recording predicts.

    Rejection accepts the sampled tokens, and a prompt's sample depends on its seed alone, with or without heads."""
    model, heads, texts = decoded
    tree, settings, seeds = TREES.get(name, Tree.top_k([6, 4])), SETTINGS, list(range(len(texts)))
    if name == "sampled":
        settings = replace(SETTINGS, temperature=0.6)
        plain = plain_method(model, settings)([prompt for prompt, _ in texts], seeds=seeds)
        texts = [(result.input_ids, result.new_ids) for result in plain]
    recording = record(Backbone(model), heads, texts)
    method = medusa_method(model, heads, settings, tree=tree)
    lengths = []
    for index, (prompt, new) in enumerate(texts):
        (result,) = method([prompt], seeds=[index])
        assert result.new_ids == new
        predicted = starts(recording.accepted(tree, index), 3)
        assert list(itertools.accumulate(result.uncut_lengths, initial=0))[: len(predicted)] == predicted
        lengths += result.uncut_lengths[: len(predicted)]
    assert predicted_tau(tree, recording) == pytest.approx(sum(lengths) / len(lengths))
    assert sum(lengths) > len(lengths), "nothing was accepted: no power"


def test_fitted_temperatures_make_the_next_tokens_most_probable(decoded: Any) -> None:
    model, heads, texts = decoded
    recording = record(Backbone(model), heads, texts)
    found = recording.fit_temperatures()
    came = torch.cat(recording.right)
    best = torch.cat(recording.best)
    for head in range(3):
        known = ~came[:, head].isnan()
        assert known.sum() == sum(len(new) - head - 1 for _, new in texts)
        assert (best[known, head, 0] >= came[known, head]).all()
        losses = [
            (torch.cat(recording.log_z)[known, head, g] - came[known, head] / t).mean()
            for g, t in enumerate(TEMPERATURES)
        ]
        assert losses[TEMPERATURES.index(found[head])] == min(losses)


@pytest.mark.parametrize("nodes", [5, 20])
def test_no_random_tree_of_the_size_beats_the_grown_one(nodes: int) -> None:
    recording = Recording([random_ranks(seed, 300) for seed in range(5)])
    best = grow(recording, nodes)
    assert best.num_nodes == nodes
    tau = predicted_tau(best, recording)
    others = [random_tree(nodes - 1, seed, max_rank=3, max_depth=4) for seed in range(40)]
    assert tau >= max(predicted_tau(tree, recording) for tree in others)
    if nodes <= 5:
        assert tau >= predicted_tau(Tree.chain(nodes - 1), recording)
    never_right = Recording([torch.full((50, 3), MISSED)])
    assert grow(never_right, nodes).num_nodes == 1


def test_counting_where_steps_start_gives_better_trees() -> None:
    """The second guess of head 1 is correct only after a wrong first guess, so it helps most where steps start."""
    ranks = torch.tensor([[0, 0], [0, 1], [0, MISSED], [1, MISSED], [1, MISSED]] * 60)
    recording = Recording([ranks])
    everywhere = Tree.from_paths(
        [path for path, _ in path_counts(recording, None).most_common(2)]
    )  # all positions, as the original counts
    assert predicted_tau(grow(recording, 3), recording) >= predicted_tau(everywhere, recording)


@pytest.mark.parametrize("nodes", [4, 20])
def test_no_tree_of_a_size_exceeds_the_highest_tau(nodes: int) -> None:
    """Trees with the r better guesses beside each guess of rank r, which all dynamic trees have."""
    recording = Recording([random_ranks(seed, 300) for seed in range(5)])
    highest = highest_tau(nodes, recording)
    rng = random.Random(0)
    for _ in range(30):
        paths: list[tuple[int, ...]] = []
        while len(paths) < nodes - 1:
            above = rng.choice([(), *(path for path in paths if len(path) < 4)])
            paths.append((*above, sum(path[:-1] == above for path in paths if len(path) == len(above) + 1)))
        assert predicted_tau(Tree.from_paths(paths), recording) <= highest
    assert 1 < highest <= 5
    assert highest_tau(1, recording) == 1


def test_the_highest_tau_takes_the_fewest_steps() -> None:
    """One head that is right at positions 1 and 2: a step at position 0 accepts nothing; one at 1 ends after 3."""
    ranks = torch.tensor([[MISSED], [1], [0], [MISSED], [MISSED]])
    assert highest_tau(2, Recording([ranks])) == 4 / 3, "steps at 0, 1 and 2; the guess of rank 1 needs a third node"
    assert highest_tau(3, Recording([ranks])) == 4 / 3, "steps at 0, 1 and 3"


def test_trees_that_will_not_be_the_fastest_are_not_decoded() -> None:
    recording = Recording([random_ranks(seed, 300) for seed in range(5)])
    plain, static = CalibrationPoint(1, [], 1.0, 10.0), CalibrationPoint(8, [[0]], 2.0, 10.0)
    trees = {nodes: DynamicTree.over_heads(nodes, 4) for nodes in (4, 8, 16)}
    decoded: list[int] = []

    def measured(tree: Any) -> float:
        decoded.append(tree.num_nodes)
        return {4: 1.9, 8: 2.3, 16: 2.4}[tree.num_nodes]

    unknown = [(trees[4], 0.02), (trees[8], 0.01), (trees[16], 0.013)]
    found = calibrate.add_competitive([plain, static], unknown, recording, measured)
    assert decoded[0] == 8, "the highest possible speed first"
    assert 4 not in decoded, "twice the time of the static tree, and at most 2.7 tokens a step"
    assert {point.nodes for point in found if point.dynamic} == set(decoded)
    everything = [*found, *(CalibrationPoint(n, [], measured(trees[n]), 1000 * s, True) for n, s in ((4, 0.02),))]
    assert found[calibrate.best_of(found)] == everything[calibrate.best_of(everything)]


def test_a_dynamic_tree_is_not_decoded_where_static_ones_gain_little() -> None:
    """It may gain a quarter more than a static tree that is not larger: 1.375 tokens a step in 10.7 ms, or in 10.8."""
    recording = Recording([random_ranks(seed, 300) for seed in range(5)])
    assert highest_tau(8, recording) > 1.5, "the recording alone rules out nothing"
    known = [
        CalibrationPoint(1, [], 1.0, 10.0),
        CalibrationPoint(4, [[0]], 1.3, 10.15),
        CalibrationPoint(11, [], 2, 99),
    ]
    for seconds, decoded in ((0.0107, True), (0.0108, False)):
        unknown = [(DynamicTree.over_heads(8, 4), seconds)]
        found = calibrate.add_competitive(known, unknown, recording, lambda tree: 1.1)
        assert (len(found) > len(known)) == decoded


def test_the_first_texts_hold_the_tokens_that_are_asked_for() -> None:
    texts = [([1], [2] * length) for length in (5, 0, 7, 9)]
    assert [calibrate.first_texts(texts, tokens) for tokens in (1, 5, 6, 12, 13, 99)] == [1, 1, 3, 3, 4, 4]


@pytest.mark.usefixtures("few_steps")
def test_the_fastest_of_the_trees_is_chosen(decoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, heads, texts = decoded

    def timed(slope: float) -> Calibration:
        def cost(*args: Any) -> list[float]:
            return [1.0 + slope * (tree.num_nodes > 1) for tree in args[3]]

        monkeypatch.setattr(calibrate, "time_steps", cost)
        return calibrate.calibrate(model, heads, texts, SETTINGS, sizes=(4, 8, 16))

    free, dear = timed(0.0), timed(100.0)
    assert free.points[free.chosen].tau == max(point.tau for point in free.points)
    assert free.points[free.chosen].nodes > 1
    assert dear.points[dear.chosen].nodes == 1, "plain decoding is chosen where trees are slower"
    assert dear.tree.num_nodes == 1


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("fastest", ["heads", "ngram", "mix", "plain"])
def test_the_fastest_of_heads_and_ngrams_is_chosen(
    decoded: Any, fastest: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The best tree for the heads alone is kept beside it, and what is stored is loaded."""
    model, heads, texts = decoded

    def name(way: Any) -> str:
        if isinstance(way, Mix):
            return "mix"
        return "ngram" if isinstance(way, DrafterFactory) else "plain" if way.num_nodes == 1 else "heads"

    def seconds(*args: Any) -> list[float]:
        return [1.0 if name(way) in (fastest, "plain") else 50.0 for way in args[3]]

    monkeypatch.setattr(calibrate, "time_steps", seconds)
    monkeypatch.setattr(calibrate, "decoded_tau", lambda *args: 1.5)
    found = calibrate.calibrate(model, heads, texts, SETTINGS, sizes=(1, 4, 8))
    assert found.best.drafter.partition(":")[0] == {"plain": "heads"}.get(fastest, fastest)
    assert found.of_heads.drafter == "heads"
    assert (found.of_heads.nodes > 1) == (fastest == "heads")
    assert {point.kind for point in found.points} == {"plain", "static", "dynamic", "n-grams", "heads and n-grams"}
    store([tmp_path / "calibration.json"], found)
    again = stored([tmp_path / "calibration.json"], found.holds_for)
    assert again == found
    source = again.source(model, heads)
    assert name(source if fastest in ("ngram", "mix") else source.tree) == fastest
    assert source.num_nodes == found.best.nodes
    predicted = again.predicted_tau(source.tree, found.best.drafter)
    assert predicted == found.best.tau
    if fastest == "mix":
        assert found.best.drafter.startswith(f"mix:nodes={found.best.nodes},")
        assert isinstance(source.tree, DynamicTree)


@pytest.mark.usefixtures("few_steps")
def test_drawn_drafts_are_calibrated_without_ngrams(decoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, heads, texts = decoded
    monkeypatch.setattr(calibrate, "time_steps", lambda *args: [1.0 for _ in args[3]])
    found = calibrate.calibrate(model, heads, texts, Settings(temperature=1.0, draft="sample"), sizes=(1, 4))
    assert {point.drafter for point in found.points} == {"heads"}


def test_calibrations_of_earlier_versions_load(tmp_path: Path) -> None:
    """Their choice is a tree for the heads alone."""
    content = asdict(calibration(batch_size=1))
    del content["chosen_tree"]
    for point in content["points"]:
        del point["drafter"]
    write_json(tmp_path / "calibration.json", [content])
    found = stored([tmp_path / "calibration.json"], {"batch_size": 1})
    assert found == calibration(batch_size=1)
    assert found.of_heads is found.best


def test_a_tree_must_be_clearly_faster() -> None:
    """Timing errs by one or two percent: a predicted gain below 2 % keeps plain decoding."""
    plain, tree = CalibrationPoint(1, [], tau=1.0, step_ms=10.0), CalibrationPoint(4, [[0]], tau=1.01, step_ms=10.0)
    assert calibrate.best_of([plain, tree]) == 0
    kept = Calibration([plain, tree], 0, [], {}, RecordedTexts(1))
    assert kept.why_not_fastest == "Another tree seems 1.0% faster, which is within the error of timing."
    again = Calibration([plain, tree, replace(tree, step_ms=9.0)], 1, [], {}, RecordedTexts(1))
    assert "Another tree seems 11.1% faster; the chosen one was timed again" in again.why_not_fastest
    assert calibrate.best_of([plain, tree, CalibrationPoint(6, [[0]], tau=1.03, step_ms=10.0)]) == 2


def test_large_batches_on_a_cpu_try_small_trees() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for compiled in (False, True):
        assert calibrate.sizes_for(cpu, 1, compiled) == [1, 4, 6, 8, 11, 16, 24, 32, 48, 64]
        assert calibrate.sizes_for(cpu, 16, compiled) == [1, 2, 3, 4, 6, 8, 11, 16]
        assert calibrate.sizes_for(cpu, 256, compiled) == [1, 2, 3, 4, 6, 8]
    assert calibrate.sizes_for(cuda, 64, compiled=False)[-1] == 64
    assert calibrate.sizes_for(cuda, 1, compiled=True) == [1, 8, 16, 32, 64]
    assert calibrate.sizes_for(cuda, 4, compiled=True) == [1, 2, 4, 8, 16, 32, 64]


def test_steps_are_timed_for_every_tree(decoded: Any) -> None:
    model, heads, texts = decoded
    trees = [Tree.chain(0), Tree.chain(3), DynamicTree.over_heads(4, 3)]
    seconds = time_steps(
        model, heads, [texts[0][0]], trees, [1.0, None, None], SETTINGS, batch_size=2, rounds=1, steps=6
    )
    assert len(seconds) == 3
    assert all(0 < value < 1 for value in seconds)


def test_what_slows_the_machine_slows_all_trees(decoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take turns: a load that lasts a third of the round makes no tree look slower than another."""
    model, heads, texts = decoded
    now, steps, stock = [0.0], [0], Decoding.__iter__

    def loaded(self: Any) -> Iterator[Step]:
        for step in stock(self):
            steps[0] += 1
            now[0] += 10.0 if steps[0] <= 12 else 1.0
            yield step

    monkeypatch.setattr(Decoding, "__iter__", loaded)
    monkeypatch.setattr(calibrate, "stopwatch", lambda device: lambda: now[0])
    trees = [Tree.chain(0), Tree.chain(2), Tree.chain(3)]
    assert time_steps(model, heads, [texts[0][0]], trees, [1.0, 1.5, 1.6], SETTINGS, rounds=1, steps=12) == [1.0] * 3


def test_slow_trees_are_timed_once() -> None:
    """Plain decoding is the baseline, and a tree whose tau is unknown may be the fastest: both are timed again."""
    assert calibrate.promising([1.0, 1.0, 1.0, 9.0, 1.0], [1.0, 2.0, 1.7, None, 1.5]) == [0, 1, 2, 3]


@pytest.mark.usefixtures("few_steps")
def test_one_head_has_no_large_dynamic_trees(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = random_heads(llama, 1)
    texts = [(random_ids(5, seed=seed), random_ids(12, seed=seed)) for seed in range(4)]
    monkeypatch.setattr(calibrate, "time_steps", lambda *args: [1.0 for _ in args[3]])
    found = calibrate.calibrate(llama, heads, texts, Settings(), sizes=(1, 4, 17, 24))
    assert [point.nodes for point in found.points if point.kind == "dynamic"] == [4, 17]


def test_prompts_without_room_for_a_timed_step_are_refused(llama: Any) -> None:
    heads, end = random_heads(llama, 3), llama.config.max_position_embeddings
    with pytest.raises(RequestError, match="leave room for at most 2 steps"):
        time_steps(llama, heads, [random_ids(end - 2)], [Tree.chain(0)], [1.0], SETTINGS, rounds=1)


def test_too_few_steps_are_refused(llama: Any) -> None:
    """No step starts at the last three tokens of a text, as one of three heads would have no next token there."""
    heads = random_heads(llama, 3)
    texts = [(random_ids(5, seed=seed), random_ids(length, seed=seed)) for seed, length in enumerate((1, 3, 4, 13))]
    wanted = "at least 500 steps, and 11 start in the 21 tokens of 4 texts; give more prompts"
    with pytest.raises(TooFewStepsError, match=wanted):
        calibrate.calibrate(llama, heads, texts, Settings(), sizes=(1, 4), rounds=1)


@pytest.mark.usefixtures("few_steps")
def test_one_text_with_steps_is_enough(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in one of the two halves, and the other half has no steps."""
    monkeypatch.setattr(calibrate, "time_steps", times_of_few_steps)
    heads, stopped = random_heads(llama, 3), Settings(stop=("x",))
    texts = [(random_ids(5, seed=seed), random_ids(12 if seed == 2 else 2, seed=seed)) for seed in range(4)]
    found = calibrate.calibrate(llama, heads, texts, stopped, sizes=(1, 4), rounds=1)
    assert found.texts.steps == 12 - 3
    assert all(1 <= point.tau <= 4 for point in found.points)


def test_calibration_texts_are_the_same_at_every_call(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "OWN_TEXTS", 8)
    monkeypatch.setattr(recording, "OWN_TOKENS", 10)
    state = torch.get_rng_state()
    one, other = (own_texts(llama, SETTINGS, bos=None) for _ in range(2))
    assert one == other
    assert len({tuple(prompt) for prompt, _ in one}) == 8
    assert torch.equal(torch.get_rng_state(), state), "the global random state is unchanged"
    assert all(len(prompt) == 1 + OPENING_TOKENS and new for prompt, new in one)


def calibration(**holds_for: Any) -> Calibration:
    points = [CalibrationPoint(1, [], 1.0, 2.0), CalibrationPoint(3, [[0], [0, 0]], 2.5, 4.0)]
    return Calibration(points, 1, [1.0, 0.7], holds_for, RecordedTexts(3, steps=MIN_STEPS))


def test_one_file_keeps_calibrations_of_several_situations(tmp_path: Path) -> None:
    file = tmp_path / "heads" / "calibration.json"
    assert stored([file], {"batch_size": 1}) is None
    for batch_size in (1, 8):
        assert store([file], calibration(batch_size=batch_size)) == file
    again = calibration(batch_size=8)
    again.chosen = 0
    store([file], again)
    assert stored([file], {"batch_size": 1}) == calibration(batch_size=1)
    assert stored([file], {"batch_size": 8}) == again
    assert stored([file], {"batch_size": 2}) is None
    assert calibration().tree.rank_paths == [(0,), (0, 0)]


def test_a_dynamic_tree_takes_what_a_calibration_of_its_heads_found(tmp_path: Path, llama: Any) -> None:
    """16 candidates are enough for the best tree, of 3 nodes; much larger trees have as many as by default."""
    file, heads = tmp_path / "calibration.json", random_heads(llama, 2)
    assert stored_fit(DynamicTree.over_heads(3, 2), [file], heads) is None
    store([file], replace(calibration(**situation(llama, heads, SETTINGS, 1)), shortlist=16))
    for nodes, shortlist in (3, 16), (5, 16), (33, 32):
        fitted = stored_fit(DynamicTree.over_heads(nodes, 2), [file], heads)
        assert isinstance(fitted, DynamicTree)
        assert (fitted.num_nodes, fitted.temperatures, fitted.candidates.shortlist) == (nodes, (1.0, 0.7), shortlist)
    assert stored_fit(DynamicTree.over_heads(3, 2), [file], random_heads(llama, 2, 1)) is None


def test_the_cache_is_used_if_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file" / "calibration.json", tmp_path / "cache" / "calibration.json"]
    assert store(places, calibration(batch_size=1)) == places[1]
    assert stored(places, {"batch_size": 1}) is not None
    with pytest.raises(OSError, match="file"):
        store(places[:1], calibration())


def test_calibrations_depend_on_heads_batch_size_and_settings(llama: Any) -> None:
    one, other = (random_heads(llama, 2, seed) for seed in (0, 1))
    told = situation(llama, one, SETTINGS, 1)
    assert told == situation(llama, one, SETTINGS, 1)
    assert told != situation(llama, other, SETTINGS, 1)
    assert told != situation(llama, one, SETTINGS, 2)
    assert told != situation(llama, one, Settings(temperature=1.0), 1)
    assert told != situation(llama, one, replace(SETTINGS, numerics="stable"), 1)
    sampling = Settings(temperature=1.0)
    for option in ({"draft": "sample"}, {"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        assert situation(llama, one, replace(sampling, **option), 1) == situation(llama, one, sampling, 1) | option
