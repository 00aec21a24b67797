"""Shared code of the scripts: every script answers a wrong request with one line and status 2."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import script_tools
from medusa.commandline import exit_status
from medusa.errors import RequestError, RunError
from tests.helpers import module_of

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WRONG = {
    "check_architectures": ["--only lama", "--backbone ./no/folder", "--write page.md --only llama"],
    "check_consumers": [
        "--work {tmp} --python ./no/python",
        "--work {tmp} --prompts 0",
        "--work {file}",
        "--work {tmp} --only trt",
        "--work {tmp} --only vllm --kinds cascade",
    ],
    "check_layouts": [
        "--work {tmp} --draws 0",
        "--work {file}",
        "--work {tmp} --only vllm",
        "--work {tmp} --python ./no/python",
    ],
    "commands_page": ["--fast"],
    "compare_kinds": [
        "--backbone demo --prompt Hi --heads demo",
        "--backbone ./no/model --prompt Hi --heads a=b",
        "--backbone demo --prompt Hi --heads a=demo a=demo",
    ],
    "data_page": ["--fast"],
    "draw_kinds": ["", "{file}"],
    "fuzz": ["--minutes 0", "--cases 0", "--minutes 1 --case 2"],
    "gpu_battery": ["--seconds soon --output {tmp}", "--stage dance --output {tmp}"],
    "gpu_battery/bundle": ["make", "open no/part --output {tmp}/x"],
    "load_speed": ["--clients 1,x", "--rounds 0"],
    "state_speed": ["--nodes x", "--nodes 0", "--dtype int8"],
    "load_test": ["--minutes 0", "--clients 0"],
    "make_backbone": ["--data no.txt --output {tmp}/x --steps 1"],
    "make_shipped_heads": ["--data no.txt --work {tmp} --output {tmp}/x"],
    "peers": ["demo --data {tmp} --run {tmp} --output {tmp}/x"],
    "plant_faults": ["--only nothing-like-this"],
    "real_model": [
        "demo --data {tmp} --output {tmp}/x",
        "demo --data {tmp} --output {tmp}/x --kinds markof",
        "demo --data {tmp} --output {tmp}/x --dtypes ,",
        "demo --data {tmp} --output {tmp}/x --minutes-of-text 0",
    ],
    "recipe_page": ["--fast"],
    "../.ci/check_wheel": ["--fast"],
    "../notebooks/run": ["no.ipynb"],
}
SHARED = {
    "script_tools",
    "text_score",
    "tiny_models",
    "fuzz_cases",
    "fuzz_models",
    "load_clients",
    "chat_families",
    "peer_methods",
    "real_measure",
    "real_report",
}


def test_every_script_is_listed() -> None:
    found = {path.stem for path in SCRIPTS.glob("*.py")} | {path.parent.name for path in SCRIPTS.glob("*/__main__.py")}
    assert found - SHARED == {name for name in WRONG if "/" not in name}


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, cases in WRONG.items() for words in cases])
def test_a_wrong_request_is_one_line_and_status_2(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "/" in name:
        module = module_of(SCRIPTS / f"{name}.py")
    else:
        module = importlib.import_module("scripts.gpu_battery.__main__" if name == "gpu_battery" else name)
    (tmp_path / "file").touch()
    argv = words.format(tmp=tmp_path, file=tmp_path / "file").split()
    try:
        status = exit_status(name, lambda: module.main(argv))
    except SystemExit as exit_:  # argparse's own way
        status = exit_.code
    error = capsys.readouterr().err
    assert status == 2, error
    assert error.count("\n") == 1, error
    assert ": error: " in error


def test_every_script_ends_with_the_shared_wrapper() -> None:
    for name in WRONG:
        if name != "gpu_battery" and "/" not in name:
            assert (SCRIPTS / f"{name}.py").read_text(encoding="utf-8").endswith("\n    run_script(main)\n"), name


def test_a_script_can_import_other_scripts(tmp_path: Path) -> None:
    """The script runs as a process in any folder, with the wrapper's exit status."""
    command = [sys.executable, str(SCRIPTS / "plant_faults.py"), "--only", "nothing-like-this"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("plant_faults: error: no fault is called nothing-like-this")


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (RequestError("a wrong\nvalue"), 2, "x: error: a wrong value\n"),
        (RunError("disk full"), 1, "x: failed: disk full\n"),
        (KeyboardInterrupt(), 130, "x: interrupted\n"),
    ],
)
def test_exit_statuses(error: BaseException, status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise error

    assert exit_status("x", run) == status
    assert capsys.readouterr().err == told


def test_markdown_tables() -> None:
    assert script_tools.markdown_table(["a", "b"], [[1, "x"]]) == "| a | b |\n|---|---|\n| 1 | x |"
