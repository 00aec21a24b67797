"""medusa/versions.py: the tested versions are declared once, and others give one line of warning."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from unittest import TestCase

import pytest
from packaging.version import Version

from medusa import versions
from medusa.versions import TESTED, in_words, warn_if_untested

ROOT = Path(__file__).parents[2]


def pinned(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("name", TESTED)
def test_the_declared_versions_are_those_that_are_tested(name: str) -> None:
    """CI installs both files of constraints, and the newest releases."""
    lowest, newest = map(Version, TESTED[name])
    assert Version(pinned("constraints-lowest.txt")[name]).release[:2] == lowest.release
    assert lowest <= Version(pinned("constraints.txt")[name]) < Version(f"{newest.major}.{newest.minor + 1}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{name} {in_words(name)}" in " ".join(readme.split())


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"torch": "2.11.0", "transformers": "5.24.9"}, []),
        ({"torch": "2.13.1+cpu", "transformers": "5.17.0"}, []),
        ({"torch": "2.10.1", "transformers": "5.17.0"}, ["torch 2.10.1 was not tested (2.11 to 2.13 was)"]),
        ({"torch": "3.0.0a1", "transformers": "5.25.0.dev0"}, ["torch 3.0.0a1", "transformers 5.25.0.dev0"]),
    ],
)
def test_other_versions_give_one_line(
    installed: dict[str, str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", installed.__getitem__)
    monkeypatch.setattr(versions, "TESTED", {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.24")})
    if not told:
        with TestCase().assertNoLogs(level=logging.WARNING):
            return warn_if_untested()
    with TestCase().assertLogs(level=logging.WARNING) as logs:
        warn_if_untested()
    [record] = logs.records
    for words in told:
        assert words in record.getMessage()
    assert "\n" not in record.getMessage()
