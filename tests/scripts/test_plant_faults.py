"""scripts/plant_faults.py: its faults still apply to the code, and it distinguishes caught and missed faults."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

import plant_faults

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_can_be_planted() -> None:
    faults, text = plant_faults.read_faults(), cache(lambda path: (ROOT / path).read_text(encoding="utf-8"))
    for fault in faults:
        print(fault.name)  # a fault that cannot be planted raises an error
        assert fault.plant(text(fault.file)) != text(fault.file)
        for path, _, name in (test.partition("::") for test in fault.tests):
            assert f"def {name.partition('[')[0]}(" in text(path) or not name
    names = [fault.name for fault in faults]
    assert len(set(names)) == len(names)
    assert all(": " in name for name in names), "the area comes first, for --only"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of one module and its test."""
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef never_tested(a):\n    return a + 1\n")
    (tmp_path / "test_sums.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def test_caught_and_missed_faults_are_reported(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing plugins would take most of the time
    folder = tmp_path_factory.mktemp("copy") / "repository"
    plant_faults.copy_repository(project, folder)
    caught = plant_faults.Fault("caught", "sums.py", "a + b", "a - b", ["test_sums.py"])
    unseen = plant_faults.Fault("unseen", "sums.py", "a + 1", "a + 2", ["test_sums.py"])
    outcomes = [plant_faults.try_fault(folder, fault, all_tests=False) for fault in (caught, unseen)]
    assert [outcome.caught for outcome in outcomes] == [True, False]
    assert [outcome.as_expected for outcome in outcomes] == [True, False]
    assert outcomes[0].test == "FAILED test_sums.py::test_add"
    for outcome, (known, found) in zip(
        outcomes, [(False, "CALLED EQUIVALENT"), (True, "equivalent: reason")], strict=True
    ):
        called = outcome._replace(equivalent="reason")
        assert called.as_expected == known
        assert found in str(called)
    assert (folder / "sums.py").read_text() == (project / "sums.py").read_text(), "the file is put back"


@pytest.mark.parametrize(("old", "new"), [("return a", "return b"), ("a * b", "a / b"), ("a + b", "a +")])
def test_a_fault_that_cannot_be_applied_is_rejected(project: Path, old: str, new: str) -> None:
    fault = plant_faults.Fault("x", "sums.py", old, new, [])
    with pytest.raises((ValueError, SyntaxError)):
        fault.plant((project / "sums.py").read_text())
