"""Try the wheel where no sources are: build it from the sdist, install it in a new environment, use it elsewhere.

    python .ci/check_wheel.py                  # with this environment's dependencies: a minute
    python .ci/check_wheel.py --full           # dependencies from the index as well: minutes and gigabytes
    python .ci/check_wheel.py --output dist    # keep sdist and wheel

The wheel must hold every file in the packages' folders and in `configs`, and no other. Its modules must be importable.
`medusa` must print its version, and write and train with the files of the package in an empty folder. With `--full`,
the commands of README must run there, too, at reduced size, except those that README marks as not run and those that
need the sources. Without it, tests/test_docs.py runs them, from the sources. This script needs the package `build` and
no other, because a release runs it where nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"medusa": "medusa", "train": "train", "decode": "decode", "configs": "medusa/configs"}
"""The folders of the sources that the wheel holds, with their places in it."""
LEFT_OUT = (".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "site", "shared")
SMALLER = {
    "generate": ["--max-new-tokens", "16"],
    "evaluate": ["--max-prompts", "2", "--max-new-tokens", "16"],
    "benchmark": ["--max-prompts", "1", "--rounds", "1", "--max-new-tokens", "8"],
    "calibrate": ["--max-prompts", "8", "--max-new-tokens", "96", "--rounds", "1"],
    "verify": ["--max-prompts", "1", "--draws", "500", "--max-new-tokens", "12"],
    "train": ["training.max_steps=1", "output_dir=trained"],
}
"""Arguments that make a command of README short."""
MORE = (
    "medusa generate --backbone demo --heads demo --tree example --prompt 'Once upon a time'",
    "medusa train medusa1 data=stories.jsonl data.sequence_length=64",
    "medusa benchmark demo --prompts demo --tree example",
)
"""Commands that use the shipped trees and recipes by name."""
USE = """
import importlib, json, pkgutil, sys
from pathlib import Path

home = Path(sys.prefix).resolve()
for name in ("medusa", "train", "decode"):
    package = importlib.import_module(name)
    assert Path(package.__file__).resolve().is_relative_to(home), f"{name} comes from {package.__file__}"
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)

from decode.bench.calibration import calibrate
from medusa.__main__ import main
calibrate.SIZES = (1, 4)  # to time twelve trees takes seconds and shows nothing more
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""


def build(place: Path, isolated: bool) -> Path:
    """Build sdist and wheel of a copy of the sources, without what earlier builds left; returns the wheel."""
    copy = place / "sources"
    copy_sources(copy)
    how = [] if isolated else ["--no-isolation"]
    run([sys.executable, "-m", "build", *how, "--outdir", str(place / "dist"), str(copy)], cwd=place)
    (wheel,) = (place / "dist").glob("*.whl")
    return wheel


def copy_sources(place: Path) -> None:
    """Copy the sources, without what earlier builds left."""
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*LEFT_OUT))


def require_all_files(wheel: Path) -> None:
    """End the program if the wheel lacks a file of the folders in `PLACES`, or holds another file."""
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
    on_disk = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in PLACES.items()
        for path in (ROOT / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if differences := sorted(packaged ^ on_disk):
        sys.exit(f"wheel and sources differ in {len(differences)} files: {', '.join(differences[:5])}")


def install(place: Path, wheel: Path, full: bool) -> Path:
    """Install the wheel in a new environment; without `full` its dependencies are those of the running one."""
    venv.create(place / "venv", with_pip=False)
    python = place / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", *([] if full else ["--no-deps", "--no-index"]), str(wheel)], cwd=place)
    if full:
        run([*pip, "check"], cwd=place)
        return python
    # A folder that a .pth file names is searched, but its own .pth files, those of editable installs, are not read.
    (site,) = (place / "venv").glob("**/site-packages")
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return python


def use(place: Path, python: Path, full: bool) -> None:
    """Use the installed packages from an empty folder."""
    empty = place / "empty"
    empty.mkdir()
    story = json.dumps({"text": "Once upon a time, a little fox lived in a big forest. " * 8})
    (empty / "stories.jsonl").write_text(story + "\n", encoding="utf-8")
    version = run([str(python.with_name("medusa")), "--version"], cwd=empty).strip()
    print(version)
    if version != f"medusa {declared_version()}":
        sys.exit(f"the wheel has version {version!r}, the sources {declared_version()!r}")
    commands = [*(readme_commands() if full else []), *(shlex.split(line)[1:] for line in MORE)]
    smaller = [[*words, *SMALLER.get(words[0], [])] for words in commands]
    print(run([str(python), "-c", USE, json.dumps(smaller)], cwd=empty, XDG_CACHE_HOME=str(place / "cache")))


def readme_commands() -> list[list[str]]:
    """Return the arguments of the `medusa` commands in README that need nothing else, except `demo` and `chat`.

    `medusa demo` takes minutes, and `medusa chat` waits for somebody who types."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^(<!-- not run here[^\n]* -->\n)?```bash\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    lines = "".join(block for skipped, block in blocks if not skipped).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("medusa ")]
    return [one for one in words if one[0] not in ("demo", "chat")]


def declared_version() -> str:
    """The version in the sources, read without importing anything."""
    source = (ROOT / "medusa" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]


def run(command: Sequence[str], cwd: Path, **variables: str) -> str:
    """The output of `command`, run without the sources on Python's path; ends the program if it fails.

    `variables` are added to the environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = kept | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)[:200]}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="with dependencies from the index, and all commands of README",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep sdist and wheel here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder), isolated=args.full)
        require_all_files(wheel)
        use(Path(folder), install(Path(folder), wheel, full=args.full), full=args.full)
        if args.output:
            shutil.copytree(wheel.parent, args.output, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
