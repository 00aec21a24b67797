"""Fixtures for the tests of commands: a small backbone on disk with heads and prompts, and no loading of weights."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from transformers import AutoModelForCausalLM

from decode.bench.calibration import calibrate, recording, stored, variants
from medusa.__main__ import main
from medusa.commands.fit import plan, probe, stages
from medusa.files import read_json
from tests.commands.place import Distilled, Outcome, Place, build, lines_of, with_template, write_rows
from tests.helpers import times_of_few_steps


@pytest.fixture(scope="module", autouse=True)
def few_tree_checks(one_tree_check: None) -> None:
    """Commands load the same models again and again."""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return build(tmp_path_factory.mktemp("place"))


@pytest.fixture
def medusa(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command in this process."""

    def run(*argv: Any) -> Outcome:
        capsys.readouterr()
        try:
            status = main([str(word) for word in argv])
        except SystemExit as end:  # the parser ends the program
            status = int(end.code or 0)
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def refused(medusa: Callable[..., Outcome]) -> Callable[..., str]:
    """Run a wrong request; gives its one-line error."""

    def run(*argv: Any) -> str:
        status, out, err = medusa(*argv)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("medusa"), err
        return err.rstrip("\n")

    return run


@pytest.fixture(scope="session")
def talking(place: Place) -> str:
    """The backbone with a chat template that writes the words alone, so that what was asked can be read off the ids."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# reads enable_thinking #}"
    return with_template(place.backbone, template, Path(place.backbone).parent / "talking")


@pytest.fixture
def distill(talking: str, tmp_path: Path, medusa: Callable[..., Outcome]) -> Callable[..., Distilled]:
    """Run `medusa distill` for texts of six tokens, with prompts from a file."""

    def run(*argv: Any, prompts: Any = None, output: str = "own.jsonl", backbone: str = talking) -> Distilled:
        given = () if prompts is None else ("--prompts", write_rows(tmp_path / "prompts.jsonl", prompts))
        figures = tmp_path / "figures.json"
        figures.unlink(missing_ok=True)
        places = ("--backbone", backbone, *given, "--output", tmp_path / output, "--json", figures)
        done = medusa("distill", *places, "--max-new-tokens", "6", *argv)
        told = read_json(figures) if figures.exists() else {}
        return Distilled(done.status, done.err, lines_of(tmp_path / output), told)

    return run


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading large weights takes minutes, so wrong requests must be refused before loading."""

    def load(*args: object, **keywords: object) -> NoReturn:
        pytest.fail("a backbone was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)


@pytest.fixture
def short_calibrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make calibrations short: no figure of these tests is a measurement."""
    monkeypatch.setattr(calibrate, "SIZES", (1, 4))
    monkeypatch.setattr(calibrate, "MIN_STEPS", 30)
    monkeypatch.setattr(calibrate, "time_steps", times_of_few_steps)
    monkeypatch.setattr(variants, "SHORTLISTS", (16,))
    monkeypatch.setattr(stored, "MIN_STEPS", 30)
    for name, few in (("OWN_TEXTS", 4), ("OPENING_TOKENS", 4), ("OWN_TOKENS", 12)):
        monkeypatch.setattr(recording, name, few)


@pytest.fixture(scope="module")
def no_pictures() -> Iterator[None]:
    """Leave the pictures of reports empty: to draw them takes longer than the runs that they show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **how: empty_picture(file))
        yield


def empty_picture(file: Any) -> None:
    if isinstance(file, io.StringIO):
        file.write("<svg ></svg>")
    else:
        Path(file).touch()


@pytest.fixture
def short_fit(monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> None:
    """Make probe, calibration and benchmark short: no figure of these tests is a measurement."""
    short: dict[Any, dict[str, Any]] = {
        probe: {"ANSWERING": 0.5, "LONGEST": 0.5, "ANSWERED": 4, "READ": 2, "ROWS": 1, "LENGTH": 64, "STEPS": 1},
        stages: {"CALIBRATION_TOKENS": 12, "CALIBRATED_ON": 100, "FEWEST_TEXTS": 8},
        # In the benchmark, instead of all prompts, the fewest.
        plan: {"FEWEST_TEXTS": 12}
        | {"BENCHMARK_TOKENS": 8, "FEWEST_BENCHMARK_TOKENS": 8, "BENCHMARK_SECONDS": 0.0, "FEWEST_TEST": 2},
        stored: {"MIN_STEPS": 30},
        calibrate: {"MIN_STEPS": 30, "SIZES": (1, 4), "time_steps": times_of_few_steps},
        variants: {"SHORTLISTS": (16,)},
    }
    for module, values in short.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
