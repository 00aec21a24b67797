"""`medusa fit`: its plan, its choices, and a whole run that is interrupted in every stage."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.bench.calibration.stored import Calibration, CalibrationPoint, RecordedTexts, TooFewStepsError
from medusa import MedusaHeads
from medusa.__main__ import main
from medusa.arguments import add_arguments, as_arguments, read
from medusa.checkpoints.stored import WEIGHTS
from medusa.commandline import OneLineParser
from medusa.commands.benchmark import BenchmarkOptions
from medusa.commands.fit import fit, stages
from medusa.commands.fit import plan as plan_module
from medusa.commands.fit.options import FitOptions, choose_heads
from medusa.commands.fit.plan import (
    CHECKPOINTS,
    COMPILING,
    COMPILING_LAYER,
    EPOCHS,
    HEAD_COST,
    LEAST_MINUTES,
    REPEATS,
    Costs,
    Plan,
    clock,
    compiling,
    describe,
    make_plan,
    most_tokens,
    what_fits,
)
from medusa.commands.fit.probe import Probe
from medusa.commands.fit.prompts import answerable, asked, split, write_prompts
from medusa.commands.fit.state import FitState
from medusa.commands.options import Models, Output, Prompts
from medusa.config import MedusaConfig
from medusa.errors import NotCompilableError, RequestError, RunError
from medusa.files import ASSETS
from medusa.options import LoadOptions
from medusa.records.record import Record, parse_record
from medusa.records.sources import read_records
from tests.commands.fake_server import FakeServer
from tests.commands.place import Place
from tests.helpers import LETTERS
from train.architecture import BackboneSizes, choose
from train.arguments import MedusaTrainingArguments
from train.checkpoints import require_room
from train.config import HeadsConfig
from train.hardware import HeadsSize, heads_size

OPENINGS = ASSETS / "openings.jsonl"
PROBE = Probe(
    parameters=5_000_000,
    model_bytes=20_000_000,
    hidden_size=256,
    vocab_size=4096,
    context=512,
    device="cpu",
    turns=1.0,
    prompt_tokens=20.0,
    longest_prompt=100,
    answer_tokens=200.0,
    read_seconds=1e-4,
    prompt_seconds=1e-4,
    step_seconds=0.005,
    width=64,
    wide_step_seconds=0.064,
    cache_bytes=12_288,
)
SIZE = HeadsSize(num_heads=4, trained=1_000_000, own=0, vocab_size=4096)
COSTS = [Costs(SIZE, token_seconds=4e-4)]
SERVED = {"kind": "eagle", "block": "gated", "lm_head": "shared", "feature_layers": "usual"}


def prompts(count: int) -> list[Record]:
    return [Record(f"p:{index}", text=f"prompt {index}", is_prompt=True) for index in range(count)]


def options(**given: Any) -> FitOptions:
    return FitOptions(**{"model": "demo", "prompts": Prompts(prompts=str(OPENINGS)), "plan": True} | given)


def planned(probe: Probe = PROBE, costs: Any = COSTS, train: int = 100, test: int = 20, **given: Any) -> Plan:
    return make_plan(options(**given), probe, costs, train_prompts=train, test_prompts=test)


# The prompts


@pytest.mark.parametrize(("count", "aside"), [(60, 20), (499, 99), (5000, 100)])
def test_a_fifth_of_the_prompts_is_set_aside(count: int, aside: int) -> None:
    sides = split(prompts(count), seed=0)
    assert len(sides.test) == aside
    assert len(sides.train) == count - aside
    assert not {record.text for record in sides.train} & {record.text for record in sides.test}
    assert split(prompts(count), seed=0) == sides
    assert split(prompts(count), seed=1).test != sides.test


def test_equal_prompts_count_once() -> None:
    with pytest.raises(RequestError, match="there are 59 different first questions, and fit needs at least 60"):
        split(prompts(59) + prompts(30), seed=0)


@pytest.mark.parametrize("form", ["messages", "input_ids"])
def test_two_answers_to_a_prompt_do_not_bring_it_to_both_sides(form: str) -> None:
    """Data of preferences, and what `medusa distill` writes, hold several answers to a prompt."""

    def row(number: int, answer: int) -> dict[str, Any]:
        said = [{"role": "user", "content": str(number)}, {"role": "assistant", "content": str(answer)}]
        return {"messages": said} if form == "messages" else {"input_ids": [number, answer], "prompt_tokens": 1}

    records = [parse_record(row(number, answer), "mine") for number in range(100) for answer in (7, 8)]
    trained, measured = (
        {record.messages[0]["content"] if record.messages else record.input_ids[0] for record in side}
        for side in split(records, seed=0)
    )
    assert len(trained | measured) == 100
    assert not trained & measured


def test_conversations_with_one_first_question_stay_on_one_side() -> None:
    """The model answers each question of those that it learns from; the benchmark asks the first one."""
    rows: list[dict[str, Any]] = []
    for number in range(100):
        said = [{"role": "user", "content": str(number)}, {"role": "assistant", "content": "yes"}]
        more = [*said, {"role": "user", "content": "Why?"}]
        rows += [{"turns": [str(number), "Why?"]}, {"prompt": str(number)}, {"messages": more}, {"messages": said}]
        rows += [{"text": str(number)}]  # of a model without a chat template
        rows += [{"prompt": str(number), "system": "Be kind."}]
    sides = split([parse_record(row, "mine") for row in rows], seed=0)
    trained, measured = ([record.question for record in side] for side in sides)
    assert len(measured) == len({*measured}) == 20
    assert not {*trained} & {*measured}
    assert len(trained) == 80 * 4, "two of the six forms ask what another one asks"
    documents = [
        {"messages": [{"role": "system", "content": str(n)}, {"role": "user", "content": "a"}]} for n in range(60)
    ]
    assert len(split([parse_record(row, "mine") for row in documents], seed=0).test) == 20


def test_the_first_prompts_of_both_sides_come_from_the_whole_file() -> None:
    """Short runs answer, calibrate on and measure the first ones, and a file may hold all of one subject first."""
    sides = split(
        [Record(f"p:{n}", text=f"{'math' if n < 500 else 'code'} {n}", is_prompt=True) for n in range(1000)], 0
    )
    for side in sides:
        assert 10 < sum(str(record.text).startswith("math") for record in side[:40]) < 30, "p < 0.003 for fair draws"


def test_prompts_that_fill_the_context_are_left_out(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the benchmark would refuse them, hours later."""
    letters = [Record(f"p:{size}", text="a" * size, is_prompt=True) for size in (1, 127, 128, 129)]
    assert answerable(options(model=place.backbone), letters) == letters[:2]
    assert "2 of 4 prompts are left out: they fill the model's context of 128 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (Record("mine:7", text="", is_prompt=True), "mine:7: the prompt is empty"),
        (Record("mine:7", input_ids=[10**6]), "mine:7: the prompt holds the id 1000000"),
        (Record("mine:7", messages=[{"role": "user", "content": "a"}]), "mine:7: a conversation needs a chat template"),
    ],
)
def test_unusable_prompts_are_refused_by_the_line_of_the_users_file(place: Place, record: Record, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        answerable(options(model=place.backbone), [record])


def test_a_conversation_that_outgrows_the_context_does_not_end_the_run(
    talking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = options(minutes=1.0, model=talking)
    long = parse_record({"turns": ["abc", "d" * 126]}, "mine:1")
    run = stages.Run(asked, tmp_path, make_plan(asked, PROBE, COSTS, 1, 20), PROBE)
    write_prompts(tmp_path / stages.TRAIN, [long])
    assert stages.text_stage(run).work()["texts"] == 1
    assert "training does without 1 of 2 answers; " in capsys.readouterr().err


ROWS = [
    {"prompt": "Once", "category": "a"},
    {"text": "A whole document"},
    {"input_ids": [1, 2, 3], "prompt_tokens": 2},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "tools": [{"a": 1}]},
    {"turns": ["first", "second"]},
    {"turns": ["first", "second"], "system": "Be brief."},
]


def test_prompts_are_written_as_they_were_read(tmp_path: Path) -> None:
    records = [parse_record(row, f"{tmp_path / 'p.jsonl'}:{number}") for number, row in enumerate(ROWS, 1)]
    write_prompts(tmp_path / "p.jsonl", records)
    assert [*read_records(str(tmp_path / "p.jsonl"))] == records


# The plan and the choices


def test_a_plan_divides_the_minutes() -> None:
    plan = planned(minutes=30.0, train=1000, test=100)
    assert plan.minutes == 30
    assert plan.text_seconds == pytest.approx(600, rel=0.01)  # a third
    assert plan.text_tokens == plan.texts * 200
    assert plan.text_seconds == PROBE.writing_seconds(plan.texts, 256)
    assert plan.training_minutes == pytest.approx(20, rel=0.01)
    assert plan.training_tokens == pytest.approx(20 * 60 / 4e-4, rel=0.01)
    assert plan.test_prompts == 86  # what a quarter of the minutes is enough for
    assert plan.seconds > 30 * 60


@pytest.mark.parametrize(("step", "prompt", "seconds"), [(0.045, 0.0006, 337.5), (0.08, 0.004, 800.0)])
def test_a_calibration_takes_longer_where_each_token_takes_its_time(step: float, prompt: float, seconds: float) -> None:
    """SmolLM2 on one CPU thread, in bfloat16 with AMX and in float32 with AVX2; the second took 854 s."""
    found = planned(replace(PROBE, step_seconds=step, prompt_seconds=prompt))
    assert found.calibration_seconds == pytest.approx(seconds)


def test_short_runs_take_small_training_steps() -> None:
    plans = [planned(minutes=minutes, train=1000, test=100) for minutes in (1.0, 20.0, 400.0)]
    assert [(plan.rows, plan.sequence_length) for plan in plans] == [(1, 384), (7, 512), (8, 512)]


def test_rows_hold_the_longest_prompt_with_its_answer_and_steps_stay_small() -> None:
    plan = planned(replace(PROBE, longest_prompt=5000, context=None), minutes=400.0, train=1000)
    assert (plan.rows, plan.sequence_length) == (1, 5312)
    plan = planned(replace(PROBE, longest_prompt=400), minutes=400.0, train=1000)
    assert plan.sequence_length == PROBE.context


def test_a_server_may_write_the_text(place: Place, tmp_path: Path) -> None:
    server = FakeServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = options(model=place.backbone, minutes=1.0, server=server.url)
    plan = make_plan(asked, PROBE, COSTS, 1000, 20)
    assert (plan.text_seconds, plan.training_minutes) == (0, pytest.approx(1.0, rel=0.01))
    assert f"by {server.url}" in "".join(describe(plan, PROBE, choose_heads(asked), asked))
    write_prompts(tmp_path / stages.TRAIN, [parse_record({"text": "abc"}, "mine:1")])
    assert stages.text_stage(stages.Run(asked, tmp_path, plan, PROBE)).work()["texts"] == 1
    assert [path for path, *_ in server.asked] == ["/v1/completions"]
    server.shutdown()


def test_a_server_that_fails_does_not_decide_what_is_learned(place: Place, tmp_path: Path) -> None:
    """One that stops after a few answers would leave heads that learn from these alone, in a finished stage."""
    server = FakeServer()
    server.trouble = lambda number, body: number > 2 and (400, {}, json.dumps({"error": "gone"}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = options(model=place.backbone, minutes=1.0, server=server.url)
    plan = make_plan(asked, PROBE, COSTS, 1000, 20)
    write_prompts(tmp_path / stages.TRAIN, [parse_record({"text": f"abc{n}"}, f"mine:{n}") for n in range(8)])
    work = stages.text_stage(stages.Run(asked, tmp_path, plan, PROBE)).work
    with pytest.raises(RunError, match=r"of 8 answers of the server failed; .* and the same command asks again"):
        work()
    assert work()["texts"] == 2, "the same ones failed again, so the questions may be the reason"
    server.trouble = lambda number, body: False
    assert work()["texts"] == 8
    server.shutdown()


def test_a_server_is_asked_before_the_model_is_loaded(place: Place, tmp_path: Path, no_loading: None) -> None:
    server = FakeServer()
    server.models = ["base", "lora"]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(RequestError, match="serves base, lora; choose one with --server-model"):
        fit(options(model=place.backbone, out=str(tmp_path / "new"), server=server.url))
    server.shutdown()
    with pytest.raises(RequestError, match="--server is 'ftp://nowhere'"):
        fit(options(model=place.backbone, out=str(tmp_path / "new"), server="ftp://nowhere"))
    with pytest.raises(RequestError, match="--server-model names a model of --server"):
        options(server_model="base")


def test_writing_takes_what_a_simulation_takes() -> None:
    """Texts of random lengths in 64 rows; the time of a step grows with its rows."""
    rng, lengths = random.Random(0), []
    for count in (10, 64, 300, 3000):
        lengths = [min(1 + int(rng.expovariate(1 / 150)), 256) for _ in range(count)]
        probe = replace(PROBE, answer_tokens=sum(lengths) / count)
        rows, seconds = [0] * PROBE.width, 20 * count * 1e-4
        left = [*lengths]
        while left or any(rows):
            for place, row in enumerate(rows):
                if not row and left:
                    rows[place] = left.pop()
            used = sum(row > 0 for row in rows)
            seconds += 0.005 + (used - 1) * (0.064 - 0.005) / 63
            rows = [max(row - 1, 0) for row in rows]
        assert probe.writing_seconds(count, 256) == pytest.approx(seconds, rel=0.15)


def test_the_default_minutes_answer_each_prompt_once_and_few_prompts_a_few_times() -> None:
    assert planned(train=60).minutes == LEAST_MINUTES
    plan = planned(train=5000, test=100)
    assert plan.texts == pytest.approx(5000, rel=0.01)
    assert plan.training_minutes * 60 == pytest.approx(2 * plan.text_seconds, rel=0.01)
    plan = planned(minutes=600.0, train=50)
    assert plan.texts == REPEATS * 50
    assert plan.training_tokens == pytest.approx(EPOCHS * plan.texts * 220, rel=0.01)  # prompts and answers
    assert "with more prompts, training would use the rest" in plan.reason


def test_a_slow_model_measures_fewer_prompts_and_answers_fit_the_context() -> None:
    plan = planned(replace(PROBE, step_seconds=0.5), train=500, test=100)
    assert (plan.test_prompts, plan.rounds) == (20, 2)
    plan = planned(replace(PROBE, context=64))
    assert (most_tokens(options(), 64), plan.sequence_length) == (63, 64)


@pytest.mark.parametrize(("places", "named"), [(("cpu",), "cpu has"), (("cuda:0", "cuda:1"), "cuda:0 and cuda:1 have")])
def test_a_run_that_needs_more_memory_than_there_is_warns(
    places: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several GPUs have their memory together."""
    plan, devices = planned(), [torch.device(place) for place in places]
    enough = -(-max(plan.memory_bytes, plan.decoding_bytes) // len(devices))
    monkeypatch.setattr(plan_module, "total_memory", lambda device: enough)
    assert plan_module.lacking_memory(plan, devices) is None
    monkeypatch.setattr(plan_module, "total_memory", lambda device: enough - 1)
    warning = str(plan_module.lacking_memory(plan, devices))
    assert named in warning
    assert "--quantization int8" in warning


def test_ignored_ends_of_texts_reach_every_stage(tmp_path: Path) -> None:
    for ignores in (True, False):
        run = stages.Run(options(ignore_eos=ignores, out=str(tmp_path)), tmp_path, planned(), PROBE)
        for stage in (stages.text_stage(run), stages.benchmark_stage(run, WRITTEN, False)):
            assert ("--ignore-eos" in stage.command) == ignores


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ({"purpose": "vllm"}, SERVED),
        ({"purpose": "sglang"}, SERVED),
        ({"kind": "hydra"}, {"kind": "hydra"}),
        ({}, {"kind": "markov"}),
    ],
)
def test_the_table_chooses_the_heads(given: dict, heads: dict) -> None:
    (choice,) = choose_heads(options(**given))
    assert choice.heads == heads
    assert choice.reason


def test_compare_trains_several_kinds() -> None:
    assert [choice.name for choice in choose_heads(options(compare=True))][:2] == ["medusa", "markov"]


SPREAD = "the model is spread over devices"


@pytest.mark.parametrize(
    ("asked", "device", "reason", "compiled", "told"),
    [
        (None, "cpu", "", False, "eager, as usual on a CPU (--compile: compiled)"),
        (None, "cuda", "", True, "compiled, as usual on a GPU (--no-compile: eager, for quick trials)"),
        (False, "cuda", "", False, "eager"),
        (None, "cuda", SPREAD, False, f"eager, because {SPREAD}"),
        (True, "cuda", "", True, "compiled"),
        (None, "mps", "", False, "eager, as usual on mps (--compile: compiled)"),
    ],
)
def test_steps_are_compiled_on_a_gpu(
    asked: bool | None, device: str, reason: str, compiled: bool, told: str, tmp_path: Path
) -> None:
    found, wanted = replace(PROBE, device=device, not_compiled=reason, layers=8), options(compile=asked)
    trees, seconds = compiling(MedusaConfig(64, 100, kind="markov"), found)
    costs = [replace(COSTS[0], compiled_trees=trees, tree_seconds=seconds)]
    plan, eager = (planned(found, costs, compile=compile) for compile in (asked, False))
    assert plan.compiled == compiled
    # On a GPU, plain decoding and 8 trees; on a CPU 18 trees, and the best one with 3 other numbers of candidates.
    # In the benchmark, plain decoding and a tree.
    steps = (9 if device == "cuda" else 22) + 2
    assert plan.seconds == pytest.approx(eager.seconds + compiled * steps * (COMPILING + 8 * COMPILING_LAYER))
    assert replace(eager, compiled=compiled).seconds == plan.seconds, "a continued run may change its steps"
    assert f"steps        {told}" in describe(plan, found, choose_heads(wanted), wanted)
    run = stages.Run(options(compile=asked, out=str(tmp_path)), tmp_path, plan, found)
    calibration = stages.calibration_stage(run, choose_heads(wanted)[0], WRITTEN, 1000)
    assert ("--compile" in calibration.command) == compiled
    assert ("--compile" in stages.benchmark_stage(run, WRITTEN, compiled).command) == compiled


def test_planned_steps_are_kept_and_impossible_ones_refused_before_any_work() -> None:
    told = "steps        compiled, as planned before"
    assert told in describe(planned(compile=True), PROBE, choose_heads(options()), options())
    with pytest.raises(RequestError, match=f"compile is not possible: {SPREAD}; leave it out"):
        planned(replace(PROBE, not_compiled=SPREAD), compile=True)


@pytest.mark.parametrize(
    ("dtype", "gain", "told"),
    [
        (
            "float32",
            2.0,
            "dtype        float32; with --dtype bfloat16 about {half} for the same, but texts can differ where",
        ),
        ("bfloat16", 2.0, "dtype        bfloat16; in float32 about {twice} for the same"),
        ("float32", 0.0, ""),
        ("float32", 1.0, ""),
    ],
)
def test_the_plan_has_the_time_in_both_dtypes(dtype: str, gain: float, told: str) -> None:
    found, plan = replace(PROBE, dtype=dtype, bfloat16=gain), planned()
    told = told.format(half=clock(plan.seconds / 2), twice=clock(plan.seconds * 2))
    lines = describe(plan, found, choose_heads(options()), options())
    assert any(line.startswith("dtype ") for line in lines) == bool(told)
    assert "\n".join(line for line in lines if line.startswith("dtype ")).startswith(told)


WRITTEN: Any = SimpleNamespace(stages={"text": {"mean_tokens": 100.0}})


@pytest.fixture
def gpu_stage(tmp_path: Path) -> Callable[..., stages.Stage]:
    """Make a stage of a run on a GPU, where steps are compiled by default; nothing in it runs."""

    def make(name: str, asked: bool | None = None) -> stages.Stage:
        found, wanted = replace(PROBE, device="cuda"), options(compile=asked, out=str(tmp_path))
        run = stages.Run(wanted, tmp_path, make_plan(wanted, found, COSTS, 100, 20), found)
        if name == "benchmark":
            return stages.benchmark_stage(run, WRITTEN, True)
        return stages.calibration_stage(run, choose_heads(wanted)[0], WRITTEN, 1000)

    return make


BEST = SimpleNamespace(nodes=8, dynamic=False, tau=2.5, step_ms=3.0, drafter="heads")


@pytest.mark.parametrize(
    ("name", "found"),
    [("find_tree", SimpleNamespace(best=BEST)), ("benchmark", {"methods": {"medusa": {"tau": 2.5}}})],
)
def test_eager_steps_will_do_where_compiling_fails_unless_it_was_asked_for(
    name: str, found: Any, gpu_stage: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = list[bool]()

    def worked(given: Any) -> Any:
        tried.append(given.settings.compile)
        if given.settings.compile:
            raise NotCompilableError("torch.compile fails")
        return found

    monkeypatch.setattr(stages, name, worked)
    stage = gpu_stage(name)
    assert "--compile" in stage.command
    figures = stage.work()
    assert (figures["tau"], figures["compiled"]) == (2.5, False)
    assert capsys.readouterr().err.strip().endswith("that of eager steps: torch.compile fails")
    with pytest.raises(RequestError, match="compile is not possible"):
        gpu_stage(name, asked=True).work()
    assert tried == [True, False, True]


def test_other_refusals_do_not_repeat_a_calibration(
    gpu_stage: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried, errors = list[bool](), [TooFewStepsError("too little text"), RequestError("the prompts leave no room")]

    def refused(given: Any) -> None:
        tried.append(given.settings.compile)
        raise errors.pop(0)

    monkeypatch.setattr(stages, "find_tree", refused)
    assert gpu_stage("calibrate").work() == {"refused": "too little text", "compiled": True}
    with pytest.raises(RequestError, match="the prompts leave no room"):
        gpu_stage("calibrate").work()
    assert tried == [True, True]
    assert "not compiled" not in capsys.readouterr().err


@pytest.mark.usefixtures("short_fit")
def test_the_steps_may_change_until_a_tree_is_found(
    command: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that an earlier version planned says nothing of compiled steps."""
    asked = list[bool]()

    def stop(run: stages.Run, *_: Any) -> None:
        asked.append(run.plan.compiled)
        raise RunError("stopped")

    monkeypatch.setattr(stages, "text_stage", stop)  # the first stage, so that no work is done
    assert main(command()) == 1
    state = tmp_path / "heads" / "fit.json"
    content = json.loads(state.read_text())
    del content["stages"]["plan"]["plan"]["compiled"], content["stages"]["plan"]["probe"]["not_compiled"]
    state.write_text(json.dumps(content))
    assert [main(command()), main(command("--compile")), main(command("--no-compile"))] == [1, 1, 1]
    assert asked == [False, False, True, False]

    for calibrated, planned, other, told in (
        (False, True, "--compile", "eager"),
        (True, False, "--no-compile", "compiled"),
    ):
        content["stages"]["plan"]["plan"]["compiled"] = planned  # eager steps may stand in for compiled ones
        content["stages"]["calibrate markov"] = {"refused": "too little text", "compiled": calibrated}
        state.write_text(json.dumps(content))
        capsys.readouterr()
        assert main(command(other)) == 2
        told = f"was calibrated with {told} steps; leave out {other}, or add --overwrite"
        assert told in capsys.readouterr().err


def test_the_plan_names_the_gpus_that_hold_the_run() -> None:
    """A model of 7 B parameters: its cache of 64 rows and 356 tokens takes 12 GB. And of 1.1 B: 22 kB a token."""
    large = replace(PROBE, parameters=6_738_415_616, model_bytes=13_476_831_232, hidden_size=4096, vocab_size=32000)
    large = replace(large, device="cuda", context=4096, cache_bytes=2 * 32 * 4096 * 2)
    own = heads_size(MedusaConfig(4096, 32000, num_heads=5, block="square", num_layers=1, lm_head="own"), 32000)
    plan = planned(large, [Costs(own, 5e-5)], 1000, 100, minutes=400.0)
    assert plan.decoding_bytes == 13_476_831_232 + 4 * own.trained + 64 * 356 * 524_288
    assert what_fits(plan) == "24 GB: too small; 40 GB: training and decoding; 80 GB: training and decoding"
    small = replace(large, parameters=1_100_048_384, model_bytes=2_200_096_768, hidden_size=2048, cache_bytes=22_528)
    plan = planned(small, [Costs(SIZE, 5e-5)], 1000, 100, minutes=400.0)
    assert what_fits(plan).startswith("24 GB: training and decoding; ")


def test_a_gpu_that_cannot_train_is_refused_before_any_text_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RequestError, match="device is cuda:1, but this process trains on cuda:0"):
        fit(options(load=LoadOptions(device="cuda:1")))


def test_the_docs_show_what_the_planner_computes_for_7b(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in docs/start.md: its assumptions are those of the page, and its lines come from the planner."""
    sizes = BackboneSizes(hidden_size=4096, vocab_size=32000, parameters=6_738_415_616)
    cached = 2 * 32 * 4096 * 2  # keys and values of 32 layers in bfloat16
    found = replace(
        PROBE,
        parameters=sizes.parameters,
        model_bytes=2 * sizes.parameters,
        hidden_size=4096,
        vocab_size=32000,
        context=4096,
        device="cuda",
        prompt_tokens=100,
        longest_prompt=300,
        read_seconds=1 / 20_000,
        prompt_seconds=1 / 20_000,
        step_seconds=0.025,
        wide_step_seconds=0.030,
        cache_bytes=cached,
        layers=32,
    )
    asked = options(model="org/model")
    (choice,) = choose_heads(asked)
    shape = choose(sizes, HeadsConfig(**choice.heads))
    config = MedusaConfig(4096, 32000, kind=choice.heads["kind"], **shape._asdict())
    size = heads_size(config, sizes.vocab_size)
    read = size.trained + 4 * 4096 * 32000  # the shared LM head, once for each head
    learning = found.read_seconds * (1 + HEAD_COST * read / sizes.parameters)
    costs = Costs(size, learning, *compiling(config, found))
    monkeypatch.setattr(plan_module, "free_bytes", lambda path: 10**12)
    plan = make_plan(asked, found, [costs], train_prompts=4900, test_prompts=100)
    page = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    print(*describe(plan, found, [choice], asked), sep="\n")
    for line in describe(plan, found, [choice], asked):
        assert line in page


# Command lines and states


def test_options_become_the_arguments_that_make_them() -> None:
    parser = OneLineParser()
    add_arguments(parser, BenchmarkOptions)
    models, prompts = Models(backbone="b", heads="demo", tree="auto"), Prompts(prompt=("a b", "c"))
    made = BenchmarkOptions(models=models, prompts=prompts, drafter=("heads", "ngram"), rounds=2, raw=False, lossy=True)
    assert read(BenchmarkOptions, parser.parse_args(as_arguments(made))) == made


def test_a_run_continues_only_with_its_own_request(tmp_path: Path) -> None:
    request = options(minutes=3.0).request("digest")
    FitState(tmp_path, request, command="medusa fit x --minutes 3").finish("plan", {"a": 1})
    assert FitState(tmp_path, request).stages == {"plan": {"a": 1}}
    for changed, told in (
        ({"minutes": 4.0}, "--minutes 3.0, not 4.0"),
        ({"ignore_eos": True}, "--ignore-eos False, not True"),
        ({"server_model": "lora"}, "--server-model None, not 'lora'"),
        ({"prompts": "other"}, "other prompts"),
    ):
        with pytest.raises(
            RequestError, match=f"holds a run with {told}; to continue it: medusa fit x --minutes 3; .*--overwrite"
        ):
            FitState(tmp_path, request | changed)


def test_calibration_reads_no_prompt_twice(tmp_path: Path) -> None:
    """Training answers some prompts several times, and copies make no figure more certain."""
    state, run = FitState(tmp_path, {}), stages.Run(options(), tmp_path, planned(), PROBE)
    state.stages["text"] = {"mean_tokens": 20}
    choice = choose_heads(options())[0]
    assert "--max-prompts 50" in stages.calibration_stage(run, choice, state, 50).command
    assert "--max-prompts 300" in stages.calibration_stage(run, choice, state, 2000).command, "6,000 tokens are enough"


@pytest.mark.parametrize("kind", [RequestError, RunError])
def test_the_error_of_a_stage_names_the_command_whose_options_it_advises(tmp_path: Path, kind: type[Exception]) -> None:
    def work() -> Any:
        raise kind("out/x exists; choose another output_dir or add --overwrite")

    run = stages.Run(options(output=Output(quiet=True)), tmp_path, planned(), PROBE)
    state = FitState(tmp_path, {})
    with pytest.raises(kind) as failed:
        stages.finish(stages.Stage("train markov", "2/4", "medusa train 'a b.yaml'", work), run, state)
    told = str(failed.value)
    assert told.startswith("stage train markov, which runs medusa train: out/x exists; choose another output_dir")
    assert told.endswith("; in medusa fit, --overwrite starts the whole run again")
    assert not state.stages


def test_a_run_whose_folder_was_moved_names_the_command_that_continues_it_there(tmp_path: Path) -> None:
    request = options(minutes=3.0).request("digest")
    FitState(tmp_path / "a", request, command="medusa fit x --output a --minutes 3").finish("plan", {"a": 1})
    moved = (tmp_path / "a").rename(tmp_path / "b c")
    with pytest.raises(RequestError, match=f"to continue it: medusa fit x --output '{moved}' --minutes 3; or"):
        FitState(moved, request | {"minutes": 4.0})


def test_a_run_of_an_earlier_version_continues_with_its_model_of_a_server(tmp_path: Path) -> None:
    request = options(server="http://here", server_model="lora").request("digest")
    held = {name: value for name, value in request.items() if name != "server_model"}
    FitState(tmp_path, held).finish("plan", {"a": 1})
    assert FitState(tmp_path, request).stages == {"plan": {"a": 1}}


@pytest.mark.usefixtures("short_fit")
def test_overwrite_deletes_an_earlier_run_only_once_the_new_one_is_planned(
    command: Callable[..., list[str]], place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "heads"
    FitState(folder, {"model": "other"}).finish("text", {})
    (folder / "config.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main([word.replace(place.backbone, "org/missing") for word in command("--overwrite")]) == 2
    assert "no backbone at org/missing" in capsys.readouterr().err
    assert main(command("--overwrite", "--plan")) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_interrupted_plan_does_not_promise_to_continue(
    command: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder still holds the earlier run, which the command without --overwrite would take as its own."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    FitState(tmp_path / "heads", {"model": "other"}).finish("text", {})
    monkeypatch.setattr("medusa.commands.fit.planned", interrupt)
    assert main(command("--overwrite")) == 130
    assert capsys.readouterr().err.endswith("medusa fit: interrupted\n")


def test_a_state_of_another_program_is_refused(tmp_path: Path) -> None:
    for content in ("[]", '{"request": {}}', '{"request": [], "stages": {}}'):
        (tmp_path / "fit.json").write_text(content)
        with pytest.raises(RequestError, match=r"fit\.json was not written by medusa fit"):
            FitState(tmp_path, {})


def test_the_output_folder_is_named_after_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    monkeypatch.chdir(tmp_path / "gpt")
    names = {"demo": "demo-heads", "org/model": "model-heads", "./a/b/": "b-heads", ".": "gpt-heads"}
    for model, name in names.items():
        assert options(model=model).folder == Path(name)


# A whole run


@pytest.fixture
def command(place: Place, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that makes the words of a short `medusa fit`, with more options if given."""
    letters = random.Random(0)
    questions = ["".join(letters.choices(LETTERS, k=6)) for _ in range(80)]
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(questions), encoding="utf-8")
    numbers = ["--minutes", "0.004", "--max-new-tokens", "24", "--threads", "1"]
    words = ["fit", place.backbone, "--prompts", str(file), "--output", str(tmp_path / "heads"), "--dtype", "float32"]
    words += numbers
    return lambda *further: [*words, *further]


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[str], None]], None]]:
    """Return a function that chooses what to call with the name of a stage before its work begins."""
    finish, act = stages.finish, list[Callable[[str], None]]()

    def watched(stage: stages.Stage, *rest: Any) -> None:
        finish(stage._replace(work=lambda: (act[-1](stage.name), stage.work())[1]), *rest)

    monkeypatch.setattr(stages, "finish", watched)
    return act.append


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("short_fit")
def test_a_run_that_is_stopped_in_every_stage(
    command: Callable[..., list[str]],
    place: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: Callable[[Callable[[str], None]], None],
) -> None:
    """SIGTERM in each stage; the same command continues, and no finished stage runs twice.

    Training is not repeated, even if the signal comes before the state is written."""
    folder, ran = tmp_path / "heads", list[str]()
    state, weights = folder / "fit.json", folder / "stages" / "markov" / WEIGHTS

    def run_until(stopped: str, name: str) -> None:
        ran.append(name)
        if name == stopped:
            stop()

    for stopped in ("text", "train markov", "calibrate markov", "benchmark"):
        before(partial(run_until, stopped))
        assert main(command()) == 143
        told = capsys.readouterr().err
        assert f"this command continues: medusa fit {place.backbone} --prompts" in told
        if stopped == "calibrate markov":
            content, written = json.loads(state.read_text()), weights.stat().st_mtime_ns
            figures = content["stages"].pop("train markov")
            state.write_text(json.dumps(content))
    assert json.loads(state.read_text())["stages"]["train markov"] == figures
    assert weights.stat().st_mtime_ns == written
    before(ran.append)
    report = tmp_path / "fit.json"
    assert main(command("--json", str(report))) == 0
    told = capsys.readouterr()
    first, again = ["text", "text", "train markov", "train markov", "calibrate markov"], ["train markov"]
    assert ran == [*first, *again, "calibrate markov", "benchmark", "benchmark"]

    figures = json.loads(report.read_text())
    assert figures["benchmark"]["methods"]["medusa"]["equal_to_plain"] == 1
    assert figures["headline"]["title"] in told.out
    assert f'Next: medusa generate {folder} "Once upon a time" --dtype float32\n' in told.out
    assert MedusaHeads.from_pretrained(folder).config.kind == "markov"
    assert {"report.html", "benchmark.json", "fit.json", "provenance.json"} <= {path.name for path in folder.iterdir()}

    ran.clear()
    assert main(command()) == 0
    assert "is finished; --overwrite starts again" in capsys.readouterr().err
    assert not ran


def test_several_processes_are_refused(command: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By every command that writes or decodes, before it loads anything."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    others = [["distill", "--backbone", "nowhere", "--prompts", "none", "--output", "x"], ["generate", "nowhere", "a"]]
    for words in (command(), *others):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert f"medusa {words[0]} runs as one process, and a launcher started several; start it without torchr" in told
    assert main(["info", "demo"]) == 0


def test_the_planned_room_on_the_disk_is_what_training_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights, arguments = 10**9, MedusaTrainingArguments(str(tmp_path), max_minutes=10)
    planned = weights * (1 + 3 * CHECKPOINTS)
    monkeypatch.setattr("train.checkpoints.free_bytes", lambda folder: planned)
    require_room(tmp_path, weights, arguments)
    monkeypatch.setattr("train.checkpoints.free_bytes", lambda folder: planned - 1)
    with pytest.raises(RequestError, match="but its disk has"):
        require_room(tmp_path, weights, arguments)


@pytest.mark.usefixtures("short_fit")
def test_the_plan_alone_writes_nothing(
    command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "plan.json"
    assert main(command("--plan", "--json", str(report))) == 0
    told = capsys.readouterr().out
    for word in ("model", "heads", "text", "training", "calibration", "benchmark", "memory", "disk", "total"):
        assert f"\n{word} " in f"\n{told}"
    assert json.loads(report.read_text())["plan"]["minutes"] == 0.004
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "questions.txt"}


@pytest.fixture
def models_at_each_load(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of models in memory whenever another one is loaded, while Python frees nothing that has cycles."""
    real, loaded, numbers = AutoModelForCausalLM.from_pretrained, list[ReferenceType[Any]](), list[int]()

    def load(*args: Any, **keywords: Any) -> Any:
        numbers.append(sum(model() is not None for model in loaded))
        found = real(*args, **keywords)
        loaded.append(ref(found[0]))
        return found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    gc.disable()
    yield numbers
    gc.enable()


def test_a_question_is_the_same_in_every_form() -> None:
    """Else the model would learn from a prompt that is set aside in another form."""
    forms: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": "a", "completion": "b", "category": "x"},
        {"turns": ["a"]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    with_system: list[dict[str, Any]] = [
        {"prompt": "a", "system": "s"},
        {"turns": ["a"], "system": "s"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
    ]
    others: list[dict[str, Any]] = [
        {"turns": ["a", "b"]},
        {"text": "a"},
        {"input_ids": [1, 2], "prompt_tokens": 1},
        {"input_ids": [2]},
        {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    keys = [{asked(parse_record(row, "here")) for row in rows} for rows in (forms, with_system)]
    assert [*map(len, keys)] == [1, 1]
    assert len(keys[0] | keys[1] | {asked(parse_record(row, "here")) for row in others}) == 2 + len(others)


@pytest.mark.parametrize("purpose", ["transformers", "vllm"])
def test_a_server_gets_the_speedup_of_the_heads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purpose: str
) -> None:
    """N-grams, which a calibration may choose, are not exported."""
    run = stages.Run(options(purpose=purpose, out=str(tmp_path)), tmp_path, planned(), PROBE)
    words = stages.benchmark_stage(run, WRITTEN, False).command.split()
    assert ("--drafter" in words) == (purpose == "vllm")
    points = [CalibrationPoint(8, [[0]], 1.2, 2.0), CalibrationPoint(11, [], 1.9, 1.0, drafter="ngram")]
    found = Calibration(points, 1, [1.0], {}, RecordedTexts(9), chosen_tree=0)
    monkeypatch.setattr(stages, "find_tree", lambda options: found)
    stage = stages.calibration_stage(run, choose_heads(run.options)[0], WRITTEN, 1000)
    assert stage.work()["drafter"] == ("heads" if purpose == "vllm" else "ngram")


@pytest.mark.full
@pytest.mark.usefixtures("short_fit")
def test_heads_for_a_server(
    command: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    models_at_each_load: list[int],
) -> None:
    """The run for the second server is that for the first one up to the export, so it continues there."""
    for server, loads in (("vllm", 5), ("sglang", 0)):
        models_at_each_load.clear()
        assert main(command("--for", server)) == 0
        assert models_at_each_load == [0] * loads, "the memory of a GPU may hold the model only once"
        told = capsys.readouterr().out
        assert "Serve: " in told
        assert str(tmp_path / "heads" / server) in told
        layer = json.loads((tmp_path / "heads" / server / "config.json").read_text())
        assert layer["architectures"] == ["LlamaForCausalLMEagle3"]
        assert layer["eagle_config"]["use_aux_hidden_state"] is True, "the form of published layers"
        assert MedusaHeads.from_pretrained(tmp_path / "heads").config.servable
        state = json.loads((tmp_path / "heads" / "fit.json").read_text())
        state["request"]["purpose"] = "sglang"
        del state["stages"]["export"], state["finished"]
        (tmp_path / "heads" / "fit.json").write_text(json.dumps(state))
