"""medusa/files.py: locks, and systems that have none."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from medusa import files


def test_a_file_that_another_process_has_locked_is_not_locked_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("a") as first, path.open("a") as second:
        assert files.lock(first.fileno(), wait=False)
        assert not files.lock(second.fileno(), wait=False)
        first.close()
        assert files.lock(second.fileno(), wait=False)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_written_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*args: object) -> None:
        raise OSError(number, "as a network's file system says")

    monkeypatch.setattr(fcntl, "flock", flock)
    fails = number == errno.EIO  # says nothing about locks
    with pytest.raises(OSError, match="as a network's") if fails else nullcontext(), files.locked(tmp_path):
        (tmp_path / "file").touch()
    assert (tmp_path / "file").exists() != fails


def test_the_module_works_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no module fcntl."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.spec_from_file_location("files_of_windows", files.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.locked(tmp_path / "new"), (tmp_path / "new" / "file").open("a") as file:
        assert module.lock(file.fileno(), wait=False)


def test_a_folder_is_replaced_atomically(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with files.replacing_folder(tmp_path / "x") as folder:
            (folder / content).write_text(content)
        assert [path.name for path in (tmp_path / "x").iterdir()] == [content]

    def fail() -> None:
        with files.replacing_folder(tmp_path / "x") as folder:
            (folder / "third").write_text("third")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["new"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    for name in ("file", "folder"):
        (tmp_path / f"link-{name}").symlink_to(tmp_path / "elsewhere" / name)
    for content in ("old", "new"):
        files.write_text(tmp_path / "link-file", content)
        with files.replacing_folder(tmp_path / "link-folder") as folder:
            (folder / content).touch()
    assert (tmp_path / "elsewhere" / "file").read_text(encoding="utf-8") == "new"
    assert [path.name for path in (tmp_path / "elsewhere" / "folder").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == ["link-file", "link-folder"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such file")
def test_a_device_is_written_itself(tmp_path: Path) -> None:
    """An administrator, such as in a container, could replace it."""
    files.write_text(tmp_path / "log", "old\n")
    write = "from medusa.files import write_text; from pathlib import Path; write_text(Path('/dev/stdout'), 'new\\n')"
    with (tmp_path / "log").open("a") as log:
        subprocess.run([sys.executable, "-c", write], stdout=log, check=True)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "old\nnew\n"
    before = os.stat("/dev/null")
    files.write_text(Path("/dev/null"), "x")
    assert os.stat("/dev/null").st_ino == before.st_ino
    assert Path("/dev/null").is_char_device()
