"""What several scripts share. Scripts import it by its bare name, since it lies in their folder."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from medusa.commandline import OneLineParser, exit_status


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows `description`, the script's docstring, as it is written."""
    return OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit: status 2 and one line after a wrong request, as the `medusa` commands do."""
    sys.exit(exit_status(Path(sys.argv[0]).stem, main))


def medusa(command: str, *more: object) -> None:
    """Run `medusa` in a process of its own: the words of `command`, then `more` arguments as they are."""
    subprocess.run([sys.executable, "-m", "medusa", *command.split(), *map(str, more)], check=True)


def write_jsonl(path: Path, records: Iterable[dict[str, object]]) -> None:
    """Write one JSON object a line."""
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


def plain_table(title: str, head: Sequence[str], words: int = 1) -> Table:
    """A table for the terminal without a frame. The first `words` columns hold words, which may wrap, except names."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(head):
        is_figure = index >= words
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure or index == 0)
    return table


class PeakMemory:
    """The most bytes in use since this object was made: tensors on a GPU, resident memory on a CPU (Linux only)."""

    def __init__(self, device: torch.device | str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the high-water mark
            self.before = _resident("VmRSS")

    def grown(self) -> int:
        """Bytes by which memory in use rose at most."""
        return (torch.cuda.max_memory_allocated() if self.on_gpu else _resident("VmHWM")) - self.before


def _resident(field: str) -> int:
    """Bytes that the kernel counts under this name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
