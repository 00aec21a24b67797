"""The `medusa` command. Each sub-command is a module of `medusa.commands`, imported only when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import medusa
from medusa.commandline import OneLineParser, exit_status

COMMANDS = {
    "demo": "the whole story in one command, offline, on the embedded backbone",
    "info": "what a set of heads is: kind, shapes, tree, backbone, recipe",
    "train": "fit heads on a frozen backbone",
    "generate": "text from a prompt, streamed",
    "chat": "a conversation in the terminal, or in the browser (--web)",
    "serve": "an OpenAI-compatible server",
    "evaluate": "how often each head's top guesses are the backbone's own tokens",
    "calibrate": "the best tree for these heads on this machine",
    "benchmark": "speedup, tokens per step, and where the time goes",
    "verify": "evidence that decoding with heads changes nothing",
    "distill": "training data in the backbone's own words",
    "export": "heads in the form that a server or another toolkit loads",
    "datastore": "text to look up what comes next, for --drafter rest:DIR",
}

EPILOG = """\
Start with `medusa demo`. Results go to standard output, progress and warnings to standard error.
Exit status: 0 done, 1 the run failed, 2 the request was wrong.
"""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; only the options of `command` are filled in, as only its module is imported."""
    parser = OneLineParser(
        prog="medusa",
        description="Train Medusa heads on a frozen language model, decode with them, measure the speedup.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"medusa {medusa.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = import_module(f"medusa.commands.{name}") if name == command else None
        description = (module.__doc__ or summary) if module else summary
        sub = commands.add_parser(
            name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if module:
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def in_our_place() -> str | None:
    """What stands in the place of one of our packages and the way out, in a line; nothing where all are ours.

    A `train.py` in the folder from which `python -m medusa` or `torchrun -m medusa` is called is found before ours, and
    another distribution may have installed a package of one of our names.
    """
    if "MedusaHeads" not in getattr(medusa, "__all__", ()):
        return f"{medusa.__file__} is another distribution's; install medusa-heads in an environment of its own"
    home = Path(__file__).resolve().parents[1]
    for name in ("train", "decode"):
        spec = find_spec(name)
        found = spec.origin or next(iter(spec.submodule_search_locations or ()), "nowhere") if spec else "nowhere"
        if Path(found).resolve() != home / name / "__init__.py":
            return (
                f"the package {name!r} is found at {found}, not beside {home / 'medusa'}; run from another folder or "
                "with PYTHONSAFEPATH=1 if that is yours, else install medusa-heads in an environment of its own"
            )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run `medusa` with `argv`; returns the exit status."""
    if reason := in_our_place():
        print(f"medusa: error: {reason}", file=sys.stderr)
        return 2
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    parser = build_parser(command if command in COMMANDS else None)
    args, rest = parser.parse_known_args(arguments)
    if rest and hasattr(args, "overrides") and not any(word.startswith("-") for word in rest):
        args.overrides += rest  # argparse takes key=value behind an option for a stranger
    elif rest:
        parser.error(f"unknown words: {' '.join(rest)}")
    args.words = arguments  # what results say they were made by
    return exit_status(f"medusa {args.command}", lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
