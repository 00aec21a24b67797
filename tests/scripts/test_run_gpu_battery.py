"""scripts/run_gpu_battery.py: everything runs in tiny sizes on a CPU, and what fails hides nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import load_script

REPO = Path(__file__).resolve().parents[2]
script = load_script("run_gpu_battery")


def battery(output: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "scripts" / "run_gpu_battery.py"), "--output", str(output), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=output.parent)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_battery_runs_on_a_cpu(tmp_path: Path) -> None:
    done = battery(tmp_path / "b", "--quick", "--device", "cpu", "--minutes", "14")
    outcome = json.loads((tmp_path / "b" / "battery.json").read_text())
    states = {name: (stage["status"], stage.get("error")) for name, stage in outcome["stages"].items()}
    assert states == dict.fromkeys(script.STAGES, ("done", None)), done.stdout + done.stderr
    assert done.returncode == 0
    figures = {name: stage["figures"] for name, stage in outcome["stages"].items()}
    assert [point["nodes"] for point in figures["curves"]["points"]] == list(script.QUICK.nodes)
    assert "compiled_ms" in figures["curves"]["compiled"][0], figures["curves"]["compiled"]
    assert figures["benchmark"]["eager"]["methods"]["medusa"]["equal_to_plain"] == 1.0
    assert figures["verify"]["float32"]["passed"] is True
    assert {row["backend"] for row in figures["losses"]["rows"]} == {"plain", "chunked"}
    for name in ("step", "kinds", "batches"):
        assert not any("error" in found for found in figures[name].values()), figures[name]
    assert (figures["fsdp"]["blocks"], figures["fsdp"]["largest_difference"]) == (2, 0.0)
    told = (tmp_path / "b" / "battery.md").read_text()
    for title in ("T(n)", "Speed, eager", "Equality", "Kinds of heads", "Batches", "Losses"):
        assert f"## {title}" in told
    assert f"{figures['benchmark']['eager']['methods']['medusa']['tau']:.3f}" in told
    assert (tmp_path / "b" / "battery.html").read_text().count("<svg role=") == 6
    reports = [path.stat().st_size for path in (tmp_path / "b").glob("battery.*")]
    assert len(reports) == 3
    assert sum(reports) < 16_000_000


def stages(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Stages of the test's own instead of processes."""

    def run_stage(args: Any, name: str, before: dict[str, Any], seconds: float) -> dict[str, Any]:
        return {"about": "", "seconds": 1.0} | found.get(name, {"status": "done", "figures": {}})

    monkeypatch.setattr(script, "run_stage", run_stage)


def test_a_stage_alone_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["run_gpu_battery", "--output", str(tmp_path), "--quick", "--device", "cpu", "--stage"]
    stages(monkeypatch, curves={"status": "failed", "error": "out of memory"})
    monkeypatch.setattr(sys, "argv", [*argv, "curves", "fsdp"])
    assert script.main() == 1
    stages(monkeypatch, curves={"status": "done", "figures": {}})
    monkeypatch.setattr(sys, "argv", [*argv, "curves"])
    assert script.main() == 0
    outcome = json.loads((tmp_path / "battery.json").read_text())
    assert {name: stage["status"] for name, stage in outcome["stages"].items()} == {"curves": "done", "fsdp": "done"}


class Args:
    device, quick = "cpu", True

    def __init__(self, output: Path) -> None:
        self.output = output
        for folder in ("stages", "logs"):
            (output / folder).mkdir()


def test_a_stage_that_fails_says_so_and_names_its_last_words(tmp_path: Path) -> None:
    """`heads` without a backbone: its process ends with an error."""
    found = script.run_stage(Args(tmp_path), "heads", {"backbone": {"status": "done"}}, 120)
    assert found["status"] == "failed"
    assert "medusa distill ended with status 2" in found["error"]


def test_a_stage_whose_needs_failed_is_not_tried(tmp_path: Path) -> None:
    lacking = script.run_stage(Args(tmp_path), "kinds", {"heads": {"status": "failed"}}, 60)
    assert (lacking["status"], lacking["error"]) == ("skipped", "needs heads")


def test_a_stage_is_ended_at_its_limit_with_its_figures_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that writes figures and then sleeps for an hour, with a child that does so too."""
    stub = tmp_path / "stub.py"
    (tmp_path / "out").mkdir()
    place = script.figures_file(tmp_path / "out", "fsdp")
    stub.write_text(
        "import pathlib, subprocess, sys, time\n"
        f"pathlib.Path({str(place)!r}).write_text('{{\"blocks\": 3}}')\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "time.sleep(3600)\n"
    )
    monkeypatch.setattr(script, "__file__", str(stub))
    start = time.monotonic()
    found = script.run_stage(Args(tmp_path / "out"), "fsdp", {"backbone": {"status": "done"}}, 10.0)
    assert time.monotonic() - start < 60
    assert (found["status"], found["figures"]) == ("cut off", {"blocks": 3})
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    if Path("/proc/self/stat").is_file():
        assert not child.exists() or child.read_text().split()[2] == "Z", "its child went on"


def test_no_time_is_no_silence(tmp_path: Path) -> None:
    found = script.run_stage(Args(tmp_path), "curves", {}, 3.0)
    assert (found["status"], "--stage" in found["error"]) == ("skipped", True)


def test_full_sizes_are_refused_without_a_gpu(tmp_path: Path) -> None:
    done = battery(tmp_path / "b", "--device", "cpu")
    assert done.returncode == 2
    assert "--quick" in done.stderr


def test_figures_that_fail_leave_the_others() -> None:
    assert script.attempt("a", lambda: 1.5) == {"a": 1.5}
    assert script.attempt(None, lambda: {"b": 2}) == {"b": 2}
    assert script.attempt("a", lambda: 1 / 0) == {"a_error": "ZeroDivisionError: division by zero"}
    assert script.ratios([{"nodes": 1, "eager_ms": 2.0}, {"nodes": 8, "eager_ms": 3.0, "graph_ms": 1.0}]) == {
        "eager": {"1": 1.0, "8": 1.5}
    }


def test_a_run_cut_short_still_has_its_tables() -> None:
    """What GPUs give and CPUs do not, errors, and stages that are missing."""
    curves = {
        "parameters": 8e9,
        "dtype": "torch.bfloat16",
        "context": 512,
        "points": [
            {"nodes": 1, "eager_ms": 20.0, "graph_ms": 5.0},
            {"nodes": 64, "eager_ms": 21.0, "graph_ms_error": "no"},
        ],
        "compiled": [{"nodes": 1, "error": "no compiler"}],
    }
    machine = {"gpu": "a GPU", "processor": "p", "torch": "2", "transformers": "5", "python": "3"}
    stage = {"status": "cut off", "seconds": 130.0, "about": "T(n)", "error": "not done", "figures": curves}
    outcome = {"machine": machine, "date": "d", "commit": None, "quick": False, "stages": {"curves": stage}}
    told = script.markdown(outcome)
    assert "| 64 | 21.000 | no | 1.05 |  |" in told
    assert "| 1 | no compiler | no compiler | no compiler |" in told
    assert "8 B parameters" in told
    script.page(outcome)
