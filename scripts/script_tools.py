"""Helpers that several scripts share: parser, exit status, subprocesses, records and Markdown tables."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from medusa.commandline import OneLineParser, exit_status
from medusa.errors import RequestError, RunError
from medusa.files import write_text
from medusa.records.sources import DOCUMENT_SEPARATOR, read_records


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser whose help shows `description`, usually the script's docstring, with its line breaks."""
    return OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit as the `medusa` commands do: status 2 and one line after a wrong request."""
    sys.exit(exit_status(Path(sys.argv[0]).stem, main))


def medusa(command: str, *more: object) -> None:
    """Run `medusa` in a separate process; the words of `command` come first, then the arguments `more`."""
    run_program([sys.executable, "-m", "medusa", *command.split(), *map(str, more)])


def run_program(words: Sequence[str]) -> None:
    """Run a program; raise RunError if it fails, after it has printed the reason."""
    if status := subprocess.run(words, check=False).returncode:
        raise RunError(f"{shlex.join(words)} ended with status {status}")


def write_jsonl(path: Path, key: str, values: Iterable[object]) -> Path:
    """Write a record {key: value} for each of `values` to a JSON Lines file, and make its folder; return `path`."""
    write_text(path, "".join(json.dumps({key: value}) + "\n" for value in values))
    return path


def read_documents(source: str, limit: int | None = None) -> list[str]:
    """Read the first `limit` documents of a file, a folder or a Hub dataset; empty documents are left out.

    Raise RequestError for a record that is no document, such as a conversation, and if all documents are empty."""
    found = []
    for record in islice(read_records(source, separator=DOCUMENT_SEPARATOR), limit):
        if record.text is None or record.answer is not None:
            raise RequestError(f"{record.where} is no plain text; give records with `text`, or a .txt file")
        if text := record.text.strip():
            found.append(text)
    if not found:
        raise RequestError(f"{source} holds no text")
    return found


def write_page(description: str | None, page: Path, content: Callable[[], str], argv: Sequence[str] | None) -> None:
    """Write a generated page; such a script has no options but --help."""
    script_parser(description).parse_args(argv)
    write_text(page, content())


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
