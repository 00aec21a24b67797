"""What several scripts share. Scripts import it by its bare name, since it lies in their folder."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from medusa.commandline import OneLineParser, exit_status


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows `description`, the script's docstring, as it is written."""
    return OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit: status 2 and one line after a wrong request, as the `medusa` commands do."""
    sys.exit(exit_status(Path(sys.argv[0]).stem, main))


def medusa(command: str, *more: object) -> None:
    """Run `medusa` in a separate process with the arguments in `command`, then `more` arguments as they are."""
    subprocess.run([sys.executable, "-m", "medusa", *command.split(), *map(str, more)], check=True)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def write_jsonl(path: Path, records: Iterable[dict[str, object]]) -> None:
    """Write one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(["n", "ms"], [[1, 2.5]]))
    | n | ms |
    |---|---|
    | 1 | 2.5 |
    """
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
