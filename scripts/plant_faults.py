"""Plant small faults in a copy of the repository, one at a time, and run the tests that should catch each of them.

    python scripts/plant_faults.py                             # all faults of scripts/faults.yaml
    python scripts/plant_faults.py --only "cache: *" --json faults.json
    python scripts/plant_faults.py --all-tests                 # the whole suite for each fault

The exit status is 1 if no test caught a fault, if one caught a fault that is called equivalent, or if a test fails
without any fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import yaml

from medusa.errors import RequestError
from medusa.files import write_json
from script_tools import run_script, script_parser

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "scripts" / "faults.yaml"
PASSED, FAILED = 0, 1  # pytest's exit statuses


@dataclass(frozen=True)
class Fault:
    """A fault: the text `old` of a file is replaced with `new`, and at least one of `tests` must fail.

    `equivalent` is the reason why the code does the same with the fault; then all of `tests` must pass."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    equivalent: str = ""

    def plant(self, source: str) -> str:
        """Return the text of the file with the fault; raise ValueError unless `old` is in the file exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} holds the text {source.count(self.old)} times, not once")
        changed = source.replace(self.old, self.new)
        if self.file.endswith(".py"):
            compile(changed, self.file, "exec")
        return changed


class Outcome(NamedTuple):
    """Whether the tests caught a fault, the first test that failed, and why none should, if the fault is equivalent."""

    name: str
    file: str
    caught: bool
    test: str
    seconds: float
    equivalent: str = ""

    @property
    def as_expected(self) -> bool:
        """Whether a fault was caught, or one that is called equivalent was not."""
        return self.caught != bool(self.equivalent)

    def __str__(self) -> str:
        found = f"caught by {self.test.partition('::')[2]}" if self.caught else "NOT CAUGHT"
        if self.equivalent:
            found = f"{found}, BUT CALLED EQUIVALENT" if self.caught else f"equivalent: {self.equivalent}"
        return f"{self.name}: {found}, {self.seconds:.0f} s"


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Read the faults of a YAML file, in its order."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    return [Fault(**entry) for entry in yaml.load(path.read_text(encoding="utf-8"), Loader=loader)]


def copy_repository(source: Path, target: Path) -> None:
    """Copy the working tree without the files that git ignores, and link the folder `shared` next to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=source, text=True).split("\0"):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
    if (shared := source.parent / "shared").is_dir():
        (target.parent / "shared").symlink_to(shared)


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Run `tests` in `folder` until one fails; return pytest's exit status and the name of the failed test."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rfE", *tests]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    failures = (line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    return done.returncode, next(failures, "")


def try_fault(folder: Path, fault: Fault, all_tests: bool) -> Outcome:
    """Plant `fault` in `folder`, run its tests, and restore the file; raise RuntimeError if no test could be run."""
    place, start = folder / fault.file, time.monotonic()
    source = place.read_text(encoding="utf-8")
    place.write_text(fault.plant(source), encoding="utf-8")
    try:
        status, test = run_tests(folder, [] if all_tests else fault.tests)
    finally:
        place.write_text(source, encoding="utf-8")
    if status not in (PASSED, FAILED):
        raise RuntimeError(f"{fault.name}: pytest ended with status {status} {test}")
    seconds = round(time.monotonic() - start, 1)
    return Outcome(fault.name, fault.file, status == FAILED, test, seconds, fault.equivalent)


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="faults by name or pattern")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite instead of each fault's tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes")
    args = parser.parse_args(argv)
    faults = [fault for fault in read_faults() if any(fnmatch(fault.name, pattern) for pattern in args.only)]
    if not faults:
        raise RequestError(f"no fault is called {' or '.join(args.only)}; see {FAULTS.relative_to(ROOT)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "repository"
        copy_repository(ROOT, folder)
        tests = sorted({test for fault in faults for test in fault.tests})
        status, test = run_tests(folder, [] if args.all_tests else tests)
        if status != PASSED:
            print(f"without a fault, pytest ends with status {status} {test}", file=sys.stderr)
            return 1
        outcomes = []
        for fault in faults:
            outcomes.append(outcome := try_fault(folder, fault, args.all_tests))
            print(outcome, flush=True)
    caught, equivalent = sum(outcome.caught for outcome in outcomes), sum(bool(o.equivalent) for o in outcomes)
    print(f"{caught} of {len(outcomes)} faults were caught; {equivalent} are called equivalent")
    if args.json:
        write_json(args.json, {"caught": caught, "faults": [outcome._asdict() for outcome in outcomes]})
    return 0 if all(outcome.as_expected for outcome in outcomes) else 1


if __name__ == "__main__":
    run_script(main)
