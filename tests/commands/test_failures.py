"""Files that cannot be grown, written by two processes at once, or damaged: one line, and no text is lost.

The operating system itself limits the size of files here, so writes fail in the middle, as on a full disk."""

from __future__ import annotations

import fcntl
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.commands.place import GENERATION, Place, write_rows
from tests.helpers import LETTERS


@contextmanager
def little_room(size: int) -> Iterator[None]:
    """Files may have at most `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def commands(place: Place, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Commands that write into `folder`, and replace or continue what they have written there before."""
    models, prompts = place.models, ("--prompts", place.prompts, *GENERATION)
    return {
        "generate --json": ("generate", *models, *prompts, "--quiet", "--json", folder / "texts.json"),
        "generate --record": ("generate", *models, *prompts, "--quiet", "--record", folder / "recorded"),
        "distill": ("distill", "--backbone", place.backbone, *prompts, "--quiet", "--output", folder / "own.jsonl"),
        "export": ("export", *models, "--to", "hub", "--output", folder / "export", "--overwrite"),
        "benchmark --report": (
            *("benchmark", *models, *prompts, "--rounds", "1", "--tree", "chain", "--overwrite"),
            *("--max-prompts", "1", "--max-new-tokens", "2"),
            *("--report", folder / "report.html", "--json", folder / "b.json"),
        ),
    }


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "name",
    [
        *("generate --json", "generate --record", "export"),
        pytest.param("benchmark --report", marks=pytest.mark.full),  # test_cli.py has a report that fails
    ],
)
def test_a_full_disk_leaves_the_earlier_files(medusa: Any, place: Place, tmp_path: Path, name: str) -> None:
    command = commands(place, tmp_path)[name]
    assert medusa(*command).status == 0
    before = files_in(tmp_path)
    with little_room(700):
        done = medusa(*command)
    assert done.status == 1
    (line,) = [line for line in done.err.splitlines() if line.startswith(f"medusa {command[0]}: failed: ")]
    assert line == done.err.splitlines()[-1]
    assert "is full, or takes no larger file" in line
    assert "make room" in line
    assert files_in(tmp_path) == before, "earlier files are whole, and no temporary file is left"


def test_distillation_continues_after_a_full_disk(medusa: Any, place: Place, tmp_path: Path) -> None:
    prompts, own = tmp_path / "prompts.txt", tmp_path / "own.jsonl"
    prompts.write_text("\n".join(LETTERS[at : at + 3] for at in range(16)), encoding="utf-8")
    command = (*commands(place, tmp_path)["distill"], "--prompts", prompts)
    assert medusa(*command).status == 0
    whole = own.read_bytes()
    own.write_bytes(first := whole[: whole.index(b"\n") + 1])
    with little_room(len(whole) // 2):
        done = medusa(*command)
    assert len(first) < len(own.read_bytes()) <= len(whole) // 2
    assert done.status == 1
    assert done.err.splitlines()[-1].startswith("medusa distill: failed: the disk of ")
    assert own.read_bytes().startswith(first)
    assert not list(tmp_path.glob(".*"))
    assert medusa(*command).status == 0
    assert sorted(own.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_distillation_begins_again_if_a_full_disk_took_not_even_its_settings(
    medusa: Any, place: Place, tmp_path: Path
) -> None:
    command = commands(place, tmp_path)["distill"]
    with little_room(10):
        assert medusa(*command).status == 1
    assert files_in(tmp_path) == {"own.jsonl": b""}
    done = medusa(*command)
    assert done.status == 0, done.err
    assert (tmp_path / "own.jsonl").read_bytes()


def test_a_second_distillation_into_one_file_is_refused(
    medusa: Any, refused: Any, place: Place, tmp_path: Path
) -> None:
    own = tmp_path / "own.jsonl"
    command = (*commands(place, tmp_path)["distill"], "--overwrite")
    assert medusa(*command).status == 0
    before = own.read_bytes()
    with own.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as the first process does
        told = f"another process is writing {own}; wait until it ends, or choose another file"
        assert refused(*command) == f"medusa distill: error: {told}"
    assert own.read_bytes() == before
    assert medusa(*command).status == 0


def test_a_truncated_datastore_is_refused_in_one_line(medusa: Any, refused: Any, place: Place, tmp_path: Path) -> None:
    store, data = tmp_path / "store", write_rows(tmp_path / "data.jsonl", [{"text": "abcdefgh" * 9}] * 3)
    build = ("datastore", "build", "--backbone", place.backbone, "--data", data, "--output", store)
    assert medusa(*build).status == 0
    whole = files_in(store)
    about = json.loads(whole["datastore.json"])
    del about["vocab_size"]
    cut = [(name, whole[name][: len(whole[name]) // 2]) for name in ("tokens.bin", "order.bin", "datastore.json")]
    for name, damaged in (*cut, ("datastore.json", json.dumps(about).encode())):
        (store / name).write_bytes(damaged)
        models = ("--backbone", place.backbone, "--drafter", f"rest:{store}")
        assert str(store) in refused("generate", *models, "--prompt", "abc", *GENERATION)
        (store / name).write_bytes(whole[name])
