"""Drafters of other packages: the one that docs/drafters.md shows, and packages that do not load."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from decode.drafters import DRAFTERS, REGISTRY, parse
from medusa.__main__ import main
from medusa.errors import RequestError
from tests.helpers import install

PAGE = Path(__file__).resolve().parents[3] / "docs" / "drafters.md"
PROMPT = "Once upon a time"


def block(first_line: str) -> str:
    """The code block of the page that begins with this line."""
    (found,) = re.findall(rf"^```\w+\n({re.escape(first_line)}\n.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    return str(found)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path for packages that are installed during a test."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(REGISTRY, "_loaded", {})
    return tmp_path / "site"


def test_the_drafter_of_the_page_drafts_the_same_text(
    packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    project = tomllib.loads(block("# pyproject.toml"))["project"]
    install(packages, project["name"], project["entry-points"], phrases=block("# phrases.py"))
    texts = {}
    (tmp_path / "phrases.txt").write_text(PROMPT + " there was a little\n", encoding="utf-8")
    for name, ways in {
        "plain": ["--plain"],
        "phrases": ["--drafter", f"phrases:{tmp_path}/phrases.txt,tokens=4"],
    }.items():
        command = ["generate", "--backbone", "demo", "--prompt", PROMPT, "--max-new-tokens", "24", *ways]
        assert main([*command, "--json", str(tmp_path / "out.json")]) == 0, capsys.readouterr().err
        (texts[name],) = json.loads((tmp_path / "out.json").read_text("utf-8"))["results"]
    assert texts["phrases"]["new_ids"] == texts["plain"]["new_ids"]
    assert texts["phrases"]["steps"] < texts["plain"]["steps"]
    with pytest.raises(RequestError, match="drafter phrases has no option 'token=4'; did you mean tokens"):
        parse("phrases:file=a,token=4")


def test_packages_that_do_not_load_are_named_and_do_no_harm(packages: Path, capsys: pytest.CaptureFixture) -> None:
    points = {"broken": "broken:Config", "ngram": "broken:Config", "list": "builtins:list", "ended": "ended:Config"}
    install(packages, "odd", {"medusa.drafters": points}, broken="import nowhere\n", ended="raise SystemExit('no')\n")
    with pytest.raises(RequestError, match=r"'broken'; odd 0.1 has it, but does not load: ModuleNotFoundError: No mod"):
        parse("broken")
    assert type(parse("ngram")).__module__ == "decode.drafters.ngram"
    assert list(REGISTRY) == list(DRAFTERS)
    assert main(["info", "demo"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for line in (
        "drafter broken (odd 0.1) does not load: ModuleNotFoundError: No module named 'nowhere'",
        "drafter ended (odd 0.1) does not load: SystemExit: no",
        "drafter list (odd 0.1) does not load: <class 'list'> is no subclass of decode.drafters.base.DrafterConfig",
        "drafter ngram (odd 0.1) does not load: the name ngram is taken already",
    ):
        assert line in told


def test_a_name_is_taken_by_the_first_package_that_loads(packages: Path) -> None:
    for name in ("broken", "second", "third"):
        source = "import pathlib\nfrom decode.drafters.ngram import NgramConfig\nclass Config(NgramConfig): pass\n"
        source += f"with (pathlib.Path(__file__).parent / 'imports').open('a') as file: file.write('{name} ')\n"
        source += "import nowhere\n" if name == "broken" else ""
        install(packages, name, {"medusa.drafters": {"same": f"{name}:Config"}}, **{name: source})
    names = iter(REGISTRY)
    assert [next(names) for _ in DRAFTERS] == list(DRAFTERS)
    assert not (packages / "imports").exists(), "other packages are imported only if they are asked for"
    with pytest.raises(RequestError, match=r"no drafter 'smae'; choose one of .*, same .did you mean same"):
        parse("smae")
    assert (packages / "imports").read_text().split() == ["broken", "second"], "each at most once, and none in vain"
    assert type(parse("same")).__module__ == "second"
    assert [*names] == ["same"]
    failures = [one.failure for one in REGISTRY.extensions()]
    assert failures == ["ModuleNotFoundError: No module named 'nowhere'", None, "the name same is taken already"]


def test_a_class_can_be_registered_without_a_package(packages: Path) -> None:
    known = type(parse("ngram"))
    REGISTRY.register("again", known)
    REGISTRY.register("again", known)  # as in a notebook
    assert type(parse("again")) is known
    with pytest.raises(RequestError, match="there is a drafter mix already; choose another name"):
        REGISTRY.register("mix", known)
