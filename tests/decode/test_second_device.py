"""Whole steps on a second device without data: no operation mixes devices, works on the CPU or reads a value."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from tests.decode import second_device
from tests.train.processes import forked

pytestmark = pytest.mark.slow
TWICE = ("lookahead", "model", "mix", "typical, penalties")  # steps that read what they drafted or predicted, too


@pytest.fixture(scope="module")
def outcome(full: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The faults and reads of each case (`second_device.py`), in a copy of this process, which knows the device."""
    folder = tmp_path_factory.mktemp("second_device")

    def work() -> None:
        torch.manual_seed(0)
        (folder / "found").write_text(json.dumps(second_device.outcomes(full)))

    status = os.waitpid(forked(work, folder / "error"), 0)[1]
    assert status == 0, (folder / "error").read_text()[-2000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "found").read_text())
    return found


def test_no_step_mixes_devices(outcome: dict[str, dict[str, Any]]) -> None:
    cases = {name: found for name, found in outcome.items() if not name.startswith("planted")}
    assert set(second_device.DAILY) <= set(cases)
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
