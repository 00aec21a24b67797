"""The engines that generate the texts of `medusa distill`: batches on this machine, or many requests to a server.

An engine has one method, `write(journal)`: it generates the answers that the journal lacks, and returns the seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from transformers import set_seed

from decode.generation_config import SAMPLING, text_options, told
from decode.request import require_fitting
from decode.settings import Settings
from medusa.commands.distill.client import Server, ServerError
from medusa.commands.distill.journal import Journal
from medusa.commands.distill.tasks import Task
from medusa.commands.options import batches
from medusa.errors import RequestError, RunError
from medusa.files import Json
from medusa.loading import TextLimits
from medusa.records.pieces import text_of
from medusa.records.record import continuation_ids
from medusa.records.replies import remembered

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from decode.bench.methods import Method

SENT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}
"""Parameters of requests to a server, with the values that change nothing."""
HERE = ("acceptance", "draft", "stop_drafting", "epsilon", "delta", "compile", "cuda_graphs")
"""Settings for which no server can be asked."""
HOPELESS = 16  # failed texts in a row that end the run; with a high --concurrency more


@dataclass
class LocalEngine:
    """An engine that generates texts in batches on this machine."""

    settings: Settings
    seed: int
    tokenizer: PreTrainedTokenizerBase | None
    limits: TextLimits
    """The limits of the backbone, in whose context every prompt must fit."""
    method: Method
    batch_size: int

    def write(self, journal: Journal) -> float:
        """Generate the missing answers, turn by turn for all conversations, and return the seconds of decoding."""
        seconds, stop = 0.0, self.settings.stop or ()
        for seed, turn, batch in self._batches(journal):
            if not (prompts := self._prompts(batch, turn, journal)):
                continue
            set_seed(seed)  # a seed for each batch, so that a continued run generates the same texts
            results = self.method(list(prompts.values()))
            seconds += results[0].seconds
            for index, result in zip(prompts, results, strict=True):
                task, new_ids = journal.tasks[index], result.new_ids
                answer = text_of(new_ids, self.tokenizer, stop)
                line = _line(result.input_ids, new_ids, answer, result.finish_reason)
                if task.turns > 1 and self.tokenizer is not None:
                    ended = result.finish_reason == "eos"
                    line["reply"] = remembered(new_ids, result.input_ids, self.tokenizer, ended, stop)
                journal.append(task, turn, line)
        return seconds

    def _batches(self, journal: Journal) -> Iterator[tuple[int, int, list[Task]]]:
        """Yield the seed, the turn and the tasks of every batch that lacks an answer.

        Greedy answers do not depend on the other texts in a batch, so tasks with finished answers are left out. Sampled
        answers depend on them, so a batch with a missing answer is generated again as a whole. The journal keeps the
        answers that were finished before."""
        tasks = journal.tasks
        for turn in range(max((task.turns for task in tasks), default=0)):
            asked = [task for task in tasks if task.turns > turn]
            if not self.settings.do_sample:
                asked = [task for task in asked if (task.index, turn) not in journal.done]
            for number, batch in enumerate(batches(asked, self.batch_size)):
                if any((task.index, turn) not in journal.done for task in batch):
                    yield (self.seed + turn * len(tasks) + number * self.batch_size) % 2**32, turn, batch

    def _prompts(self, batch: list[Task], turn: int, journal: Journal) -> dict[int, list[int]]:
        """Map task indices to the token ids of prompts. Conversations that are too long are recorded as failed."""
        prompts = {}
        for task in batch:
            if (answers := journal.answers(task.index, turn)) is None:
                continue  # an earlier turn has failed
            try:
                prompts[task.index] = task.prompt(answers, self.tokenizer)
                require_fitting([prompts[task.index]], self.limits)
            except RequestError as error:
                prompts.pop(task.index, None)
                journal.fail(task, turn, str(error))
        return prompts


@dataclass
class ServerEngine:
    """An engine that sends many requests at a time to an OpenAI-compatible server, which runs the backbone.

    A text to continue is sent as token ids, and the tokenizer encodes the text of the reply. A conversation is sent
    and written to the output as messages, to which training later applies the chat template."""

    settings: Settings
    seed: int
    tokenizer: PreTrainedTokenizerBase | None
    server: Server
    concurrency: int
    parameters: Json
    """The parameters of every request (`server_parameters`)."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _failed_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.server.sleep = self._stop.wait  # the end of the run also ends the waits between attempts

    def write(self, journal: Journal) -> float:
        """Request the missing answers of all tasks, and return the seconds that this took."""
        start = perf_counter()
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:  # unless `_stop` is set, the end of the pool waits for all queued conversations
                conversations = [pool.submit(self._converse, task, journal) for task in journal.tasks]
                for conversation in as_completed(conversations):
                    conversation.result()
            finally:
                self._stop.set()
        return perf_counter() - start

    def _converse(self, task: Task, journal: Journal) -> None:
        """Request the answers of one task one after another, until a request fails or the run ends."""
        for turn in range(task.turns):
            if self._stop.is_set():
                return
            if (task.index, turn) in journal.done:
                continue
            try:
                line = self._ask(task, turn, journal.answers(task.index, turn) or [])
            except ServerError as error:
                if not self._stop.is_set():  # a failure after the end of the run does not count
                    journal.fail(task, turn, str(error))
                    self._count_failure(str(error))
                return
            journal.append(task, turn, line)
            with self._lock:
                self._failed_in_a_row = 0

    def _count_failure(self, reason: str) -> None:
        with self._lock:
            self._failed_in_a_row += 1
            failed = self._failed_in_a_row
        if failed >= max(HOPELESS, 2 * self.concurrency):
            self._stop.set()
            raise RunError(
                f"{failed} texts in a row could not be generated, the last one for this reason: {reason}; all finished "
                "texts are kept, and the same command continues"
            )

    def _ask(self, task: Task, turn: int, answers: list[Json]) -> Json:
        """Request one answer, and return its line in the output file."""
        options = dict(self.parameters)
        if self.settings.do_sample:
            options["seed"] = (self.seed + 1000 * task.index + turn) % 2**31
        if task.ids is not None:
            answer = self.server.complete(task.ids, options)
            assert self.tokenizer is not None  # or the task would have been refused
            new_ids, eos = continuation_ids(task.ids, answer.text, self.tokenizer), self.tokenizer.eos_token_id
            new_ids += [eos] if answer.finish_reason == "eos" and eos is not None else []
            return _line(task.ids, new_ids, answer.text, answer.finish_reason)
        messages = task.messages(answers)
        if task.template_options:
            options["chat_template_kwargs"] = task.template_options
        answer = self.server.chat(messages, task.tools, options)
        line: Json = {"messages": [*messages, answer.message], "teach": "last"}
        line |= {"answer": answer.text, "finish_reason": answer.finish_reason}
        return line | ({"tools": task.tools} if task.tools else {})


def server_parameters(settings: Settings, own: GenerationConfig) -> Json:
    """Return the parameters that ask a server for the texts of these settings; `own` are the checkpoint's options.

    OpenAI's API lacks some of them, such as top_k. Parameters that change nothing are not sent, unless the checkpoint
    has others, as servers take them for their defaults. Raise RequestError for what no parameter can ask for."""
    for name in HERE:
        if getattr(settings, name) != getattr(Settings, name):
            flag = f"--{name.replace('_', '-')}"
            raise RequestError(f"{flag} is for decoding on this machine; leave out {flag} or --server")
    for name, value in ({} if settings.ignore_generation_config else text_options(own)).items():
        if name not in (*SENT, "stop_strings", "remove_invalid_values", "renormalize_logits"):
            way = "add --ignore-generation-config, or leave out --server"
            raise RequestError(f"{told(name, value, own)}, for which no server can be asked; {way}")
    ours = settings.of_checkpoint(own)
    found: Json = {"max_tokens": ours.max_new_tokens, "temperature": ours.temperature}
    if ours.stop or own.stop_strings:
        found["stop"] = list(ours.stop or ())
    for name, neutral in SENT.items():
        value, theirs = getattr(ours, name), getattr(own, name, None)
        if name in SAMPLING and not ours.do_sample:
            continue
        if value != neutral or theirs not in (None, neutral):
            found[name] = -1 if (name, value) == ("top_k", 0) else value  # 0 is an error in some servers
    return found


def _line(prompt: list[int], new_ids: list[int], answer: str, reason: str) -> Json:
    """Make the line of the output file for one answer, with the token ids of prompt and answer."""
    return {"input_ids": prompt + new_ids, "prompt_tokens": len(prompt), "answer": answer, "finish_reason": reason}
