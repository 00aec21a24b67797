"""A growing JSONL file whose lines say which text they hold, so that work can stop at any moment and go on."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import IO, Any

from medusa.errors import RequestError
from medusa.records.sources import FAILED

Key = tuple[int, int]
"""Index of the prompt, and its turn."""


class Journal:
    """The texts of a `medusa distill`, in the order in which they were finished.

    Each line is written in one piece and handed to the system at once: killed at any moment, a run loses no more than
    the line that it was writing, and the next one writes that again. What could not be had is kept in a file beside it.
    """

    def __init__(self, path: Path, keep: Container[int] = ()) -> None:
        """Reads what is there already; of the prompts in `keep` the answers are remembered, for the turns after them.

        Raises:
            RequestError: a line that no run of ours wrote."""
        self.path, self.failed_path, self.keep = path, path.with_suffix(FAILED), keep
        self.done: dict[Key, str | None] = {}
        self.reasons: Counter[str] = Counter()
        """How the texts ended."""
        self.failed: set[Key] = set()
        self.new_tokens = 0
        """Of this run."""
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        if path.exists():
            self._read()

    def _read(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # what a killed run was writing
                try:
                    row = json.loads(line)
                    self._remember((row["index"], row["turn"]), row)
                except (ValueError, KeyError, TypeError):
                    raise RequestError(
                        f"{self.path}:{number} was not written by medusa distill; take the line out or add --overwrite"
                    ) from None
                whole += len(line)
        if whole < self.path.stat().st_size:
            with self.path.open("r+b") as cut:
                cut.truncate(whole)

    def _remember(self, key: Key, row: dict[str, Any]) -> None:
        self.done[key] = row["answer"] if key[0] in self.keep else None
        self.reasons[row["finish_reason"]] += 1

    def __enter__(self) -> Journal:
        self.failed_path.unlink(missing_ok=True)  # they are tried again
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *exception: Any) -> None:
        assert self._file is not None
        self._file.close()

    def answers(self, index: int, turn: int) -> list[str] | None:
        """The answers before `turn`; `None` where one is missing."""
        found = [self.done.get((index, earlier)) for earlier in range(turn)]
        return [answer for answer in found if answer is not None] if None not in found else None

    def append(self, index: int, turn: int, row: dict[str, Any], new_tokens: int = 0) -> None:
        """Write one text; a text that is there already is not written twice."""
        assert self._file is not None
        line = json.dumps({"index": index, "turn": turn} | row, ensure_ascii=False) + "\n"
        with self._lock:
            if (index, turn) in self.done:
                return
            self._file.write(line)
            self._file.flush()
            self._remember((index, turn), row)
            self.new_tokens += new_tokens

    def fail(self, index: int, turn: int, where: str, reason: str) -> None:
        """Keep what could not be had, and why."""
        line = json.dumps({"index": index, "turn": turn, "where": where, "error": reason}, ensure_ascii=False) + "\n"
        with self._lock, self.failed_path.open("a", encoding="utf-8") as file:
            file.write(line)
            self.failed.add((index, turn))
