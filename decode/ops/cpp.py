"""Builds the C++ operations of this folder with the machine's compiler, once, and loads them into `torch.ops`.

torch.utils.cpp_extension builds, too, but needs ninja, and waits forever for the lock of a build that was stopped."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from medusa.cpu import cpuinfo
from medusa.errors import first_line
from medusa.files import replacing, user_cache

COMPILERS = ("g++", "clang++", "c++")  # the first of them is used, unless the environment variable CXX names one
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC")
PATIENCE = 300  # seconds; a build takes 2 to 10
TORCH = Path(torch.__file__).parent


@functools.cache
def load_operations(name: str) -> bool:
    """Load the operation NAME of the file NAME.cpp in this folder; returns whether the process has it now.

    The first call on a machine takes some seconds to build it. Later ones find the library in the user's cache. Without
    a compiler, nothing is said. If building or loading fails, a warning says why."""
    if _is_loaded(name):
        return True
    source = Path(__file__).with_name(f"{name}.cpp")
    try:
        compiler = _compiler()
        if compiler is None:
            return False
        library = user_cache() / "operations" / f"{name}-{_key(source, compiler)}.so"
        if library.exists():
            try:
                torch.ops.load_library(library)
                return True
            except OSError:  # it is damaged, and is replaced
                pass
        with replacing(library) as new:
            _build(source, compiler, new)
        torch.ops.load_library(library)
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), f"{error.cmd[0]} failed")
        warnings.warn(f"drafts take a little longer, because {source.name} does not compile: {reason}", stacklevel=2)
        return False
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        # No home folder, no such compiler, a compiler that hangs, or a disk from which no code may be loaded.
        reason = first_line(error.__cause__ or error)
        warnings.warn(f"drafts take a little longer, because {source.name} cannot be used: {reason}", stacklevel=2)
        return False
    return True


def _is_loaded(name: str) -> bool:
    return hasattr(torch.ops.medusa, name)


def _compiler() -> list[str] | None:
    """The command that starts the compiler; `None` if this machine has none. The flags are for Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    wanted = shlex.split(os.environ.get("CXX", ""))
    found = [[path] for path in map(shutil.which, COMPILERS) if path]
    return wanted or next(iter(found), None)


def _key(source: Path, compiler: list[str]) -> str:
    """A hash of the code, the command, PyTorch's version, and the CPU, whose instructions the library uses."""
    machine = [*os.uname()[4:], *sorted({*cpuinfo("flags", "Features", "model name")})]
    parts = [source.read_text(encoding="utf-8"), *compiler, *FLAGS, torch.__version__, sys.prefix, *machine]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _build(source: Path, compiler: list[str], library: Path) -> None:
    headers, libraries = TORCH / "include", TORCH / "lib"
    paths = ["-isystem", headers, source, "-o", library, "-L", libraries, "-ltorch_cpu"]
    command = [*compiler, *FLAGS, *map(str, paths)]
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    with library.open("rb") as built:
        os.fsync(built.fileno())  # half a library would end every process that loads it
