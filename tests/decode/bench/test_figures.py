"""The JSON of a benchmark: what is written can be read again, and so can the files of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode.bench.result import BenchmarkResult
from medusa.errors import RequestError
from tests.decode.bench.made_up import outcome

FIRST = Path(__file__).with_name("first_version.json")  # made by the first version, with fewer figures than later files
RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def test_figures_survive_writing_and_reading() -> None:
    result = outcome([0.8, 0.9, 0.7])
    content = json.loads(json.dumps(result.to_json()))
    assert BenchmarkResult.from_json(content, "b.json") == result


def test_names_of_what_was_not_measured_are_left_out() -> None:
    result = outcome([0.5])
    result.temperatures = result.lossy = None
    content: Any = result.to_json()
    assert content.keys() == {"machine", "settings", "methods", "headline"}
    assert "by_category" not in content["methods"]["medusa"]["by_category"]["narration"]
    assert content["settings"]["stop"] == [], "generation settings stand among the others"
    assert "generation" not in content["settings"]
    assert content["methods"]["medusa"]["tau_interval"] is not None
    assert "calibration" not in content["methods"]["plain"]
    result.medusa.calibration = None
    assert result.medusa.to_json()["calibration"] is None, "a report has looked, and found none"


@pytest.mark.parametrize("file", [FIRST, RESULTS / "demo_fit.json", FIRST.with_name("compiled.json")])
def test_files_of_earlier_versions_are_read_completely(file: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    written: Any = json.loads(json.dumps(BenchmarkResult.from_json(content, file.name).to_json()))
    assert_holds(written, content)


def assert_holds(content: Any, expected: Any) -> None:
    """Everything in `expected` is in `content`, which may have more names."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert_holds(content[name], value)
    elif isinstance(expected, list):
        assert len(content) == len(expected)
        for one, value in zip(content, expected, strict=True):
            assert_holds(one, value)
    else:
        assert content == expected


def test_files_of_the_first_version_have_no_figures_by_prompt() -> None:
    content = json.loads(FIRST.read_text(encoding="utf-8"))
    with pytest.raises(RequestError, match=r"b.json holds no figures of its prompts: an earlier version wrote it"):
        BenchmarkResult.from_json(content, "b.json").require_prompts("b.json")


@pytest.mark.parametrize(
    "content",
    [[], None, {}, {"machine": {}, "settings": {}, "methods": {}}, {"machine": 1, "settings": 2, "methods": 3}],
)
def test_other_json_is_refused_in_one_line(content: object) -> None:
    with pytest.raises(
        RequestError, match=r"^b.json is not a benchmark; give a file that medusa benchmark --json wrote$"
    ):
        BenchmarkResult.from_json(content, "b.json")
