"""Signals end a run after its step with a checkpoint, and a sudden end loses little; both runs can be continued."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState

from medusa.__main__ import main
from medusa.commands.train import command_to_continue
from medusa.errors import Interrupted, RequestError
from medusa.heads.independent import MedusaHeads
from tests.helpers import at_once, random_ids
from tests.train.processes import as_two_ranks, forked, forked_command
from tests.train.recipes import recipes, run, same
from train.checkpoints import RESCUE, remove_rescues, whole_checkpoints
from train.recipe import parse_recipe
from train.rescue import SAVE_TIMES, RescueClock
from train.run import train
from train.trainer import MedusaTrainer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends signals to forked processes")
STEPS = 14


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    rows = [{"input_ids": random_ids(20, seed=seed)} for seed in range(20)]
    usual = {"max_steps": STEPS, "logging_steps": 3, "seed": 3, "per_device_train_batch_size": 2}  # 10 steps a pass
    return recipes(tmp_path_factory.mktemp("models"), rows, 20, **usual)


class At(TrainerCallback):
    """Call a function at the end of one step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: TrainerState, *rest: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Make all later trainers call a function at the end of one step."""
    init = MedusaTrainer.__init__

    def choose(step: int, act: Callable[[], object]) -> None:
        monkeypatch.setattr(
            MedusaTrainer,
            "__init__",
            lambda self, *args, **kwargs: init(self, *args, **{"callbacks": [At(step, act)]} | kwargs),
        )

    return choose


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def lines_of_the_log(content: dict[str, Any], **options: Any) -> list[dict[str, float]]:
    """Train, and return the lines of the log that have a loss."""
    kept: list[dict[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.run.draw_curves", lambda log, path: kept.extend(line for line in log if "loss" in line))
        train(parse_recipe(content, "test"), **options)
    return kept


@pytest.fixture(scope="module")
def whole(recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """The folder and the log of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    return folder, lines_of_the_log(recipe(folder))


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 10), (signal.SIGTERM, STEPS)])
def test_a_signal_ends_a_run_after_its_step_and_the_run_resumes_bit_for_bit(
    recipe: Any, whole: Any, at: Any, tmp_path: Path, number: int, step: int
) -> None:
    stopped, (uninterrupted, expected) = tmp_path / "stopped", whole
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    at(step, send(number))
    with pytest.raises(Interrupted) as stop:
        run(recipe(stopped))
    checkpoint = stopped / RESCUE / f"checkpoint-{step}" if step < STEPS else stopped / f"checkpoint-{step}"
    assert (stop.value.number, stop.value.saved) == (number, f"saved {checkpoint}")
    assert whole_checkpoints(stopped) == [checkpoint]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    at(0, lambda: None)
    assert lines_of_the_log(recipe(stopped), resume=True) == expected
    assert same(uninterrupted, stopped)
    assert not (stopped / RESCUE).exists()


def test_the_command_prints_the_line_that_continues(recipe: Any, tmp_path: Path) -> None:
    """With a process of its own, as started by a user, and its line typed again."""
    content = recipe(tmp_path / "out", max_steps=4000)
    path = tmp_path / "my recipe.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    reading, writing = os.pipe()
    process = forked_command(["train", str(path), "--overwrite", "training.seed=5"], writing, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as lines:
        seen = ""
        while not re.search(r"step +\d", seen):
            line = lines.readline()
            assert line, seen
            seen += line
        os.kill(process, signal.SIGTERM)
        told = lines.read()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGTERM, told
    step = re.search(r"medusa train: interrupted; saved .*rescue/checkpoint-(\d+); continue with: medusa (.*)", told)
    assert step is not None, told
    assert step[2] == f"train '{path}' training.seed=5 --resume"
    assert "Traceback" not in told
    assert main(["train", str(path), "training.seed=5", "--resume", f"training.max_steps={int(step[1]) + 1}"]) == 0


def test_a_second_signal_ends_at_once_with_the_last_checkpoint(recipe: Any, at: Any, tmp_path: Path) -> None:
    def twice() -> None:
        send(signal.SIGINT)()
        send(signal.SIGTERM)()

    at(3, twice)
    with pytest.raises(Interrupted) as stop:
        run(recipe(tmp_path, save_steps=2))
    assert (stop.value.number, stop.value.saved) == (signal.SIGTERM, f"{tmp_path / 'checkpoint-2'} is whole")
    assert whole_checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]


@pytest.mark.parametrize(
    "place",
    [
        "build.load_dataset",
        pytest.param("run.FeatureCache.write", marks=pytest.mark.full),
        "run.measure_perplexities",
    ],
)
def test_a_signal_outside_training_ends_at_once_and_the_run_continues(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def changed(output: Path) -> dict[str, Any]:
        content = recipe(output, max_steps=1, save_strategy="no")
        if "FeatureCache" in place:
            content["cache_features"] = True
        if "perplexities" in place:
            content["adapter"] = {"rank": 2, "modules": ["v_proj"]}
        return content

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(changed(whole))

    def interrupted(*args: Any, **kwargs: Any) -> None:
        send(signal.SIGTERM)()
        pytest.fail("the signal waited")

    with monkeypatch.context() as patch:
        patch.setattr(f"train.{place}", interrupted)
        with pytest.raises(Interrupted) as stop:
            run(changed(stopped))
    trained = "perplexities" in place
    assert stop.value.saved == (f"{stopped / RESCUE / 'checkpoint-1'} is whole" if trained else "")
    assert not (stopped / "medusa_lm_head.safetensors").exists()
    assert run(changed(stopped), resume="auto").steps == 1
    assert same(whole, stopped)


def test_a_failure_that_a_signal_caused_elsewhere_is_an_interruption(recipe: Any, at: Any, tmp_path: Path) -> None:
    """For example, the workers that read the data got the signal, too."""

    def broken() -> None:
        send(signal.SIGTERM)()
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    at(3, broken)
    with pytest.raises(Interrupted) as stop:
        run(recipe(tmp_path, save_steps=2))
    assert stop.value.saved == f"{tmp_path / 'checkpoint-2'} is whole"


def test_signals_with_workers_that_read_the_data(recipe: Any, at: Any, tmp_path: Path) -> None:
    at(2, lambda: os.killpg(os.getpgid(0), signal.SIGINT))  # as a terminal does

    def work() -> None:
        os.setpgid(0, 0)
        with pytest.raises(Interrupted, match="rescue/checkpoint-2"):
            run(recipe(tmp_path / "out", dataloader_num_workers=1))

    process = forked(work, tmp_path / "error")
    assert os.waitpid(process, 0)[1] == 0, (tmp_path / "error").read_text()


def test_other_threads_get_no_handlers(recipe: Any, tmp_path: Path) -> None:
    (figures,) = at_once(lambda _: run(recipe(tmp_path, max_steps=1)))
    assert figures.steps == 1


@pytest.mark.full
def test_two_processes_end_at_the_same_step(recipe: Any, at: Any, tmp_path: Path) -> None:
    """Only one of them gets the signal."""
    out = tmp_path / "out"

    def work() -> None:
        at(2, send(signal.SIGTERM) if os.environ["RANK"] == "1" else lambda: None)
        with pytest.raises(Interrupted, match=r"rescue/checkpoint-2$") as stop:
            run(recipe(out))
        assert stop.value.number == signal.SIGTERM

    as_two_ranks(work, tmp_path)
    assert whole_checkpoints(out) == [out / RESCUE / "checkpoint-2"]
    as_two_ranks(lambda: run(recipe(out, max_steps=3), resume=True), tmp_path)
    assert MedusaHeads.from_pretrained(out).config.num_heads == 2


@pytest.mark.parametrize(
    ("typed", "resumable", "printed"),
    [
        ("medusa train a.yaml", True, "medusa train a.yaml --resume"),
        ("medusa train a.yaml", False, "medusa train a.yaml"),
        ("medusa train a.yaml --overwrite 'x=[1, 2]'", True, "medusa train a.yaml 'x=[1, 2]' --resume"),
        ("medusa train a.yaml --overwrite", False, "medusa train a.yaml --overwrite"),
        ("medusa train --resume a.yaml", True, "medusa train --resume a.yaml"),
    ],
)
def test_the_command_that_continues(typed: str, resumable: bool, printed: str) -> None:
    assert command_to_continue(typed, resumable) == printed


# --- the clock -------------------------------------------------------------------------------------------------------


def test_the_clock_waits_for_the_minutes_or_for_twenty_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("train.rescue.time.monotonic", lambda: now[0])
    clock = RescueClock(minutes=1.0)
    now[0] += 59
    assert not clock.due()
    now[0] += 1
    assert clock.due()
    clock.saved(seconds=2.0)
    assert clock.interval == 60
    clock.saved(seconds=5.0)
    now[0] += SAVE_TIMES * 5 - 1
    assert not clock.due()
    now[0] += 1
    assert clock.due()
    assert not RescueClock(minutes=0).due()


def test_a_killed_run_loses_only_the_time_since_its_last_rescue(
    recipe: Any, whole: Any, at: Any, tmp_path: Path
) -> None:
    killed, (uninterrupted, expected) = tmp_path / "killed", whole

    def work() -> None:
        at(12, send(signal.SIGKILL))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RescueClock, "due", lambda self: True)
            run(recipe(killed))

    process = forked(work, tmp_path / "error")
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    assert whole_checkpoints(killed) == [killed / RESCUE / "checkpoint-11"], "only the last one is kept"
    assert lines_of_the_log(recipe(killed), resume=True) == expected
    assert same(uninterrupted, killed)
    assert [path.name for path in whole_checkpoints(killed)] == [f"checkpoint-{STEPS}"]


def test_rescues_come_by_the_clock_and_leave_the_other_checkpoints_alone(recipe: Any, at: Any, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    at(11, lambda: seen.append([str(path.relative_to(tmp_path)) for path in whole_checkpoints(tmp_path)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RescueClock, "due", lambda self: True)
        run(recipe(tmp_path, max_steps=12, save_steps=3, save_total_limit=2))
    assert seen == [["checkpoint-6", "checkpoint-9", "rescue/checkpoint-10"]]
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-12"]


def test_rescues_can_be_resumed_even_if_other_checkpoints_hold_the_heads_only(
    recipe: Any, at: Any, tmp_path: Path
) -> None:
    at(2, send(signal.SIGTERM))
    with pytest.raises(Interrupted):
        run(recipe(tmp_path, save_steps=2, save_only_model=True))
    at(0, lambda: None)
    assert run(recipe(tmp_path, save_steps=2, save_only_model=True, max_steps=3), resume=True).steps == 3


# --- runs that had ended ---------------------------------------------------------------------------------------------


def test_a_run_that_had_ended_makes_no_more_steps(recipe: Any, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run(recipe(whole, max_steps=1))
    (whole / "medusa_lm_head.safetensors").rename(tmp_path / "kept.safetensors")
    figures = run(recipe(whole, max_steps=1), resume=True)
    assert figures.steps == 1
    assert (whole / "medusa_lm_head.safetensors").read_bytes() == (tmp_path / "kept.safetensors").read_bytes()
    assert run(recipe(whole, max_steps=2), resume=True).steps == 2


def test_auto_starts_continues_and_reports_what_is_done(
    recipe: Any, at: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at(1, send(signal.SIGTERM))
    with pytest.raises(Interrupted):
        run(recipe(tmp_path, max_steps=2), resume="auto")
    at(0, lambda: None)
    figures = run(recipe(tmp_path, max_steps=2), resume="auto")
    assert figures.steps == 2
    remove_rescues(tmp_path)
    monkeypatch.setattr("train.run.load", lambda *args: pytest.fail("trained again"))
    capsys.readouterr()
    stored = json.loads((tmp_path / "provenance.json").read_text())
    stored["config"]["heads"] |= {"rank": None, "window": None}  # as in files of earlier versions
    del stored["config"]["heads"]["feature_layers"], stored["config"]["revision"]
    (tmp_path / "provenance.json").write_text(json.dumps(stored))
    assert run(recipe(tmp_path, max_steps=2), resume="auto") == figures
    assert "holds the trained heads of this recipe already" in capsys.readouterr().err
    for checkpoint in whole_checkpoints(tmp_path):
        (checkpoint / "trainer_state.json").unlink()
    with pytest.raises(RequestError, match="exists already"):
        run(recipe(tmp_path, seed=4), resume="auto")


def test_the_last_loss_is_that_of_the_last_line(recipe: Any, whole: Any, tmp_path: Path) -> None:
    """14 steps with a line after every 3: the last line is that of 2 steps."""
    every = lines_of_the_log(recipe(tmp_path, logging_steps=1))
    folder, lines = whole
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 14]
    for line, first in zip(lines, (0, 3, 6, 9, 12), strict=True):
        steps = every[first : line["step"]]
        assert line["loss"] == pytest.approx(sum(one["loss"] for one in steps) / len(steps))
    result = json.loads((folder / "provenance.json").read_text())["result"]
    assert result["loss"] == pytest.approx(lines[-1]["loss"])
    assert result["mean_loss"] == pytest.approx(sum(one["loss"] for one in every) / STEPS)
    assert result["loss"] < result["mean_loss"]
