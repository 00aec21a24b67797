"""Compare this toolkit's decoding with other packages on one real model, in one run: speed, texts, and counted work.

    pip install economize==0.3.2 flashspec==0.3.1
    python scripts/peers.py ./model --data data --run runs/real --output runs/peers

The run is one of scripts/real_model.py: its text, its heads and their calibration. The heads of the other packages
learn from the same text for the same CPU minutes, at the best of three learning rates. Then all methods decode the
prompts that were set aside, greedily and in turns. One more pass counts their work, which no other program changes:
applications of decoder layers, and rows of LM heads. peers.md and peers.json hold the results.

A package that is not installed is left out. One CPU thread is used, and all times are CPU times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter

import peer_methods
from compare_kinds import KindsOptions, without_folder
from decode.bench.benchmark import Contender, run_rounds, summarize
from decode.bench.calibration.stored import Calibration
from decode.bench.machine import commit, machine, stopwatch
from decode.bench.methods import Method
from decode.settings import Settings
from medusa.commands.fit.prompts import write_prompts
from medusa.commands.models import Opened, open_models
from medusa.commands.options import Models, Output, Prompts, RuntimeOptions
from medusa.errors import RequestError, first_line
from medusa.files import Json, read_json, write_text
from medusa.heads.independent import MedusaHeads
from medusa.options import LoadOptions
from peer_methods import METHODS, VERSIONS, Counter, read_texts, stock_methods
from real_measure import methods_of, read_prompts
from real_report import value_of
from script_tools import markdown_table, run_script, script_parser

PLAIN = {"plain": "ours: plain decoding", "transformers": "transformers: `model.generate`"}


def installed() -> list[str]:
    """Return the other packages that are installed, and tell which are left out; raise RequestError if all are."""
    found, lines = [], []
    for name, tried in VERSIONS.items():
        try:
            if (its := version(name)) != tried:
                lines.append(f"{name} {its}: this script was tried with {tried}")
            found.append(name)
        except PackageNotFoundError:
            lines.append(f"{name} is left out; install it by: pip install {name}=={tried}")
    if not found:
        every = " ".join(f"{name}=={tried}" for name, tried in VERSIONS.items())
        raise RequestError(f"no other package is installed; pip install {every}")
    for line in lines:
        print(line, file=sys.stderr)
    return found


def our_heads(run: Path, kind: str | None, dtype: str) -> tuple[str, MedusaHeads, Calibration | None]:
    """Return the kind of heads of a run that is named, or calibrated as the fastest, with heads and calibration."""
    stages = read_json(run / "fit.json")["stages"]
    found: dict[str, Calibration] = {}
    for name, its in stages.items():
        if name.startswith("calibrate ") and name.endswith(f" {dtype}") and "found" in its:
            found[name.split()[1]] = TypeAdapter(Calibration).validate_python(its["found"])
    if kind is None:
        if not found:
            raise RequestError(f"{run} has no calibration in {dtype}; name heads by --kind, or finish that stage")
        kind = max(found, key=lambda name: found[name].of_heads.tokens_per_second)
    return kind, MedusaHeads.from_pretrained(run / "stages" / kind), found.get(kind)


def options_of(args: argparse.Namespace, prompts: Path) -> KindsOptions:
    """Return the options with which models are opened: greedy decoding of the prompts in a file, with one thread."""
    return KindsOptions(
        models=Models(backbone=args.model),
        load=LoadOptions(dtype=args.dtype),
        prompts=Prompts(prompts=str(prompts)),
        settings=Settings(max_new_tokens=args.tokens, temperature=0.0),
        heads=(),
        rounds=args.rounds,
        runtime=RuntimeOptions(threads=1),
        output=Output(quiet=True),
    )


def our_methods(
    opened: Opened, kind: str, heads: MedusaHeads, found: Calibration | None
) -> Iterator[tuple[str, Method]]:
    """Make plain decoding, `model.generate`, and our heads, n-grams and their mix."""
    for name, method in methods_of(opened, {kind: heads}, {kind: found}, kind).items():
        if name in PLAIN:
            yield name, method
        elif name != "prompt lookup":
            yield f"ours: {name}", method


def counted(
    opened: Opened, methods: Iterator[tuple[str, Method]], package: str | None, found: Json
) -> Iterator[tuple[str, Method, Json]]:
    """Decode all prompts with each method once, and count its work.

    What fails in another `package` is remembered in `found`; our own errors are raised."""
    forgiven: tuple[type[Exception], ...] = (Exception,) if package else ()
    try:
        for name, method in methods:
            try:
                work = Counter(opened.loaded.model).of(method, opened.prompts)
            except forgiven as error:
                found.setdefault(name, {})["failed"] = first_line(error)
            else:
                yield name, method, work
    except forgiven as error:  # while methods were made
        found[str(package)] = {"failed": first_line(error)}


def compare(args: argparse.Namespace, packages: Sequence[str]) -> Json:
    """Make all methods, and measure them in turns; return rows of figures by method, and what was chosen."""
    kind, heads, calibration = our_heads(args.run, args.kind, args.dtype)
    _, tests = read_prompts(args.data, args.prompts)
    args.output.mkdir(parents=True, exist_ok=True)
    write_prompts(file := args.output / "prompts.jsonl", [one for its in tests.values() for one in its[: args.each]])
    options = options_of(args, file)
    opened = open_models(options, options.prompts.read())

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    texts = read_texts(args.run / "stages" / "text.jsonl")
    tuning = [text.ids[: text.prompt_tokens] for text in texts[: args.tuning]]
    minutes = args.minutes or read_json(args.run / "fit.json")["request"]["minutes_of_training"]
    given = peer_methods.Settings(opened, texts, tuning, minutes, args.trial_minutes, tell)
    sources = [(None, our_methods(opened, kind, heads, calibration)), ("transformers", stock_methods(given))]
    contenders, work = [], dict[str, Json]()
    for package, methods in [*sources, *((name, METHODS[name](given)) for name in packages)]:
        for name, method, its in counted(opened, methods, package, given.found):
            tell(f"{name}: {its}")
            contenders.append(Contender(name, method))
            work[name] = its
    run_rounds(
        contenders, [[prompt] for prompt in opened.prompts], args.rounds, clock=stopwatch(opened.loaded.model.device)
    )
    rows = {}
    for name, its in summarize(contenders, [record.category for record in opened.records]).items():
        sets = {one: [part.speedup, part.speedup_interval] for one, part in its.by_category.items()}
        speed = {"tokens_per_second": its.tokens_per_second.median, "speedup": its.speedup}
        equal = {"equal": round(its.equal_to_plain * len(opened.prompts)), "texts": len(opened.prompts)}
        rows[name] = speed | {"speedup_interval": its.speedup_interval, "sets": sets} | equal | work[name]
    about = {"model": without_folder(args.model), "heads": kind, "dtype": args.dtype, "tokens": args.tokens}
    about |= {"minutes": minutes, "trial_minutes": args.trial_minutes, "packages": {n: version(n) for n in packages}}
    return {"machine": asdict(machine()), "commit": commit(), "settings": about, "rows": rows, "chosen": given.found}


def report(found: Json) -> str:
    """Format the results as one page of tables."""
    rows, plain, about = found["rows"], found["rows"]["plain"], found["settings"]
    sets = list(plain["sets"])
    speeds = [
        [
            PLAIN.get(name, name),
            f"{its['tokens_per_second']:.1f}",
            value_of(its["speedup"], its["speedup_interval"]),
            *(value_of(*its["sets"][one]) for one in sets),
            f"{its['equal']} of {its['texts']}",
        ]
        for name, its in rows.items()
    ]
    figures = ("tau", "layers", "drafter_layers", "heads_read", "head_vectors", "all_layers")
    for its in rows.values():
        its["all_layers"] = (its["layers"] + its["drafter_layers"]) / plain["layers"]
    work = [[PLAIN.get(name, name), *(f"{its[key]:.2f}" for key in figures)] for name, its in rows.items()]
    packages = ", ".join(f"{name} {its}" for name, its in about["packages"].items())
    lines = [f"- {name}: {json.dumps(its)}" for name, its in found["chosen"].items()]
    parts = [
        f"# {about['model']} in {about['dtype']}: this toolkit beside {packages}",
        f"{found['machine']['processor']}, one thread, CPU time, {plain['texts']} greedy texts of at most "
        f"{about['tokens']} tokens. Heads learned for {about['minutes']:g} CPU minutes. "
        "Brackets hold 95 % intervals over prompts.",
        markdown_table(
            ["method", "tokens/s", "x plain, all", *(f"x plain, {one}" for one in sets), "same text"], speeds
        ),
        "Work for each new token. tau: tokens for each forward of the model. Layers: applications of a decoder layer "
        "to a token; those of a drafter are computed from its products. LM heads read: rows in all calls, by the "
        "vocabulary. Vectors: products of a whole LM head and a vector. The model's layers on a prompt are left out.",
        markdown_table(
            ["method", "tau", "layers", "layers of the drafter", "LM heads read", "vectors", "layers, x plain"], work
        ),
        "## Chosen settings, and failures",
        "\n".join(lines),
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="a folder or a Hub id")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folders of prompts")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the run of real_model.py")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="write peers.md and peers.json here")
    parser.add_argument("--kind", metavar="KIND", help="our heads (default: the fastest of the run)")
    parser.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="default: bfloat16")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="as of the run")
    parser.add_argument("--minutes", type=float, metavar="M", help="CPU minutes to train (default: as the run)")
    parser.add_argument("--trial-minutes", type=float, default=1.0, metavar="M", help="for each rate (default: 1)")
    parser.add_argument("--each", type=int, default=12, metavar="N", help="prompts of each set (default: 12)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of a text, at most (default: 96)")
    parser.add_argument("--tuning", type=int, default=6, metavar="N", help="prompts to tune decoding on (default: 6)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="decode all prompts N times (default: 1)")
    args = parser.parse_args(argv)
    packages = installed()
    if not (args.run / "fit.json").exists():
        raise RequestError(f"--run {args.run} holds no run of real_model.py")
    found = compare(args, packages)
    write_text(args.output / "peers.json", json.dumps(found, indent=2) + "\n")
    write_text(args.output / "peers.md", page := report(found))
    print(page)


if __name__ == "__main__":
    run_script(main)
