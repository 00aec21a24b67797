"""scripts/gpu_battery/bundle.py: parts of a limited size become packages and a model where both are missing."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distribution
from pathlib import Path

import pytest

from medusa.errors import RequestError, RunError
from medusa.files import read_json, write_json
from scripts.gpu_battery import bundle
from tests.gguf_files import write_gguf
from tests.train.processes import forked_command
from tiny_models import tiny_model

PACKAGES = ("gguf", "annotated-types")
MISSING = ("gguf", "annotated_types", "pydantic", "pydantic_core")  # modules that the other machine lacks


def download(command: Sequence[str], check: bool) -> None:
    """Write the installed packages as wheels, without a package index."""
    folder = Path(command[command.index("--dest") + 1])
    for name, wanted in (word.split("==") for word in command if "==" in word):
        found = distribution(name)
        assert wanted == found.version
        with zipfile.ZipFile(folder / f"{name}-{wanted}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            for file in found.files or ():
                if ".." not in file.parts and file.suffix != ".pyc":
                    wheel.write(file.locate(), file)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parts of a tiny model, for whose pieces the first part has little room."""
    monkeypatch.setattr(bundle, "PROMPTS", ("abc ab", "jihg"))
    monkeypatch.setattr(bundle.subprocess, "run", download)
    write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"))
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "once").mkdir()
    download(["--dest", str(tmp_path / "once"), *(f"{name}=={bundle.version(name)}" for name in PACKAGES)], True)
    wheels = sum(wheel.stat().st_size for wheel in (tmp_path / "once").iterdir())
    words = ["make", "--gguf", str(tmp_path / "tiny.gguf"), "--files", str(tmp_path / "questions.jsonl")]
    words += ["--packages", *PACKAGES, "--output", str(tmp_path / "parts"), "--mib", str(wheels / bundle.MIB + 0.07)]
    bundle.main(words)
    return tmp_path / "parts"


class OtherMachine(PathFinder):
    """Finds modules as a machine does that lacks some, unless they were unpacked."""

    site: str

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        where = [place for place in sys.path if place == cls.site] if name in MISSING and path is None else path
        return super().find_spec(name, where)


def opening(words: Sequence[str]) -> int:
    """Open parts in a copy of this process that imports the packages and scripts again."""
    ours = ("scripts", "medusa", "decode", "train", *MISSING)
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    OtherMachine.site = str(Path(words[-1]).resolve() / "site")
    sys.meta_path[:] = [OtherMachine if finder is PathFinder else finder for finder in sys.meta_path]
    from scripts.gpu_battery.bundle import main

    main(["open", *words])
    return 0


def test_a_model_and_packages_travel_in_parts(parts: Path, tmp_path: Path) -> None:
    assert {part.name for part in parts.iterdir()} == {"1", "2"}
    most = 1 << 20
    assert all(
        sum(file.stat().st_size for file in part.rglob("*") if file.is_file()) < most for part in parts.iterdir()
    )
    for part, told in (("2", "part 1 is missing"), ("1", "2 greedy texts are equal")):
        with (tmp_path / "told").open("w") as file:
            words = [str(parts / part), "--output", str(tmp_path / "there")]
            process = forked_command(words, file.fileno(), file.fileno(), opening)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert told in (tmp_path / "told").read_text()
        assert status == 0
    assert (tmp_path / "there" / "model" / "tokenizer.json").is_file()
    assert (tmp_path / "there" / "site" / "gguf" / "__init__.py").is_file()
    assert (tmp_path / "there" / "files" / "questions.jsonl").read_text() == '{"prompt": "Hi"}\n'


def test_a_damaged_or_wrong_model_is_noticed(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["open", str(parts / "1"), str(parts / "2"), "--output", str(tmp_path / "there")]
    manifest = read_json(parts / "1" / bundle.MANIFEST)
    manifest["texts"]["jihg"][-1] += 1
    write_json(parts / "1" / bundle.MANIFEST, manifest)
    with pytest.raises(RunError, match="it stays unchecked"):
        bundle.main(words)
    assert not (tmp_path / "there" / "model").exists()
    piece = parts / "2" / bundle.PIECE
    piece.write_bytes(b"x" + piece.read_bytes()[1:])
    with pytest.raises(RunError, match="damaged"):
        bundle.main(words)


def test_what_cannot_be_carried_is_refused(parts: Path, tmp_path: Path) -> None:
    for words, told in (
        (["make", "--output", str(parts)], "exists"),
        (["make", "--files", "no.jsonl", "--output", str(tmp_path / "x")], "no file no.jsonl"),
        (["make", "--packages", "gguf", "--mib", "0.1", "--output", str(tmp_path / "y")], "MiB of a part"),
        (["open", str(parts / "7"), "--output", str(tmp_path / "z")], "no part"),
    ):
        with pytest.raises(RequestError, match=told):
            bundle.main(words)
