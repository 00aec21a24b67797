"""scripts/gpu_battery: every stage runs at toy size on a CPU, every figure is kept, and no stage harms another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from medusa.config import KINDS
from medusa.errors import RequestError
from scripts.gpu_battery import __main__ as battery
from scripts.gpu_battery import curves, models, run
from scripts.gpu_battery.__main__ import CALL_SECONDS, STAGES
from scripts.gpu_battery.run import FULL, TOY, Run, Stage, run_stage

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    """The stages run from the sources: the packages are found because the command runs in the repository."""
    command = [sys.executable, "-m", "scripts.gpu_battery", "--rehearse", "--output", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO, env=environment)
    figures = run.read_figures(tmp_path)
    states = {name: (figures[name][-1]["status"], figures[name][-1].get("error")) for name in STAGES}
    assert states == dict.fromkeys(STAGES, ("done", None)), done.stdout + done.stderr
    assert done.returncode == 0
    assert [figure["error"] for kept in figures.values() for figure in kept if "error" in figure] == []

    timed = [figure for figure in figures["curves"] if "ms" in figure]
    points = 2 * len(TOY.kv_heads) * len(TOY.contexts) * len(TOY.batches) * len(TOY.nodes)
    assert len(timed) == points
    assert [figure["how"] for figure in timed] == ["compiled"] * (points // 2) + ["eager"] * (points // 2)
    assert all(figure["launches"] > 0 and "attention" in figure["attention"] for figure in timed)
    assert {figure["backend"] for figure in figures["losses"] if "backend" in figure} == {"plain", "chunked"}
    methods = {figure["method"]: figure for figure in figures["benchmark"] if "method" in figure}
    assert {"plain, compiled", "generate, eager", "generate, static cache", "generate, compiled"} < set(methods)
    assert all(figure["equal_texts"] == "2 of 2" for figure in methods.values())
    assert methods["medusa, 7 nodes, compiled"]["tau"] > 1
    assert [figure["passed"] for figure in figures["verify"] if "passed" in figure] == [True, True]
    for kind in KINDS:
        assert any(figure.get("method", "").startswith(f"{kind}, ") for figure in figures["kinds"])

    told = (tmp_path / battery.REPORT).read_text()
    assert all(f"## {name}\n" in told for name in STAGES)
    assert "T(n)/T(1)" in told
    assert f"{methods['medusa, 7 nodes, compiled']['tau']:.4g}" in told


def test_a_call_has_time_for_its_stages() -> None:
    for call in (1, 2, 3):
        assert sum(stage.seconds for stage in STAGES.values() if stage.call == call) <= CALL_SECONDS < 9 * 60
    for stage in STAGES.values():
        assert all(STAGES[name].call <= stage.call for name in stage.needs)


def test_the_most_important_cases_come_first() -> None:
    assert FULL.nodes[0] == 64
    assert next(iter(FULL.trees)) == "64 nodes"
    assert (FULL.prompts, FULL.prompt_tokens) == (6, 64)
    assert set(FULL.kv_heads.values()) == {8, FULL.curve_shape["num_attention_heads"]}  # one GQA and one MHA model
    for nodes in (2, 16, 64):
        assert curves.tree_of(nodes).num_nodes == nodes


# -- stages made by the tests


def put_in(monkeypatch: pytest.MonkeyPatch, function: object, needs: tuple[str, ...] = ()) -> None:
    monkeypatch.setitem(STAGES, "curves", Stage(function, 1, 1, needs))  # type: ignore[arg-type]


def run_toy(tmp_path: Path, seconds: float = 60) -> run.Figure:
    return run_stage("curves", STAGES["curves"], tmp_path, True, "cpu", seconds)


def sleeping(stage: Run) -> None:
    """Keep a figure, then sleep for an hour, as a child process does."""
    stage.keep(ms=1.5)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    stage.keep(child=child.pid)
    time.sleep(3600)


def test_a_stage_ends_at_its_limit_and_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, sleeping)
    assert run_toy(tmp_path, seconds=3)["status"] == "cut off"
    start, first, second, end = run.read_figures(tmp_path)["curves"]
    assert (start["event"], first["ms"], end["event"]) == ("start", 1.5, "end")
    place = Path(f"/proc/{second['child']}/stat")
    if Path("/proc/self/stat").is_file():
        assert not place.exists() or place.read_text().split()[2] == "Z", "its child went on"


def failing(stage: Run) -> None:
    stage.keep(ms=1.5)
    raise ValueError("out of luck")


def losing_all(stage: Run) -> None:
    for nodes in (64, 16):
        with stage.attempt(nodes=nodes):
            raise ValueError(f"no {nodes}")


def losing_some(stage: Run) -> None:
    losing_all(stage)
    with stage.attempt(nodes=8):
        stage.keep(nodes=8, ms=2.5)


def losing_all_but_a_note(stage: Run) -> None:
    stage.keep(ms=2.5)  # as the time that the stage `heads` took to write its text
    with stage.attempt(outer=True):  # as `Bench.measure_heads` around `Bench.measure`
        losing_all(stage)


def verifying(stage: Run) -> None:
    """Verify with float32 only: bfloat16 crashes."""
    found = {"greedy": {"equal": 2, "prompts": 2, "rounding_ties": 0}, "passed": True}

    def crash_in_bfloat16(command: str, *words: object, result: str) -> dict[str, object]:
        if "bfloat16" in words:
            raise ValueError("no bfloat16")
        return found

    with patch.object(stage, "medusa", crash_in_bfloat16):
        models.verify(stage)


@pytest.mark.parametrize(
    ("function", "status", "error"),
    [
        (failing, "failed", "ValueError: out of luck"),
        (losing_all, "failed", "RuntimeError: ValueError: no 16"),
        (losing_all_but_a_note, "failed", "RuntimeError: ValueError: no 16"),
        (verifying, "failed", "RuntimeError: ValueError: no bfloat16"),
        (losing_some, "done", None),
    ],
)
def test_errors_are_reported_and_lose_no_figure(
    function: object, status: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(monkeypatch, function)
    outcome = run_toy(tmp_path)
    assert (outcome["status"], outcome.get("error")) == (status, error)
    figures = run.read_figures(tmp_path)["curves"]
    assert any({"ms", "passed"} & set(figure) for figure in figures) == (function is not losing_all)


def test_repeating_a_stage_replaces_only_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append(tmp_path, {"stage": "losses", "ms": 3.0})
    put_in(monkeypatch, failing)
    run_toy(tmp_path)
    put_in(monkeypatch, losing_some)
    run_toy(tmp_path)
    figures = run.read_figures(tmp_path)
    assert [figure["ms"] for figure in figures["curves"] if "ms" in figure] == [2.5]
    assert figures["losses"] == [{"stage": "losses", "ms": 3.0}]


def test_a_stage_whose_needs_failed_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, losing_some, needs=("heads",))
    assert run_toy(tmp_path) == {"seconds": 0, "status": "skipped", "error": "needs heads"}
    run.append(tmp_path, {"stage": "heads", "error": "no backbone"})
    assert run_toy(tmp_path)["status"] == "skipped"
    run.append(tmp_path, {"stage": "heads", "kind": "medusa"})
    run.append(tmp_path, {"stage": "heads", "event": "end", "status": "cut off"})
    assert run_toy(tmp_path)["status"] == "done", "what was made before the cut is enough"


def test_full_sizes_need_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="--rehearse"):
        battery.main(["--call", "1", "--output", str(tmp_path)])


def test_figures_carry_the_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script in place of nvidia-smi that reports no power, as some GPUs do."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 1980, 2619, '[N/A]', 41\nsleep 0.3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    stage = Run("curves", tmp_path, TOY, "cpu", 60)
    until = time.monotonic() + 20
    while not stage.clocks and time.monotonic() < until:
        time.sleep(0.01)
    stage.keep(ms=1.0)
    (figure,) = run.read_figures(tmp_path)["curves"]
    assert figure == {
        "stage": "curves",
        "ms": 1.0,
        "clocks.sm": 1980.0,
        "clocks.mem": 2619.0,
        "temperature.gpu": 41.0,
    }


def test_an_aborted_run_has_a_report(tmp_path: Path) -> None:
    about = {"model": "MHA", "how": "compiled", "context": 2000, "batch": 1}
    run.append(tmp_path, {"stage": "machine", "gpu": "a GPU", "torch": "2", "date": "today"})
    run.append(tmp_path, {"stage": "curves", "event": "start"})
    run.append(tmp_path, {"stage": "curves", **about, "nodes": 64, "ms": 7.5, "clocks.sm": 1980.0})
    run.append(tmp_path, {"stage": "curves", **about, "nodes": 1, "ms": 5.0})
    run.append(tmp_path, {"stage": "curves", **about, "nodes": 16, "error": "out of memory"})
    assert battery.main(["--report", "--output", str(tmp_path)]) == 0
    told = (tmp_path / battery.REPORT).read_text()
    assert "a GPU" in told
    assert "| curves | interrupted |" in told
    assert "| MHA | compiled | 2000 | 1 | 64 | 7.5 | 1980 | 1.5 |  |" in told
    assert "out of memory" in told
    assert json.loads((tmp_path / run.FIGURES).read_text().splitlines()[0])["gpu"] == "a GPU"
