"""scripts/gpu_battery: every stage runs at toy size on a CPU, every figure is kept, and no stage harms another."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from decode.texts import Result
from medusa.commandline import exit_status
from medusa.commands.fit.state import FitState
from medusa.errors import RequestError
from medusa.files import ASSETS
from medusa.heads import KINDS
from medusa.records.sources import read_records
from script_tools import write_jsonl
from scripts.gpu_battery import __main__ as battery
from scripts.gpu_battery import bench, chat, clocks, curves, run
from scripts.gpu_battery.__main__ import BATTERY_SECONDS, STAGES
from scripts.gpu_battery.report import REPORT
from scripts.gpu_battery.run import TOY, Run, Stage, run_stages
from tests.train.processes import forked_command

REPO = Path(__file__).resolve().parents[2]


def rehearsing(words: Sequence[str]) -> int:
    return exit_status("gpu_battery", lambda: battery.main(["--rehearse", *words]))


def rehearsed(output: Path, monkeypatch: pytest.MonkeyPatch, stages: Collection[str]) -> dict[str, list[run.Figure]]:
    """Rehearse some stages, in a copy of this process, as the battery changes its environment; return their figures."""
    monkeypatch.setattr("decode.bench.report.page.themed_svg", lambda *picture: "")  # which take longer than the rest
    sources = {"stdlib": REPO / "decode", "purelib": Path(torch.__file__).parent / "nn"}  # of all those of this machine
    monkeypatch.setattr("sysconfig.get_paths", lambda: sources)
    with (output / "told").open("w") as file:
        words = ["--output", str(output), "--stage", *stages]
        process = forked_command(words, file.fileno(), file.fileno(), rehearsing)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    figures = run.read_figures(output)
    states = {name: (figures[name][-1]["status"], figures[name][-1].get("error")) for name in stages}
    assert states == dict.fromkeys(stages, ("done", None)), (output / "told").read_text()
    assert status == 0
    assert [figure["error"] for kept in figures.values() for figure in kept if "error" in figure] == []
    for name in {*TOY.shapes} & {*stages}:
        timed = [figure for figure in figures[name] if "ms" in figure]
        assert [(figure["how"], figure["batch"], figure["nodes"]) for figure in timed] == [
            ("compiled", 2, 8),
            ("compiled", 2, 1),
            ("eager", 2, 8),
            ("eager", 2, 1),
        ]
        assert all(figure["launches"] > 0 and "attention" in figure["attention"] for figure in timed)
    page = (output / REPORT).read_text()
    assert all(f"## {name}\n" in page for name in stages)
    assert ("T(n)/T(1)" in page) == bool({*TOY.shapes} & {*stages})
    return figures


@pytest.mark.full
def test_the_first_stages_time_steps_and_make_a_backbone_and_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trains heads on the text and measures them is rehearsed with `--full`."""
    figures = rehearsed(tmp_path, monkeypatch, ["backbone", "MHA", "text"])
    assert figures["text"][1]["texts"] == TOY.texts


@pytest.mark.full
def test_the_rehearsal_runs_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = rehearsed(tmp_path, monkeypatch, STAGES)
    methods = {figure["method"]: figure for figure in figures["benchmark"] if "method" in figure}
    assert {"plain, compiled", "generate, eager", "generate, static cache", "generate, compiled"} < set(methods)
    assert all(figure["equal_texts"] == "1 of 1" for figure in methods.values())
    assert methods["markov, 7 nodes, compiled"]["tau"] > 1
    compared, _ = [figure for figure in figures["benchmark"] if "compared" in figure]
    forwards = compared["forward_of_1_ms"] / compared["forward_ms"]
    assert compared["target"] == pytest.approx(0.9 * compared["tau"] * forwards)
    assert compared["met"] == (compared["speedup"] >= compared["target"])
    traces = {figure["traced"]: tmp_path / figure["trace"] for figure in figures["benchmark"] if "trace" in figure}
    assert set(traces) == {"markov, 7 nodes, compiled", "markov, 3 nodes, compiled", "plain, compiled"}
    for place in traces.values():  # for a viewer
        with gzip.open(place) as file:
            assert len(json.load(file)["traceEvents"]) > 100
    assert [figure["passed"] for figure in figures["verify"] if "passed" in figure] == [True, True]
    chats = {figure["method"]: figure for figure in figures["chat"] if "method" in figure}
    sampled = {f"{name}, compiled, temperature 0.7" for name in ("plain", "markov, 7 nodes", "medusa, 7 nodes")}
    assert {"plain, compiled", "medusa, 7 nodes, compiled", "generate, eager", *sampled} < set(chats)
    assert all((figure.get("equal_texts") == "2 of 2") == (name not in sampled) for name, figure in chats.items())
    markov = chats["markov, 7 nodes, compiled"]
    least, most = markov["tau_interval"]
    assert least - 1e-4 < markov["tau"] < most + 1e-4, "it is computed in float32"
    assert markov["first_token_ms"] > 0
    assert chats["markov, 7 nodes, compiled, temperature 0.7"]["speedup"] > 0
    assert [figure["nodes"] for figure in figures["chat"] if "compared" in figure] == [7, 3]
    assert [figure["passed"] for figure in figures["chat verify"] if "passed" in figure] == [True, True]
    assert {figure["made"] for figure in figures["fit"] if "made" in figure} > {"text", "benchmark"}
    for kind in KINDS:
        assert any(figure.get("method", "").startswith(f"{kind}, ") for figure in figures["kinds"])
    told = (tmp_path / REPORT).read_text()
    assert f"{methods['markov, 7 nodes, compiled']['tau']:.4g}" in told
    assert "times generate, eager" in told


def test_the_battery_starts_from_the_sources(tmp_path: Path) -> None:
    """The packages and scripts are found because the command runs in the repository.

    In a copy of this process, which imports them again but not PyTorch: that would take most of the time."""

    def start(words: Sequence[str]) -> int:
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("scripts", "decode", "medusa", "train")
        ]:
            del sys.modules[name]
        os.chdir(REPO)
        sys.path[:] = ["", *(place for place in sys.path if Path(place).resolve() not in (REPO, REPO / "scripts"))]
        sys.argv[1:] = words
        runpy.run_module("scripts.gpu_battery", run_name="__main__", alter_sys=True)
        return 0

    told = tmp_path / "told"
    with told.open("w") as file:
        process = forked_command(["--report", "--output", str(tmp_path)], file.fileno(), file.fileno(), start)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, told.read_text()
    assert (tmp_path / REPORT).is_file()


def test_the_battery_takes_ten_minutes() -> None:
    assert BATTERY_SECONDS < 10 * 60
    for number, stage in enumerate(STAGES.values()):
        assert stage.seconds < BATTERY_SECONDS
        assert set(stage.needs) <= set(list(STAGES)[:number]), "a stage comes after those that it needs"


def test_pages_have_figures_of_a_gpu_only_with_their_file() -> None:
    """docs/gpu.md states the rule: either nothing has run, or the figures are those of a full run of a commit."""
    told = {name: (REPO / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("results", "gpu")}
    place = REPO / "docs" / "results" / "gpu_battery.jsonl"
    if not place.exists():
        assert "## On a GPU\n\nNothing has run on a GPU yet." in told["results"]
        assert "Nothing in this repository has run on a GPU yet." in told["gpu"]
        return
    figures = list(map(json.loads, place.read_text().splitlines()))
    about = [figure for figure in figures if figure["stage"] == "machine" and "toy" in figure]
    assert about
    assert all(figure["gpu"] and figure["commit"] and not figure["toy"] for figure in about)
    assert "results/gpu_battery.jsonl" in told["results"]
    section = told["results"].split("## On a GPU")[1].split("\n## ")[0]
    for figure in figures:
        if figure.get("event") == "end" and figure["status"] != "done":
            assert f"`{figure['stage']}`" in section.split("**Decoding**")[0], "the page says what did not finish"
    assert "has run on a GPU yet" not in told["results"] + told["gpu"]


# -- stages made by the tests


def put_in(monkeypatch: pytest.MonkeyPatch, function: Callable[[Run], None], needs: tuple[str, ...] = ()) -> None:
    monkeypatch.setitem(STAGES, "verify", Stage(function, 60, needs))


def run_toy(tmp_path: Path, seconds: float = 60) -> run.Figure:
    return run_stages({"verify": STAGES["verify"]}, tmp_path, True, "cpu", seconds)["verify"]


def sleeping(stage: Run) -> None:
    """Keep a figure, then sleep for an hour, as a child process does."""
    stage.keep(ms=1.5)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    stage.keep(child=child.pid)
    time.sleep(3600)


def test_a_stage_ends_at_its_limit_and_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, sleeping)
    assert run_toy(tmp_path, seconds=2)["status"] == "cut off"
    start, first, second, end = run.read_figures(tmp_path)["verify"]
    assert (start["event"], first["ms"], end["event"]) == ("start", 1.5, "end")
    place = Path(f"/proc/{second['child']}/stat")
    if Path("/proc/self/stat").is_file():
        assert not place.exists() or place.read_text().split()[2] == "Z", "its child went on"


def test_an_interrupted_battery_ends_its_stage_and_writes_a_report(tmp_path: Path) -> None:
    """`timeout 540 python -m scripts.gpu_battery ...` sends SIGTERM when the time of the call is over.

    Here the signal comes at the worst moment: right after the fork, when Python drops exceptions. The first fork is the
    process that describes the machine."""

    def interrupted(words: Sequence[str]) -> int:
        forks = itertools.count()
        os.register_at_fork(after_in_parent=lambda: next(forks) and os.kill(os.getpid(), signal.SIGTERM))
        return rehearsing(words)

    words = ["--stage", "backbone", "--output", str(tmp_path)]
    told = tmp_path / "told"
    with told.open("w") as errors:
        process = forked_command(words, errors.fileno(), errors.fileno(), interrupted)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status == 128 + signal.SIGTERM, told.read_text()
    assert "figures.jsonl keeps" in told.read_text()
    assert "| backbone | interrupted |" in (tmp_path / REPORT).read_text()


def going_on(stage: Run) -> None:
    """Measure the first of two points, and the second one in the run that goes on."""
    for nodes in (64, 16):
        if not stage.has_kept(nodes=nodes):
            stage.keep(nodes=nodes, ms=1.5)
            if not stage.goes_on:
                time.sleep(3600)


def test_a_stage_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, going_on)
    assert run_toy(tmp_path, seconds=2)["status"] == "cut off"
    run.append(tmp_path, {"stage": "verify", "error": "of the first run"})
    run.append(tmp_path, {"stage": "verify", "event": "end", "status": "cut off"})
    assert run_toy(tmp_path)["status"] == "done"
    figures = run.read_figures(tmp_path)["verify"]
    assert [figure["nodes"] for figure in figures if "nodes" in figure] == [64, 16]
    assert not any("error" in figure for figure in figures)
    put_in(monkeypatch, losing_some)  # a finished stage begins again
    run_toy(tmp_path)
    assert [figure["nodes"] for figure in run.read_figures(tmp_path)["verify"] if "ms" in figure] == [8]


def test_points_that_are_kept_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways come one after the other, with all their points."""
    measured: list[tuple[object, ...]] = []
    told = ("how", "batch", "nodes")
    monkeypatch.setattr(curves, "random_model", lambda stage, name: None)
    monkeypatch.setattr(curves, "random_method", lambda *about: None)
    monkeypatch.setattr(curves, "warm_up", lambda method, batches: None)
    monkeypatch.setattr(
        curves, "measure_point", lambda stage, about, method: measured.append(tuple(about[key] for key in told))
    )
    stage = Run("8B", tmp_path, TOY, "cpu", 60)
    stage.kept = [{"model": "8B", "how": "compiled", "context": 20, "batch": 2, "nodes": 8, "ms": 3.0}]
    curves.curves(stage, "8B")
    assert measured == [("compiled", 2, 1), ("eager", 2, 8), ("eager", 2, 1)]


def test_methods_that_are_kept_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding is, because it takes turns with the methods that are left."""
    model = SimpleNamespace(model=None)
    monkeypatch.setattr(bench, "load_backbone", lambda name, options: model)
    monkeypatch.setattr(bench, "read_records", lambda name: [SimpleNamespace(input_ids=[1, 2])] * 2)
    made: list[str] = []

    def method(name: str) -> Callable[..., object]:
        def decode(prompts: Sequence[Sequence[int]], on_step: Callable[..., object] | None = None) -> list[Result]:
            if on_step is not None:
                for _ in range(8):
                    on_step(0, [3])
            return [Result([1, 2], [3, 3, 3], [1] * 3, [2] * 3, seconds=0.5) for _ in prompts]

        made.append(name)
        return decode

    monkeypatch.setattr(bench, "plain_method", lambda model, settings: method("plain"))
    monkeypatch.setattr(bench.Bench, "method_of", lambda self, kind, tree, settings: method(f"{kind}, {tree}"))
    stage = Run("chat", tmp_path, TOY, "cpu", 60, "chat")
    kept = {"method": "plain, compiled", "tokens_per_second": 2.0, "step_ms": 1.0}
    stage.kept = [kept, kept | {"method": "markov, 7 nodes, compiled", "tau": 2.0}]
    found = bench.Bench(stage)
    found.measure_way("compiled", {"compile": True}, ["markov"], ["7 nodes"])
    assert not made, "all its methods have figures"
    found.measure_way("compiled", {"compile": True}, ["markov", "medusa"], ["7 nodes"])
    assert made == ["plain", "medusa, 7 nodes"]
    (figure,) = run.read_figures(tmp_path)["chat"]
    assert figure["method"] == "medusa, 7 nodes, compiled"
    assert figure["speedup"] == 1
    assert figure["tau_interval"] == [2, 2]
    assert figure["first_token_ms"] >= 0


def test_fit_keeps_the_figures_of_each_stage_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may end within the next stage. A later call also has the figures of what `medusa fit` has finished."""
    stage = Run("fit", tmp_path, TOY, "cpu", 60, "chat")
    asked: list[tuple[object, ...]] = []

    def fit(command: str, *argv: object) -> None:
        asked.append(argv)
        state = FitState(tmp_path / "fit", {"model": "m"}, overwrite="--overwrite" in argv)
        state.finish(f"stage {len(asked)}", {"tau": 2.0, "prompts": [1]})
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "medusa", fit)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            chat.fit(stage)
        stage.kept = run.read_figures(tmp_path)["fit"]
    made = [(figure["made"], figure["tau"]) for figure in run.read_figures(tmp_path)["fit"]]
    assert made == [("stage 1", 2.0), ("stage 2", 2.0)]
    assert not any("--overwrite" in argv for argv in asked)
    FitState(tmp_path / "fit", {"model": "m"}).finish_run()
    with pytest.raises(KeyboardInterrupt):
        chat.fit(stage)
    assert "--overwrite" in asked[-1], "it would measure nothing"


def test_the_prompts_of_a_chat_model_are_on_one_side(tmp_path: Path) -> None:
    """Those that methods are timed on are of all categories, and the model does not answer them for its heads."""
    questions = write_jsonl(tmp_path / "questions.jsonl", "prompt", [f"Tell me about {n} cats" for n in range(8)])
    prompts = write_jsonl(
        tmp_path / "more.jsonl", "prompt", [*(f"Tell me about {n} cats" for n in range(12)), "x " * 90]
    )
    stage = Run("chat model", tmp_path, TOY, "cpu", 60, "chat")
    stage.scale.prompt_tokens = 40
    chat.chat_model(stage, str(ASSETS / "backbone"), str(prompts), str(questions))
    sides = [[record.input_ids for record in read_records(str(path))] for path in (stage.openings, stage.prompts)]
    assert list(map(len, sides)) == [4, 2]
    assert not any(ids in sides[0] for ids in sides[1])
    assert len(sides[1][0]) >= len(sides[1][1]), "the longest first"
    assert (stage.backbone / "config.json").is_file()
    with pytest.raises(RequestError, match="there is no model"):
        chat.chat_model(stage, str(tmp_path / "none"), str(prompts))


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
        bench.verify(stage)


@pytest.mark.parametrize(
    ("function", "status", "error"),
    [
        (failing, "failed", "ValueError: out of luck"),
        (losing_all_but_a_note, "failed", "RuntimeError: ValueError: no 16"),
        (verifying, "failed", "RuntimeError: ValueError: no bfloat16"),
        (losing_some, "done", None),
    ],
)
def test_errors_are_reported_and_lose_no_figure(
    function: Callable[[Run], None], status: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(monkeypatch, function)
    outcome = run_toy(tmp_path)
    assert (outcome["status"], outcome.get("error")) == (status, error)
    figures = run.read_figures(tmp_path)["verify"]
    assert any({"ms", "passed"} & set(figure) for figure in figures)


def test_repeating_a_stage_replaces_only_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append(tmp_path, {"stage": "MHA", "ms": 3.0})
    put_in(monkeypatch, failing)
    run_toy(tmp_path)
    put_in(monkeypatch, losing_some)
    run_toy(tmp_path)
    figures = run.read_figures(tmp_path)
    assert [figure["ms"] for figure in figures["verify"] if "ms" in figure] == [2.5]
    assert figures["MHA"] == [{"stage": "MHA", "ms": 3.0}]


def test_a_stage_whose_needs_failed_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, losing_some, needs=("text",))
    assert run_toy(tmp_path) == {"seconds": 0, "status": "skipped", "error": "needs text"}
    run.append(tmp_path, {"stage": "text", "error": "no backbone"})
    assert run_toy(tmp_path)["status"] == "skipped"
    run.append(tmp_path, {"stage": "text", "texts": 3})
    run.append(tmp_path, {"stage": "text", "event": "end", "status": "cut off"})
    assert run_toy(tmp_path)["status"] == "done", "what was made before the cut is enough"


def test_full_sizes_need_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="--rehearse"):
        battery.main(["--output", str(tmp_path)])


@pytest.mark.parametrize("known", ["by NVML", "by nvidia-smi", "not at all"])
def test_figures_carry_the_clocks(known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML, which PyTorch reads, or nvidia-smi for one GPU, which tells no power as on some GPUs; or the reasons."""

    def missing(device: object) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="5e1f"))
    for name, value in {"clock_rate": 1980, "power_draw": 412_500, "temperature": 41}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    if known != "by NVML":
        monkeypatch.setattr(torch.cuda, "power_draw", missing)
        monkeypatch.setenv("PATH", str(tmp_path))
    if known == "by nvidia-smi":
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\ncase \"$*\" in *--id=GPU-5e1f*) echo 1980, '[N/A]', 41;; *) exit 6;; esac\n")
        program.chmod(0o755)
    Run("verify", tmp_path, TOY, "cuda", 60).keep(ms=1.0)
    (figure,) = run.read_figures(tmp_path)["verify"]
    told = {"by NVML": [1980, 412.5, 41], "by nvidia-smi": [1980.0, None, 41.0], "not at all": [None] * 3}[known]
    assert [figure[name] for name in clocks.NAMES] == told
    reasons = "nvidia-ml-py does not seem to be installed; FileNotFoundError"
    assert (reasons in figure.get("no_clocks", "")) == (known == "not at all")


# -- what a GPU needs


def test_cuda_is_used_after_a_fork_only_if_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked processes need not import anything, but cannot use a GPU that this process has used."""
    for device, usable, way in (("cpu", False, "fork"), ("cuda", True, "fork"), ("cuda", False, "spawn")):
        monkeypatch.setattr(run, "try_gpu", lambda device, usable=usable: os._exit(0 if usable else 1))
        assert run.processes(device).get_start_method() == way


@pytest.mark.full
def test_a_stage_reaches_a_new_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the packages and scripts from the root of the repository, as `python -m scripts.gpu_battery` does."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if Path(place).name != "scripts"])
    spawning = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: spawning)
    outcome = run_stages({"verify": Stage(failing, 60)}, tmp_path, True, "cpu", 120)["verify"]
    assert outcome["error"] == "ValueError: out of luck", (tmp_path / "logs" / "verify.log").read_text()


def test_a_second_call_goes_on_with_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage for which no time is left keeps the figures that it has."""
    for name in STAGES:
        run.append(tmp_path, {"stage": name, "event": "end", "status": "failed" if name == "MHA" else "done"})
    run.append(tmp_path, {"stage": "MHA", "ms": 3.0})
    run.append(tmp_path, {"stage": "MHA", "event": "end", "status": "cut off"})
    asked: list[str] = []
    monkeypatch.setattr(battery, "run_stages", lambda stages, *more: asked.extend(stages) or {})
    for words in ([], ["--stage", "MHA", "GQA", "--unfinished"]):
        with pytest.raises(KeyError):  # nothing ran, so nothing has an outcome
            battery.main(["--rehearse", "--output", str(tmp_path), *words])
    assert asked == ["machine", "MHA"] * 2
    before = run.read_figures(tmp_path)["MHA"]
    assert run_stages({"MHA": STAGES["MHA"]}, tmp_path, True, "cpu", 0)["MHA"]["status"] == "skipped"
    assert run.read_figures(tmp_path)["MHA"] == before


def test_a_line_that_is_not_complete_is_left_out(tmp_path: Path) -> None:
    run.append(tmp_path, {"stage": "text", "texts": 3})
    with (tmp_path / run.FIGURES).open("a") as file:
        file.write('{"stage": "text", "te')
    assert run.read_figures(tmp_path) == {"text": [{"stage": "text", "texts": 3}]}
    for texts in (5, 6):  # of other stages, which go on
        run.append(tmp_path, {"stage": "text", "texts": texts})
    assert [figure["texts"] for figure in run.read_figures(tmp_path)["text"]] == [3, 5, 6]


def test_the_gpu_is_chosen_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.set_device("cuda")` is a ValueError."""
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    for device in ("cuda", "cuda:1"):
        run.use_gpu(device)
    assert chosen == [0, False, 1, False]


def test_an_error_of_the_gpu_ends_the_stage(tmp_path: Path) -> None:
    """After it every kernel of the process fails, which would be reported as errors of the other figures."""
    stage = Run("verify", tmp_path, TOY, "cpu", 60)
    with stage.attempt(nodes=64):
        raise RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="misaligned"), stage.attempt(nodes=16):
        raise RuntimeError("CUDA error: misaligned address")
    assert [figure["nodes"] for figure in run.read_figures(tmp_path)["verify"]] == [64, 16]


def test_an_aborted_run_has_a_report(tmp_path: Path) -> None:
    about = {"model": "MHA", "how": "compiled", "context": 2000, "batch": 1}
    run.append(tmp_path, {"stage": "machine", "toy": False, "gpu": "a GPU", "torch": "2", "date": "today"})
    run.append(tmp_path, {"stage": "MHA", "event": "start"})
    run.append(tmp_path, {"stage": "MHA", **about, "nodes": 64, "ms": 7.5, "sm_mhz": 1980.0})
    run.append(tmp_path, {"stage": "MHA", **about, "nodes": 1, "ms": 5.0})
    run.append(tmp_path, {"stage": "MHA", **about, "nodes": 16, "error": "out of memory"})
    assert battery.main(["--report", "--output", str(tmp_path)]) == 0
    told = (tmp_path / REPORT).read_text()
    assert "a GPU" in told
    assert "| MHA | interrupted |" in told
    assert "| MHA | compiled | 2000 | 1 | 64 | 7.5 | 1980 | 1.5 |  |" in told
    assert "out of memory" in told
    assert json.loads((tmp_path / run.FIGURES).read_text().splitlines()[0])["gpu"] == "a GPU"
