"""The `medusa` command. Each sub-command is a module in `medusa.commands` with an options class and `run(options)`."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import medusa
from medusa.commandline import OneLineParser, exit_status, until_pipe_closes
from medusa.errors import RequestError, choose_one_of

COMMANDS = {
    "fit": "make heads for a model in one command, and measure",
    "demo": "try the whole workflow offline on a shipped model",
    "info": "describe heads: kind, shapes, tree, backbone",
    "train": "train heads on a frozen backbone",
    "generate": "generate text from prompts",
    "chat": "chat in the terminal, or in the browser (--web)",
    "serve": "serve an OpenAI-compatible API",
    "evaluate": "measure how often the guesses of heads are right",
    "calibrate": "find the fastest tree for heads on this machine",
    "benchmark": "measure the speedup, and where the time goes",
    "verify": "test that heads, or a server, write the model's text",
    "distill": "generate training data with the backbone",
    "export": "convert heads to the format of a server",
    "datastore": "build a datastore for --drafter rest:DIR",
}
SEVERAL = ("train", "info")  # commands that may run as several processes

PURPOSE = """\
Train Medusa heads on a frozen language model, decode with them, and measure
the speedup.

commands:"""

EPILOG = """\
Start with `medusa demo`. Each command has --help (one screen) and --help-all.
Results go to standard output, progress and warnings to standard error.
Exit status: 0 done, 1 the run failed, 2 the request was wrong.
"""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of all sub-commands. Only `command` (default: none) is imported and gets its options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        prog="medusa",
        description=PURPOSE + "".join(f"\n  {name:<11}{summary}" for name, summary in COMMANDS.items()),
        epilog=EPILOG,
        formatter_class=formatter,
        usage="medusa COMMAND ...",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="show this list")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"medusa {medusa.__version__}", help="show the version")
    commands = parser.add_subparsers(
        prog="medusa", dest="command", metavar="COMMAND", help=argparse.SUPPRESS, required=True
    )
    for name in COMMANDS:
        sub = commands.add_parser(name, formatter_class=formatter, add_help=False)
        if name == command:
            from medusa.arguments import add_arguments, add_help, read

            module = import_module(f"medusa.commands.{name}")
            kind = getattr(module, module.run.__annotations__["options"])
            add_help(sub, kind, str(module.__doc__))
            add_arguments(sub, kind)
            sub.set_defaults(run=lambda args, kind=kind, run=module.run: run(read(kind, args).completed()))
    return parser


def foreign_package() -> str | None:
    """Return an error message if another package shadows `medusa`, `train` or `decode`, else `None`.

    `python -m medusa` and `torchrun -m medusa` find a `train.py` in the current folder before our package `train`.
    Another distribution may also have installed a package of the same name."""
    if "MedusaHeads" not in getattr(medusa, "__all__", ()):
        return f"{medusa.__file__} belongs to another distribution; install medusa-heads in an environment of its own"
    home = Path(__file__).resolve().parents[1]
    for name in ("train", "decode"):
        spec = find_spec(name)
        found = spec.origin or next(iter(spec.submodule_search_locations or ()), "nowhere") if spec else "nowhere"
        if Path(found).resolve() != home / name / "__init__.py":
            return (
                f"the package {name!r} was found at {found}, not next to {home / 'medusa'}; if that file is yours, run "
                "from another folder or set PYTHONSAFEPATH=1, else install medusa-heads in an environment of its own"
            )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `medusa` command with the arguments `argv` (by default `sys.argv`) and return the exit status."""
    if reason := foreign_package():
        print(f"medusa: error: {reason}", file=sys.stderr)
        return 2
    arguments = list(sys.argv[1:] if argv is None else argv)
    return until_pipe_closes(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    """Parse the arguments of the `medusa` command, run its sub-command, and return the exit status."""
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns of missing CUDA kernels
        logging.getLogger(name).setLevel(logging.ERROR)
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = build_parser(command)
    if not arguments:
        parser.print_help()
        return 0
    if command is not None and command not in COMMANDS:
        parser.error(f"there is no command {command!r}; {choose_one_of(command, COMMANDS)}")
    args = parser.parse_args(arguments)
    args.command_line = shlex.join(["medusa", *arguments])  # is written into results

    def run() -> int | None:
        _require_one_process(args.command)
        return args.run(args)

    return exit_status(f"medusa {args.command}", run)


def _require_one_process(command: str) -> None:
    """Raise RequestError if a launcher has started several processes of a command that runs as one.

    They would write the same files, and torchrun ends all of them as soon as one of them fails."""
    started = os.environ.get("WORLD_SIZE", "")
    if command not in SEVERAL and started.isdecimal() and int(started) > 1:
        way = "start it without torchrun; for several GPUs, add --device auto, or train by torchrun -m medusa train"
        raise RequestError(f"medusa {command} runs as one process, and a launcher started several; {way}")


if __name__ == "__main__":
    sys.exit(main())
