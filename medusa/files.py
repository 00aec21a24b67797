"""Atomic replacement of files and folders, JSON files, and checks of output paths and disk space."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from medusa.errors import RequestError, RunError, first_line

if sys.platform != "win32":
    import fcntl

ASSETS = Path(__file__).parent / "assets"  # a small backbone with heads and a draft model for it, and prompts
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, an exceeded quota, a too large file
OF_TORCH = "inline_container.cc"  # in an error of torch's archive writer; that of its reader means a damaged file
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # from file systems, such as some of a network, without locks
STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")  # what a process has open, also regular files
PICTURES = (".png", ".pdf", ".svg", ".jpg")  # the formats of plots
Json = dict[str, Any]  # a JSON object whose content has not been checked


def user_cache() -> Path:
    """The folder for what this package keeps between runs and can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa-heads"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for a new file next to `path`. The file replaces `path` on success and is removed after an error.

    A link stays, and what it names is replaced. To pipes and devices, and to /dev/stdout, the content is appended."""
    if str(path).startswith(STREAMS) or (path.exists() and not path.is_file()):
        with tempfile.TemporaryDirectory() as folder:
            yield (made := Path(folder) / path.name)
            with made.open("rb") as content, path.open("ab") as output:
                shutil.copyfileobj(content, output)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        yield temporary
        umask = os.umask(0)  # the only way to read the umask is to set it
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # safetensors creates files that only the owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`. It replaces `path` on success and is removed after an error.

    A link stays, and the folder that it names is replaced."""
    path = Path(os.path.realpath(path))
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():  # unlike a file, a folder cannot be replaced in one step
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def lock(handle: int, wait: bool) -> bool:
    """Lock an open file or folder until it is closed. Without `wait`, return False if another process has locked it.

    On Windows, and on file systems that have no locks, nothing is locked and the result is True."""
    if sys.platform != "win32":
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return True


@contextlib.contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Wait until no other process is in this context for `folder`, which is made if it does not exist (see `lock`).

    Without `wait`, raise RequestError if another process is in it, and at the end remove a folder that was made here
    and is still empty."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":  # which cannot open a folder
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not lock(handle, wait):
            raise RequestError(f"another process is writing {folder}; wait until it ends, or choose another folder")
        try:
            yield
        finally:
            if made and not wait:
                with contextlib.suppress(OSError):  # it holds something
                    folder.rmdir()
    finally:
        os.close(handle)  # this also unlocks it


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically, with two spaces of indentation."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; raise RequestError if the file is missing, cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"no such file: {path}") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give a JSON file") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number too long, or nested too deeply
        raise RequestError(f"{path} is not JSON ({error})") from None


def require_absent(path: Path, overwrite: bool) -> None:
    """Raise RequestError if a file or folder exists and `overwrite` is false."""
    if path.exists() and not overwrite:
        raise RequestError(f"{path} exists already; choose another place or add --overwrite")


def require_writable(path: str | Path | None, option: str = "") -> None:
    """Raise RequestError if no file can be written at `path`; `None` is always valid.

    `option` is the name of the option that gives the path, such as `--json`, for the message."""
    if path is None:
        return
    path, named = Path(path), f"{option} {path}".strip()
    if path.is_dir():
        raise RequestError(f"{named} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"{named}: there is no folder {path.parent}; create it, or name a file elsewhere")
    require_writable_folder(path.absolute().parent, path, option)


def require_writable_folder(folder: str | Path, path: str | Path | None = None, option: str = "") -> None:
    """Raise RequestError if a folder does not exist and cannot be made, or if nothing can be written in it.

    `path` is the file or folder to write (default: the folder itself), and `option` the option that names it."""
    folder, named = Path(folder), f"{option} {folder if path is None else path}".strip()
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{named} is a file; choose a folder")
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise RequestError(f"{named}: {existing} is a file; choose another place")
    try:  # only an attempt shows whether a file system takes files: root may write everywhere, but not in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".medusa-", dir=existing))
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise RequestError(f"{named}: nothing can be written in {existing} ({reason}); choose another place") from None


def require_picture(path: str | Path | None, option: str = "") -> None:
    """Raise RequestError if no picture can be written at `path`: its format is unknown, or as in `require_writable`."""
    if path is not None and Path(path).suffix.lower() not in PICTURES:
        raise RequestError(f"{option} {path} is no picture; its name must end in {', '.join(PICTURES)}".strip())
    require_writable(path, option)


@contextlib.contextmanager
def disk_may_fill(path: Path, way_out: Callable[[], str]) -> Iterator[None]:
    """Turn a full-disk error inside this context into a RunError, whose message ends with advice from `way_out`."""
    try:
        yield
    except Exception as error:
        if not is_full(error, OF_TORCH):
            raise
        raise RunError(f"the disk of {path} is full, or takes no larger file; {way_out()}") from error


def is_full(error: BaseException | None, *signs: str) -> bool:
    """Whether a full disk caused an error, directly or through an earlier error that was being handled.

    `signs`: words that also mean a full disk if the message of an error has them."""
    signs += tuple(f"os error {number}" for number in DISK_FULL)  # as safetensors reports the system's error
    while error is not None:
        if getattr(error, "errno", None) in DISK_FULL or any(sign in str(error) for sign in signs):
            return True
        error = error.__context__
    return False


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`. The path itself does not need to exist."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def readable(size: int) -> str:
    """Format a number of bytes with a unit, such as 1.5 GB."""
    power = min(4, max(0, len(str(size)) - 1) // 3)
    return f"{size / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def per_second(rate: float) -> str:
    """Format a number of tokens per second, with one decimal below 100."""
    return f"{rate:.1f}" if rate < 99.95 else f"{rate:.0f}"
