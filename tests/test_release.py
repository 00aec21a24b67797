"""The release: every package and its data, one version, tested lower bounds, workflows that can run."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import medusa
from tests.helpers import module_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed() -> None:
    found = {path.parent for name in ("medusa", "train", "decode") for path in (ROOT / name).rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in found}
    assert names == {*PROJECT["tool"]["setuptools"]["packages"]}


@pytest.mark.full
def test_the_wheel_holds_every_file(tmp_path: Path) -> None:
    """Every package and every data file is listed. `.ci/check_wheel.py` also builds the sdist, and uses the wheel."""
    check_wheel = module_of(ROOT / ".ci" / "check_wheel.py")
    check_wheel.copy_sources(tmp_path / "sources")
    build = "import setuptools.build_meta as backend; backend.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "sources", capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    check_wheel.require_all_files(wheel)


def test_the_version_is_defined_once_and_heads_the_changelog() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", medusa.__version__)
    assert medusa.__version__ not in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    versions = []
    for index, heading in enumerate(headings):
        match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((unreleased|\d{4}-\d{2}-\d{2})\)", heading)
        assert match, f"a heading of the changelog is X.Y.Z (date), or (unreleased) for the first: {heading}"
        assert index == 0 or datetime.date.fromisoformat(match[4])
        versions.append(tuple(map(int, match.groups()[:3])))
    assert versions == sorted(versions, reverse=True)
    assert ".".join(map(str, versions[0])) == medusa.__version__


def test_the_lowest_tested_versions_are_the_lower_bounds() -> None:
    project = PROJECT["project"]
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name, bound = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(?:>=([\d.]+))?(?:,<\d+)?(?:; .*)?", requirement).groups()
        if requirement in project["dependencies"] or name in lowest:
            assert Version(lowest[name]) == Version(bound), (
                f"{requirement}, but constraints-lowest.txt has {lowest.get(name)}"
            )


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def test_the_matrix_has_the_oldest_python_and_all_three_sets_of_versions() -> None:
    matrix = workflow("ci.yml")["jobs"]["tests"]["strategy"]["matrix"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert matrix["python"][0] == oldest
    assert {"pinned", "lowest", "latest"} == {*matrix["versions"], *(one["versions"] for one in matrix["include"])}


def test_scripts_and_targets_of_workflows_exist() -> None:
    for name in ("ci.yml", "release.yml", "consumers.yml", "faults.yml", "fuzz.yml", "real.yml"):
        for job in workflow(name)["jobs"].values():
            assert job["timeout-minutes"]
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                for path in re.findall(r"(?:scripts/|\.ci/|constraints)[\w./-]+\.(?:py|txt)", step.get("run", "")):
                    assert (ROOT / path).exists(), f"{name} runs {path}"


def test_only_the_publishing_job_has_an_id_token() -> None:
    release = workflow("release.yml")
    assert release["permissions"] == workflow("ci.yml")["permissions"] == {"contents": "read"}
    assert [name for name, job in release["jobs"].items() if "permissions" in job] == ["publish"]
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}


@pytest.mark.parametrize("name", ["train.py", "decode/__init__.py", "medusa/__init__.py"])
def test_a_package_that_shadows_ours_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    """Run `python -m medusa` in a folder with another train.py, and with an overwritten medusa/__init__.py."""
    stranger = tmp_path / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("raise SystemExit('this is not ours')" if "medusa" not in name else "")
    if "medusa" in name:
        for module in ("__main__.py", "commandline.py", "errors.py", "files.py"):
            (stranger.parent / module).write_bytes((ROOT / "medusa" / module).read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-m", "medusa", "info", "demo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(stranger) in done.stderr
    assert "environment of its own" in done.stderr


def test_make_check_runs_tests_that_exist() -> None:
    core = re.search(r"^CORE := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert core
    paths = core[1].replace("\\\n", " ").split()
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
