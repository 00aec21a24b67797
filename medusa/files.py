"""Files that are either whole or absent."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa.errors import RequestError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `path` on success and vanishes on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place on success and vanishes on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if path.exists():  # a folder cannot be replaced in one step: between these two there is none
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    """Read by setting it: there is no other way."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises:
    RequestError: the file is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"no such file: {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not JSON ({error})") from None


def require_absent(path: Path, overwrite: bool) -> None:
    """Raises:
    RequestError: the output is there already and may not be replaced."""
    if path.exists() and not overwrite:
        raise RequestError(f"{path} exists already; choose another place or add --overwrite")
