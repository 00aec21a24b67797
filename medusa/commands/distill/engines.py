"""The engines that generate the texts of `medusa distill`: batches on this machine, or many requests to a server.

An engine has one method, `write(journal)`: it generates the answers that the journal lacks, and returns the seconds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from decode.generation_config import SAMPLING, text_options, told
from decode.request import require_fitting
from decode.serve.bulk import BulkWriter, Job
from decode.settings import Settings
from decode.texts import TextGenerator, prompt_seeds
from medusa.commands.distill.client import Server, ServerError
from medusa.commands.distill.journal import Journal
from medusa.commands.distill.tasks import Task
from medusa.errors import RequestError, RunError
from medusa.files import Json
from medusa.fingerprint import known_weights
from medusa.loading import TextLimits
from medusa.quantization import quantized_layers
from medusa.records.pieces import text_of
from medusa.records.questions import QuestionForm
from medusa.records.record import continuation_ids, tokens_of
from medusa.records.replies import remembered

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

SENT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}
"""Parameters of requests to a server, with the values that change nothing."""
HERE = ("acceptance", "draft", "stop_drafting", "epsilon", "delta", "compile", "cuda_graphs", "numerics")
"""Settings for which no server can be asked."""
ATTEMPTS = 4  # at a question that is empty or does not end
NO_QUESTION = (
    f"{ATTEMPTS} questions were empty or did not end; do without this one, or give a larger --max-new-tokens with "
    "--overwrite"
)
HOPELESS = 16  # failed texts in a row that end the run; with a high --concurrency more


@dataclass
class LocalEngine:
    """An engine that generates texts on this machine, many at a time (`decode.serve.bulk`)."""

    generator: TextGenerator
    seed: int
    limits: TextLimits
    """The limits of the backbone, in whose context every prompt must fit."""
    width: int | None
    """The number of texts at a time; `None`: as many as memory and speed allow."""

    @property
    def weights(self) -> list[float]:
        """A few weights of the model, by which a continued run recognises it."""
        return known_weights(self.generator.model)

    @property
    def quantized(self) -> bool:
        """Whether the model has quantised layers, whose weights can differ a little on another device."""
        return bool(quantized_layers(self.generator.model))

    def write(self, journal: Journal) -> float:
        """Generate the missing answers, those of a conversation in turn, and return the seconds that this took."""
        start, jobs = perf_counter(), deque[Job]()
        for task in journal.tasks:
            if task.asks is None:
                self._ask(task, 0, journal, jobs.append)
            elif (task.index, 0) not in journal.done:
                self._let_ask(task, 0, journal, jobs.append)
        show = partial(journal.show, most=self.generator.settings.max_new_tokens)
        BulkWriter(self.generator, self.width).write(jobs, show)
        return perf_counter() - start

    def _ask(self, task: Task, turn: int, journal: Journal, add: Callable[[Job], object]) -> None:
        """Add the job for a task's first answer from `turn` on that is missing; a prompt that is too long has failed.

        The seed of an answer does not depend on the others, so a continued run writes what the first would have."""
        while (task.index, turn) in journal.done:
            turn += 1
        if turn >= task.turns:
            return
        try:
            prompt = task.prompt(journal.answers(task.index, turn) or [], self.generator.tokenizer)
            require_fitting([prompt], self.limits)
        except RequestError as error:
            journal.fail(task, turn, str(error))
            return
        (seed,) = prompt_seeds(self.seed, [turn * len(journal.tasks) + task.index])
        add(Job(prompt, seed, partial(self._answered, task, turn, journal, add, prompt)))

    def _let_ask(self, task: Task, attempt: int, journal: Journal, add: Callable[[Job], object]) -> None:
        """Add the job for a question, with a seed for each attempt."""
        assert task.ids is not None
        (seed,) = prompt_seeds(self.seed, [attempt * len(journal.tasks) + task.index])
        add(Job(task.ids, seed, partial(self._asked, task, attempt, journal, add)))

    def _asked(
        self,
        task: Task,
        attempt: int,
        journal: Journal,
        add: Callable[[Job], object],
        new_ids: list[int],
        reason: str,
    ) -> None:
        """Keep a question, or try again."""
        assert task.asks is not None
        tokenizer, stop = self.generator.tokenizer, self.generator.settings.stop or ()
        assert tokenizer is not None
        if question := task.asks.question(new_ids, tokenizer, reason != "length", stop):
            journal.append(task, 0, _question_line(question, len(new_ids)))
        elif attempt + 1 < ATTEMPTS:
            self._let_ask(task, attempt + 1, journal, add)
        else:
            journal.fail(task, 0, NO_QUESTION)

    def _answered(
        self,
        task: Task,
        turn: int,
        journal: Journal,
        add: Callable[[Job], object],
        prompt: list[int],
        new_ids: list[int],
        reason: str,
    ) -> None:
        """Keep an answer, and ask for the next one of its conversation."""
        tokenizer, stop = self.generator.tokenizer, self.generator.settings.stop or ()
        line = _line(prompt, new_ids, text_of(new_ids, tokenizer, stop), reason)
        if task.turns > 1 and tokenizer is not None:
            line["reply"] = remembered(new_ids, prompt, tokenizer, reason == "eos", stop)
        journal.append(task, turn, line)
        self._ask(task, turn + 1, journal, add)


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
        if task.asks is not None:
            return self._question(task, task.asks, options)
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
        if answer.tokens is None and self.tokenizer is not None:  # about as many: thoughts and tool calls do not count
            line["tokens"] = len(tokens_of(answer.text, self.tokenizer))
        elif answer.tokens is not None:
            line["tokens"] = answer.tokens
        return line | ({"tools": task.tools} if task.tools else {})

    def _question(self, task: Task, form: QuestionForm, options: Json) -> Json:
        """Let the server write a question, and return its line; raise ServerError if several attempts fail."""
        assert task.ids is not None
        assert self.tokenizer is not None
        for attempt in range(ATTEMPTS):
            answer = self.server.complete(task.ids, options | {"seed": options["seed"] + attempt})
            ids = tokens_of(answer.text, self.tokenizer)
            if question := form.question(ids, self.tokenizer, answer.finish_reason != "length"):
                return _question_line(question, len(ids))
        raise ServerError(NO_QUESTION)


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


def _question_line(question: str, tokens: int) -> Json:
    """Make the line for a question that the model wrote. Commands read it as a prompt."""
    return {"prompt": question, "tokens": tokens, "finish_reason": "eos"}


def _line(prompt: list[int], new_ids: list[int], answer: str, reason: str) -> Json:
    """Make the line of the output file for one answer, with the token ids of prompt and answer."""
    return {"input_ids": prompt + new_ids, "prompt_tokens": len(prompt), "answer": answer, "finish_reason": reason}
