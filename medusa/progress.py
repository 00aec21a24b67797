"""Progress of long work on standard error: bars and spinners in a terminal, else a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

EVERY = 10.0  # seconds between two lines


class Stage(Protocol):
    """Work of unknown length, whose message can be changed while it runs."""

    def update(self, status: str) -> None:
        """Show another message."""


class ProgressLines(Progress):
    """A rich `Progress` that prints a line if its console is no terminal: at most one every ten seconds.

    A line is printed when a task advances, not by a thread, so that a failed run leaves no thread running."""

    def __init__(
        self, *columns: str | ProgressColumn, quiet: bool = False, title: str = "", transient: bool = False
    ) -> None:
        """Make a progress display on standard error, or none with `quiet`.

        `title` starts the lines if the descriptions of the tasks do not name the work."""
        console = Console(stderr=True, quiet=quiet)
        self._title, self._printed = title, time.monotonic()
        self._prints_lines = not quiet and not console.is_terminal
        super().__init__(*columns, console=console, disable=quiet or self._prints_lines, transient=transient)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task by a number of items."""
        super().advance(task_id, advance)
        self._print()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, with the keywords of `rich.progress.Progress.update`."""
        super().update(task_id, **changes)
        self._print()

    def _print(self) -> None:
        """Print a line if the last one is at least ten seconds old."""
        now = time.monotonic()
        if self._prints_lines and now - self._printed >= EVERY and (line := self._describe()):
            self._printed = now
            print(line, file=sys.stderr, flush=True)

    def _describe(self) -> str:
        """Describe the tasks that are not finished, in one line."""
        parts = []
        for task in self.tasks:
            if task.finished:
                continue
            name = f"{self._title}: " if self._title else f"{task.description}: "
            left = "" if task.time_remaining is None else f", about {_clock(task.time_remaining)} left"
            done = f"{task.completed:,.0f}" + ("" if task.total is None else f" of {task.total:,.0f}")
            further = f"  {task.description}" if self._title and task.description else ""
            parts.append(f"{name}{done}, {_clock(task.elapsed or 0)} elapsed{left}{further}")
        return "; ".join(parts)


@contextlib.contextmanager
def stage(message: str, quiet: bool = False) -> Iterator[Stage]:
    """Show a message while work of unknown length runs: with a spinner in a terminal, else every ten seconds."""
    console = Console(stderr=True, quiet=quiet)
    if console.is_terminal:
        with console.status(message) as status:
            yield status
        return
    lines = _StageLines(message)
    if not quiet:
        lines.start()
    try:
        yield lines
    finally:
        lines.ended.set()


class _StageLines(threading.Thread):
    """A thread that prints the latest message of a stage, because a stage may not change it for long."""

    def __init__(self, message: str) -> None:
        super().__init__(daemon=True)
        self.message, self.ended = message, threading.Event()

    def update(self, status: str) -> None:
        """Store another message for the next line."""
        self.message = status

    def run(self) -> None:
        while not self.ended.wait(EVERY):
            print(f"{self.message} ...", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    """Format a time in seconds as minutes and seconds, such as 2:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
