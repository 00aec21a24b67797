"""Who writes for `medusa distill`: this machine, in batches, or a server, many questions at a time."""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, Any

from medusa.commands import common
from medusa.commands.distill.client import Answer, Server, ServerError
from medusa.commands.distill.journal import Journal
from medusa.commands.distill.tasks import Task
from medusa.errors import RequestError, RunError
from medusa.records.record import continuation_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from decode.bench.methods import Method
    from decode.results import Result
    from decode.settings import Settings
    from medusa.loading import Loaded

HOPELESS = 16  # texts in a row that a server did not give: it is gone


class LocalEngine:
    """Batches on this machine; with heads, in the tree decoding that they speed up."""

    def __init__(self, args: argparse.Namespace, loaded: Loaded, method: Method, settings: Settings) -> None:
        self.args, self.loaded, self.method, self.settings = args, loaded, method, settings
        self.tokenizer = loaded.tokenizer

    def begin(self) -> list[int]:
        return begin_with(self.loaded.bos_token_id, self.loaded.name)

    def check(self, tasks: list[Task]) -> None:
        """Raises:
        RequestError: a prompt that the backbone cannot take."""
        from decode.request import require_fitting
        from medusa.backbone import Backbone

        backbone = Backbone(self.loaded.model)
        for task in tasks:
            try:
                require_fitting([task.prompt([], self.tokenizer)], backbone)
            except RequestError as error:
                raise RequestError(
                    str(error) if str(error).startswith(task.where) else f"{task.where}: {error}"
                ) from None

    def write(self, tasks: list[Task], journal: Journal, seconds_at_most: float = float("inf")) -> float:
        """Answer what is not answered yet, all first questions before all second ones; returns seconds of decoding.

        No batch is begun after `seconds_at_most`.
        """
        from transformers import set_seed

        seconds = 0.0
        total = sum(task.turns for task in tasks)
        with _progress(self.args, total, len(journal.done)) as advance:
            for seed, turn, batch in self._batches(tasks, journal):
                if seconds > seconds_at_most:
                    break
                known = len(journal.done)
                prompts = self._prompts(batch, turn, journal)
                if prompts:
                    set_seed(seed)  # what a batch holds does not depend on where an earlier run stopped
                    results = self.method(list(prompts.values()), None)
                    seconds += results[0].seconds
                    for index, result in zip(prompts, results, strict=True):
                        journal.append(index, turn, self._line(tasks[index], result), len(result.new_ids))
                advance(len(journal.done) - known)
        return seconds

    def _batches(self, tasks: list[Task], journal: Journal) -> Iterator[tuple[int, int, list[Task]]]:
        """(seed, turn, tasks) of every batch in which an answer is missing.

        Greedy answers do not depend on the batch that they are in, so only missing ones are asked for. Sampled ones
        do: their batches are always the same, and what is there already is drawn again and not written again.
        """
        size = self.args.batch_size
        for turn in range(max((task.turns for task in tasks), default=0)):
            asked = [task for task in tasks if task.turns > turn]
            if not self.settings.do_sample:
                asked = [task for task in asked if (task.index, turn) not in journal.done]
            for number, batch in enumerate(common.batches(asked, size)):
                if any((task.index, turn) not in journal.done for task in batch):
                    yield (self.args.seed + turn * len(tasks) + number * size) % 2**32, turn, batch

    def _prompts(self, batch: list[Task], turn: int, journal: Journal) -> dict[int, list[int]]:
        """The ids to continue, by index; a conversation that has outgrown the context is kept as failed."""
        from decode.request import require_fitting
        from medusa.backbone import Backbone

        out = {}
        for task in batch:
            answers = journal.answers(task.index, turn)
            if answers is None:
                continue  # the turn before has failed
            try:
                prompt = task.prompt(answers, self.tokenizer)
                require_fitting([prompt], Backbone(self.loaded.model))
            except RequestError as error:
                journal.fail(task.index, turn, task.where, str(error))
            else:
                out[task.index] = prompt
        return out

    def _line(self, task: Task, result: Result) -> dict[str, Any]:
        from decode.results import text_of

        answer = text_of(result.new_ids, self.tokenizer, self.settings.stop)
        return _line_of_ids(task, result.input_ids, result.new_ids, answer, result.finish_reason)


class ServerEngine:
    """Many questions at a time to an OpenAI-compatible server, whose model is the backbone.

    A text goes out as ids, and its continuation comes back as text: its ids are the tokenizer's. A conversation goes
    out as messages, and is written as messages: training puts it through the chat template.
    """

    def __init__(
        self, args: argparse.Namespace, server: Server, tokenizer: PreTrainedTokenizerBase | None, settings: Settings
    ) -> None:
        self.args, self.server, self.tokenizer, self.settings = args, server, tokenizer, settings
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._lost = 0  # texts in a row that could not be had
        server.sleep = self._stop.wait  # no thread waits for an attempt that nobody wants any more

    def begin(self) -> list[int]:
        from medusa.loading import bos_token_id, load_config

        config = load_config(self.args.backbone, common.load_options(self.args))
        return begin_with(bos_token_id(self.tokenizer, config), self.args.backbone)

    def check(self, tasks: list[Task]) -> None:
        """Raises:
        RequestError: texts whose ids nobody here can tell."""
        text = next((task for task in tasks if task.ids is not None), None)
        if text is not None and self.tokenizer is None:
            raise RequestError(f"{text.where}: {self.args.backbone} has no tokenizer for what the server writes")

    def write(self, tasks: list[Task], journal: Journal) -> float:
        """Answer what is not answered yet; returns seconds."""
        start, total = perf_counter(), sum(task.turns for task in tasks)
        waiting = iter(
            task for task in tasks if any((task.index, turn) not in journal.done for turn in range(task.turns))
        )
        with (
            _progress(self.args, total, len(journal.done)) as advance,
            ThreadPoolExecutor(self.args.concurrency) as pool,
        ):
            workers = [pool.submit(self._work, waiting, journal, advance) for _ in range(self.args.concurrency)]
            try:
                for worker in workers:
                    worker.result()
            finally:
                self._stop.set()
        return perf_counter() - start

    def _work(self, waiting: Iterator[Task], journal: Journal, advance: Callable[[int], None]) -> None:
        while not self._stop.is_set():
            with self._lock:
                task = next(waiting, None)
            if task is None:
                return
            self._converse(task, journal, advance)

    def _converse(self, task: Task, journal: Journal, advance: Callable[[int], None]) -> None:
        for turn in range(task.turns):
            if (task.index, turn) in journal.done:
                continue
            try:
                line, new_tokens = self._ask(task, turn, journal.answers(task.index, turn) or [])
            except ServerError as error:
                if self._stop.is_set():
                    return  # it was not waited for to the end
                journal.fail(task.index, turn, task.where, str(error))
                self._count_lost(str(error))
                return
            journal.append(task.index, turn, line, new_tokens)
            advance(1)
            with self._lock:
                self._lost = 0

    def _count_lost(self, reason: str) -> None:
        with self._lock:
            self._lost += 1
            lost = self._lost
        if lost >= max(HOPELESS, 2 * self.args.concurrency):
            self._stop.set()
            raise RunError(
                f"{lost} texts in a row could not be had, the last one for this reason: {reason}; what was written is "
                "kept, and the same command goes on from there"
            )

    def _ask(self, task: Task, turn: int, answers: list[str]) -> tuple[dict[str, Any], int]:
        """The line of one answer, and how many tokens it has as far as that is known."""
        options = self._options(task, turn)
        if task.ids is not None:
            answer = self.server.complete(task.ids, options)
            reason = self._reason(answer)
            new_ids = self._continuation(task.ids, answer.text, ended=reason == "eos")
            return _line_of_ids(task, task.ids, new_ids, answer.text, reason), len(new_ids)
        messages = task.messages(answers)
        answer = self.server.chat(messages, task.tools, options)
        said = {"role": "assistant", "content": answer.text} | answer.beside
        line: dict[str, Any] = {"messages": [*messages, said], "teach": "last"}
        line |= {"answer": answer.text, "finish_reason": self._reason(answer)}
        line |= {"tools": task.tools} if task.tools else {}
        return line | ({"category": task.category} if task.category is not None else {}), 0

    def _options(self, task: Task, turn: int) -> dict[str, Any]:
        """OpenAI's names; what is not among them (top_k and the like) is sent only where it was asked for."""
        ours = self.settings
        options: dict[str, Any] = {"max_tokens": ours.max_new_tokens, "temperature": ours.temperature}
        if ours.do_sample:
            options |= {"top_p": ours.top_p, "seed": (self.args.seed + 1000 * task.index + turn) % 2**31}
        if ours.stop:
            options["stop"] = list(ours.stop)
        beyond = {
            "top_k": ours.top_k or None,
            "repetition_penalty": ours.repetition_penalty if ours.repetition_penalty != 1 else None,
            "ignore_eos": ours.ignore_eos or None,
        }
        return options | {name: value for name, value in beyond.items() if value is not None}

    def _reason(self, answer: Answer) -> str:
        """In our words. Few servers say which of its ends a text came to; with stop strings it may be any of them."""
        if answer.finish_reason == "stop":
            return "stop" if answer.stopped_by is not None or self.settings.stop else "eos"
        return "eos" if answer.finish_reason == "tool_calls" else answer.finish_reason

    def _continuation(self, prompt: list[int], text: str, ended: bool) -> list[int]:
        assert self.tokenizer is not None  # see `check`
        ids = continuation_ids(prompt, text, self.tokenizer)
        end = self.tokenizer.eos_token_id
        return [*ids, end] if ended and end is not None else ids


@contextlib.contextmanager
def _progress(args: argparse.Namespace, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar of texts on standard error, and what moves it on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=common.console(args), disable=args.quiet) as progress:
        bar = progress.add_task("", total=total, completed=done)
        yield lambda count: progress.advance(bar, count)


def _line_of_ids(task: Task, prompt: list[int], new_ids: list[int], answer: str, reason: str) -> dict[str, Any]:
    line = {"input_ids": prompt + new_ids, "prompt_tokens": len(prompt), "answer": answer, "finish_reason": reason}
    return line if task.category is None else line | {"category": task.category}


def begin_with(bos: int | None, name: str) -> list[int]:
    """The BOS token, from which a text begins where nothing is given.

    Raises:
        RequestError: the backbone `name` has none.
    """
    if bos is None:
        raise RequestError(f"{name} has no BOS token to start from; give --self-talk-seeds FILE or --prompts FILE")
    return [bos]
