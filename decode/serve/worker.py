"""The worker thread of the server, which decodes the requested texts in one running batch.

A text joins the batch before a step, and leaves it when it ends or its client has disconnected."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from transformers import StoppingCriteriaList

from decode.compiled.stepper import sizes_of
from decode.loop import NOT_DEFINED, Stepper
from decode.request import prepare
from decode.sequences import Request
from decode.serve.adaptive import Adapting
from decode.serve.batch import UNDEFINED, RunningBatch, must_be_alone
from decode.serve.logprobs import ScoredToken, scored
from decode.serve.metrics import Metrics
from decode.settings import Settings
from decode.texts import TextGenerator, stepper_for
from medusa.backbone import Backbone
from medusa.errors import RunError
from medusa.records.pieces import StopStrings, TextStream, joined

WARM_UP_TOKENS = 256
"""The length of texts of the warm-up, which do not end in it."""
COMPANY = 4
"""A text that could join lets one step pass for each so many running texts, so that the next texts are read with it.

Reading a prompt takes about as long as a step, however many prompts are read at once."""


class RowEvent(NamedTuple):
    """A message from the worker about one requested text: some new text, the end of the text, or an error."""

    text: str = ""
    finish_reason: str | None = None
    error: Exception | None = None
    new_ids: Sequence[int] = ()  # at the end: all tokens of the text
    scored: Sequence[ScoredToken] = ()  # at the end, if they were requested: the tokens with their log-probabilities


@dataclass(eq=False)
class BatchRow:
    """One requested text, the callback that receives it while it is decoded, and an event (`left`) to end it early."""

    prompt: list[int]
    settings: Settings
    seed: int
    tell: Callable[[RowEvent], object]  # the worker thread calls it with each event
    scores: int | None = None  # score the tokens, and list so many most probable tokens beside each of them
    scores_prompt: bool = False  # whether the prompt's tokens are scored, too
    writes: bool = True  # otherwise only the prompt is scored
    keeps_special: bool = False  # whether its text holds special tokens, except the one that ends it
    goes_on: bool = False  # whether its text goes on with that of the prompt, and may so begin with a space
    left: threading.Event = field(default_factory=threading.Event)  # set to end the text early, as for a lost client
    new_tokens: int = 0  # the number decoded so far
    stream: TextStream = field(init=False, repr=False)  # of its characters, once it is decoded

    def request(self, generator: TextGenerator) -> Request:
        """Prepare the decoding of this text, or raise a `RequestError` if its prompt or settings are invalid."""
        assert generator.tokenizer is not None, "a server needs a tokenizer"
        before = self.prompt if self.goes_on else ()
        self.stream = TextStream(generator.tokenizer, self.settings.stop, before, self.keeps_special)
        kwargs = replace(self.settings, stop=()).generate_kwargs(generator.tokenizer)
        if self.settings.stop:
            stops = StopStrings(generator.token_bytes, self.settings.stop, len(self.prompt))
            kwargs["stopping_criteria"] = StoppingCriteriaList([stops])
        return prepare(generator.model, [self.prompt], [self.seed], **kwargs)[0]

    def ended(self, text: str, reason: str | None, new_ids: Sequence[int], backbone: Backbone) -> RowEvent:
        """Make the event of this text's end: its last piece `text`, the reason, and the scores of its tokens if asked.

        `new_ids` are all tokens that were written. A text that ends because it is undefined is an error."""
        if reason == UNDEFINED:
            return RowEvent(error=RunError(NOT_DEFINED))
        event = RowEvent(text, "length" if reason in (None, "length") else "stop", new_ids=tuple(new_ids))
        if self.scores is None or self.left.is_set():
            return event
        start = 0 if self.scores_prompt else len(self.prompt)
        try:
            found = scored(backbone, [*self.prompt, *new_ids], start, self.scores)
        except Exception as error:  # such as too little memory for a long text; the other texts go on
            return RowEvent(error=error)
        return event._replace(scored=found)


class BatchWorker:
    """A thread that decodes requested texts. Texts join the running batch, if it has room, after a few steps."""

    def __init__(self, generator: TextGenerator, batch_size: int, adapts: bool = False) -> None:
        """Make a worker without texts. If it `adapts`, it drafts in each step what `Pace` chooses; else, always all."""
        assert generator.tokenizer is not None, "a server needs a tokenizer"
        self.generator, self.tokenizer = generator, generator.tokenizer
        self.backbone = Backbone(generator.model)
        self.adapting = Adapting(generator.source if adapts else None)
        self.arrivals: queue.SimpleQueue[BatchRow | None] = queue.SimpleQueue()
        self.waiting: list[BatchRow] = []
        self.waited = 0  # steps that have passed for others to join with the waiting texts (`COMPANY`)
        self.running: dict[int, BatchRow] = {}  # by the row of the batch
        self.how = generator.settings.how  # of the running batch: acceptance rule, compiled or not, amateur
        self.batch = RunningBatch(self._stepper_for)
        own, compiled = generator.model.generation_config, bool(generator.settings.compile)
        # These apply to sampled texts alone, and all rows of a compiled step have the same.
        differ = compiled and any(value not in (None, 0, 1) for value in (own.typical_p, own.epsilon_cutoff))
        self.room = 1 if differ or must_be_alone(generator.models) else batch_size  # texts that are decoded together
        self.metrics = Metrics(
            running=lambda: len(self.running),
            waiting=lambda: self.arrivals.qsize() + len(self.waiting),
            drafted=lambda: zip(self.adapting.pace.nodes, self.adapting.pace.steps, strict=True),
        )
        self.thread: threading.Thread | None = None

    def _stepper_for(self, requests: Sequence[Request]) -> Stepper:
        sizes = sizes_of(self.room)
        made = stepper_for(self.generator.model, self.generator.source, requests, *self.how, sizes=sizes)
        return self.adapting(made)

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Decode a few tokens after `prompt`, so that the first answers are as fast as later ones.

        Compiled steps are compiled here for each number of texts, with the default settings."""
        generator = self.generator
        if not generator.settings.compile or self.room == 1:
            generator.warm_up(prompt)
            return
        settings = replace(generator.settings, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True, stop=())
        kwargs = settings.generate_kwargs(generator.tokenizer)
        try:
            for rows in sizes_of(self.room):
                count = rows - len(self.batch.rows)
                texts = prepare(generator.model, [prompt] * count, [0] * count, **kwargs)
                while not self.batch.join(texts):
                    self.batch.step()
                for _ in range(2):  # the second step may be captured as a CUDA graph
                    self.batch.step()
        finally:
            self.batch.clear()

    def start(self, warm_up: Callable[[], object]) -> None:
        """Start the thread, and wait until it has called `warm_up`. An error in `warm_up` is raised to the caller."""
        ready: Future[object] = Future()

        def run() -> None:
            try:
                ready.set_result(warm_up())
            except Exception as error:
                ready.set_exception(error)
                return
            while self.receive():
                self.admit()
                if self.running:
                    self.step()
            self.batch.clear()

        self.thread = threading.Thread(target=run, name="batch", daemon=True)
        self.thread.start()
        ready.result()

    def add(self, row: BatchRow) -> None:
        self.arrivals.put(row)

    def stop(self) -> None:
        """Stop decoding after the current step, and end the thread."""
        self.arrivals.put(None)
        if self.thread is not None:
            self.thread.join(timeout=10)

    def receive(self) -> bool:
        """Let requested texts wait for the batch; returns false if the worker was stopped.

        If no text is waiting or running, the call blocks until one arrives."""
        arrived = [] if self.waiting or self.running else [self.arrivals.get()]
        while not self.arrivals.empty():
            arrived.append(self.arrivals.get())
        self.waiting += filter(None, arrived)
        return None not in arrived

    def admit(self) -> None:
        """Let the texts that have waited longest join the batch, as far as it has room; errors end them.

        While texts run, they first wait for others (`COMPANY`)."""
        if self.waiting and self.waited < len(self.running) // COMPANY:
            self.waited += 1
            return
        joining: dict[BatchRow, Request] = {}
        while self.waiting and len(self.running) + len(joining) < self.room:
            row = self.waiting.pop(0)
            try:
                if not row.left.is_set() and row.writes:
                    joining[row] = row.request(self.generator)
                elif not row.left.is_set():
                    row.tell(row.ended("", None, (), self.backbone))
            except Exception as error:
                row.tell(RowEvent(error=error))
        if not joining:
            self.waited = 0
            return
        if not self.running:
            self.how = next(iter(joining)).settings.how
        try:
            places = self.batch.join(list(joining.values()))
        except Exception as error:
            self._fail(joining, error)
            return
        if not places:  # a step runs already
            self.waiting[:0] = joining
            return
        self.waited = 0
        self.running |= dict(zip(places, joining, strict=True))

    def step(self) -> None:
        """Decode one step of all running texts, and tell their new characters; an error ends all of them."""
        try:
            for place, row in self.running.items():
                if row.left.is_set():
                    self.batch.end(place)
            step = self.batch.step()
            self.metrics.add_step(map(len, step.ids.values()), step.lengths.values())
            for place, row in list(self.running.items()):
                ids, reason = step.ids.get(place, ()), self.batch.sequences.finish_reason[place]
                row.new_tokens += len(ids)
                text = joined(row.stream.step(ids[:-1] if row.keeps_special and reason == "eos" else ids))
                if reason is not None:  # also without new tokens, if the context had no room for one
                    text += joined(row.stream.end())
                    new_ids = self.batch.sequences.new_ids[place]
                    row.tell(row.ended(text, reason, new_ids, self.backbone))
                    del self.running[place]
                elif text:
                    row.tell(RowEvent(text))
        except Exception as error:
            self.batch.clear()
            self._fail((), error)
        if not self.running:
            self.batch.clear()  # an idle server needs no caches

    def _fail(self, joining: Iterable[BatchRow], error: Exception) -> None:
        """End the texts `joining` with an error, and also the running texts if the batch has dropped them."""
        lost = [] if self.batch.rows else list(self.running.values())
        if lost:
            self.running.clear()
        for row in (*joining, *lost):
            row.tell(RowEvent(error=error))
