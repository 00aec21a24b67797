"""The output file of `medusa distill`. A run may stop at any time, and the next run continues the file."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from medusa.commands.distill.tasks import Task
from medusa.commands.options import Output
from medusa.errors import RequestError, RunError
from medusa.files import Json, lock
from medusa.records.messages import REASONING
from medusa.records.sources import FAILED

CHECKED = 32  # the first answers; a run ends if most of them are empty
Key = tuple[int, int]
"""The index of a prompt, and a turn of its conversation."""


class ShortAnswersError(RunError):
    """Error for a run in which most of the first answers are empty or one token long."""


class Journal:
    """The output file of `medusa distill`, with one line for each finished text, in the order of completion.

    Each line is flushed at once, so a killed run loses at most one text, which the next run generates again. A second
    file lists the texts that failed, with the reasons."""

    def __init__(self, path: Path, tasks: list[Task], overwrite: bool = False) -> None:
        """Read the answers to `tasks` that `path` already has, or with `overwrite` delete them.

        Raise RequestError for a line in another format, or if another process is writing the file."""
        self.path, self.failed_path, self.tasks = path, path.with_suffix(FAILED), tasks
        self.total = sum(task.turns for task in tasks)  # the number of texts, with those to generate
        self.conversations = {task.index for task in tasks if task.turns > 1}
        self.done: dict[Key, Json | None] = {}
        self.reasons: Counter[str] = Counter()  # the number of texts for each finish reason
        self.first = {(task.index, 0): False for task in tasks[:CHECKED]}  # whether it is empty or one token long
        self.tokens = 0  # the number of tokens in all answers
        self._lock = threading.Lock()
        self._start = perf_counter()
        self._advance: Callable[..., None]  # advances the progress bar by a number of texts, under a title
        self._file = path.open("a", encoding="utf-8")
        if not lock(self._file.fileno(), wait=False):
            self._file.close()
            raise RequestError(f"another process is writing {path}; wait until it ends, or choose another file")
        if overwrite:
            self._file.truncate(0)
        self._read()
        self._tokens_before, self._done_before = self.tokens, len(self.done)
        self._running = 0.0, 0  # finished parts of texts that are being written, and their tokens
        self._drawn = 0.0  # texts that the progress bar shows

    def _read(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # a killed run did not finish this line
                try:
                    row = json.loads(line)
                    self._remember((row["index"], row["turn"]), row)
                except (ValueError, KeyError, TypeError):
                    raise RequestError(
                        f"{self.path}:{number} was not written by medusa distill; remove the line or add --overwrite"
                    ) from None
                whole += len(line)
        if whole < self.path.stat().st_size:
            with self.path.open("r+b") as cut:
                cut.truncate(whole)

    def _remember(self, key: Key, row: Json) -> None:
        self.done[key] = _reply(row) if key[0] in self.conversations else None  # later turns need the answers
        self.reasons[row["finish_reason"]] += 1
        if key in self.first:
            self.first[key] = _is_short(row)
        self.tokens += row.get("tokens", 0) + len(row.get("input_ids", ())) - row.get("prompt_tokens", 0)

    @property
    def new_tokens(self) -> int:
        """The number of tokens that this run has generated."""
        return self.tokens - self._tokens_before

    @contextmanager
    def opened(self, output: Output) -> Iterator[None]:
        """Open the file for new texts inside this context, and show a progress bar of all texts on the console."""
        self.failed_path.unlink(missing_ok=True)  # this run tries the failed texts again
        with self._file, output.progress_bars() as start:
            self._start = perf_counter()
            self._advance = start("generating", self.total)
            self._draw()
            yield

    def show(self, lengths: Sequence[int], most: int) -> None:
        """Show how far texts are that have so many tokens, of at most `most`."""
        with self._lock:
            written, ended = sum(lengths), len(self.done) - self._done_before
            # As if each token ended a text with the same probability: those that run count for it, too.
            rest = (self.new_tokens + written) / ended if ended else most
            self._running = sum(length / min(length + rest, most) for length in lengths), written
            self._draw()

    def answers(self, index: int, turn: int) -> list[Json] | None:
        """Return the answers before `turn` in a conversation, as messages; `None` if one is missing."""
        found = [self.done.get((index, earlier)) for earlier in range(turn)]
        return [answer for answer in found if answer is not None] if None not in found else None

    def append(self, task: Task, turn: int, row: Json) -> None:
        """Write the answer to one turn of a task, unless the journal already has it.

        Raise ShortAnswersError if this ends the answers to the first 32 prompts, and most of them are short."""
        key = task.index, turn
        line: Json = {"index": task.index, "turn": turn} | row
        if task.category is not None:
            line["category"] = task.category
        if task.raw_prompt is not None:
            line["raw_prompt"] = task.raw_prompt
        if task.template_options:
            line["chat_template_kwargs"] = task.template_options
        with self._lock:
            if key in self.done:
                return
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
            self._remember(key, line)
            self._draw()
            if key in self.first:
                self._check_answers()

    def _check_answers(self) -> None:
        # Not the answers that end first, among which short ones are most frequent.
        found, short = len(self.first), sum(self.first.values())
        if short > found / 2 and self.first.keys() <= self.done.keys():
            which = "" if found == len(self.tasks) else "first "
            raise ShortAnswersError(f"{short} of the {which}{found} answers are empty or one token long")

    def _draw(self) -> None:
        """Show the finished texts, and parts of those that are being written."""
        texts, tokens = self._running
        speed = (self.new_tokens + tokens) / max(perf_counter() - self._start, 1e-9)
        before, self._drawn = self._drawn, max(self._drawn, len(self.done) + texts)
        self._advance(self._drawn - before, f"generating, {speed:,.0f} tokens/s" if speed else "generating")

    def fail(self, task: Task, turn: int, reason: str) -> None:
        """Add a text that could not be generated, with the reason, to the file of failed texts."""
        row = {"index": task.index, "turn": turn, "where": task.where, "error": reason}
        with self._lock, self.failed_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.first.pop((task.index, turn), None)  # the others are judged without it


def _reply(row: Json) -> Json:
    """Return the answer of a row as the message that later questions follow: with its special tokens and thoughts."""
    spoken = {"role": "assistant", "content": row["answer"]}  # older files have no replies
    return row["messages"][-1] if "messages" in row else row.get("reply", spoken)


def _is_short(row: Json) -> bool:
    """Whether an answer ended with at most one token. Of a server's message only the text is known: is it empty?"""
    if "prompt" in row:  # a question, which is never empty
        return False
    if "input_ids" not in row:
        said = row["messages"][-1]
        return not (str(row["answer"]).strip() or said.get("tool_calls") or said.get(REASONING[0]))
    written = len(row["input_ids"]) - row["prompt_tokens"] - (row["finish_reason"] == "eos")
    return row["finish_reason"] != "length" and written <= 1
