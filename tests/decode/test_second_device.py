"""Whole steps on a second device without data: no operation mixes devices, works on the CPU or reads a value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TWICE = ("lookahead", "model", "mix", "typical, penalties")  # steps that read what they drafted or predicted, too


@pytest.fixture(scope="module")
def outcome() -> dict[str, dict[str, Any]]:
    """The faults and reads of each case (`second_device.py`), in a process of its own, which knows the device."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    command = [sys.executable, "-m", "tests.decode.second_device"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | paths, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_step_mixes_devices(outcome: dict[str, dict[str, Any]]) -> None:
    cases = {name: found for name, found in outcome.items() if not name.startswith("planted")}
    assert len(cases) > 70
    assert {name: found["faults"] for name, found in cases.items() if found["faults"]} == {}


def test_a_step_reads_from_the_device_once(outcome: dict[str, dict[str, Any]]) -> None:
    """Compiled steps return what is to be read, so they read once as well."""
    for name, found in outcome.items():
        if not name.startswith("planted"):
            assert found["reads"] <= (2 if name.startswith(TWICE) else 1), name


def test_planted_faults_are_found(outcome: dict[str, dict[str, Any]]) -> None:
    planted = {name: found["faults"] for name, found in outcome.items() if name.startswith("planted")}
    assert len(planted) == 5
    assert all(planted.values()), planted
