"""The wheel, tried where no sources are: built from the sdist, installed in an environment of its own, used from an
empty folder.

    python scripts/check_wheel.py                  # with this environment's dependencies: seconds; a test runs it
    python scripts/check_wheel.py --full           # dependencies from the index as well: minutes and gigabytes
    python scripts/check_wheel.py --output dist    # keep sdist and wheel

The wheel must hold every file that lies in the packages' folders, and no other; all its modules must be importable;
`medusa` must say its version, describe the shipped heads and write text with them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("medusa", "train", "decode")
LEFT_BEHIND = (".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "site", "shared")

USE = """
import importlib, pkgutil, sys
from pathlib import Path

home = Path(sys.prefix).resolve()
for name in ("medusa", "train", "decode"):
    package = importlib.import_module(name)
    assert Path(package.__file__).resolve().is_relative_to(home), f"{name} comes from {package.__file__}"
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)

from medusa.__main__ import main
assert main(["info", "demo"]) == 0
asked = ["--prompt", "Once upon a time", "--max-new-tokens", "16", "--threads", "1"]
assert main(["generate", "--backbone", "demo", "--heads", "demo", *asked]) == 0
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="build and install with what the index has")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep sdist and wheel here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheel = build(place, isolated=args.full)
        differences = sorted(packaged(wheel) ^ on_disk())
        if differences:
            print(
                f"wheel and sources differ in {len(differences)} files: {', '.join(differences[:5])}", file=sys.stderr
            )
            return 1
        python = install(place, wheel, full=args.full)
        status = use(place, python)
        if status == 0 and args.output:
            shutil.copytree(wheel.parent, args.output, dirs_exist_ok=True)
        return status


def build(place: Path, isolated: bool) -> Path:
    """The wheel of the sdist of a copy of the sources; what earlier builds have left behind is not in the copy."""
    copy = place / "sources"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    how = [] if isolated else ["--no-isolation"]
    run([sys.executable, "-m", "build", *how, "--outdir", str(place / "dist"), str(copy)], cwd=place)
    (wheel,) = (place / "dist").glob("*.whl")
    return wheel


def packaged(wheel: Path) -> set[str]:
    """All files of the packages in a wheel; any other top-level folder is one too many and comes along."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def on_disk() -> set[str]:
    """What a wheel should hold: every file below the packages' folders."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def install(place: Path, wheel: Path, full: bool) -> Path:
    """An environment with the wheel in it; without `full` its dependencies are those of the running one."""
    venv.create(place / "venv", with_pip=False)
    python = place / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python), "install"]
    run([*pip, str(wheel)] if full else [*pip, "--no-deps", "--no-index", str(wheel)], cwd=place)
    if full:
        run([*pip[:-1], "check"], cwd=place)
    else:
        # A folder that a .pth file names is searched, but its own .pth files, those of editable installs, are not read.
        (site,) = (place / "venv").glob("**/site-packages")
        borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return python


def use(place: Path, python: Path) -> int:
    """Use the installed packages from an empty folder; returns the exit status."""
    empty = place / "empty"
    empty.mkdir()
    version = run([str(python.with_name("medusa")), "--version"], cwd=empty).strip()
    print(version)
    if version != f"medusa {declared_version()}":
        print(f"the wheel says {version!r}, the sources {declared_version()!r}", file=sys.stderr)
        return 1
    print(run([str(python), "-c", USE], cwd=empty))
    return 0


def declared_version() -> str:
    """The version where it is written, without importing anything."""
    namespace: dict[str, str] = {}
    for line in (ROOT / "medusa" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            exec(line, namespace)
    return namespace["__version__"]


def run(command: Sequence[str], cwd: Path) -> str:
    """The output of `command`, run without the sources on Python's path; ends the program where it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)[:200]}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
