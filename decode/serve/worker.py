"""The worker thread of the server. It groups the requested texts into batches, and decodes one batch after the other.

A text leaves its batch when it ends, or when its client has disconnected."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from decode.generation import decoding
from decode.request import prepare
from decode.results import DecodingRun
from decode.sequences import Request
from decode.serve.logprobs import ScoredToken, scored
from decode.serve.metrics import Metrics
from decode.serve.texts import TextGenerator, TextStream, joined
from decode.settings import Settings
from medusa.backbone import Backbone


class RowEvent(NamedTuple):
    """A message from the worker about one requested text: some new text, the end of the text, or an error."""

    text: str = ""
    finish_reason: str | None = None
    error: Exception | None = None
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
    left: threading.Event = field(default_factory=threading.Event)  # set to end the text early, as for a lost client
    new_tokens: int = 0  # the number decoded so far

    @property
    def batch_key(self) -> Settings:
        """The settings that all texts of a batch must share: all but maximum length, stop strings and `ignore_eos`."""
        return replace(self.settings, max_new_tokens=1, stop=(), ignore_eos=False)

    def request(self, generator: TextGenerator) -> Request:
        """Prepare the decoding of this text, or raise a `RequestError` if its prompt or settings are invalid."""
        kwargs = replace(self.settings, stop=()).generate_kwargs(generator.tokenizer)
        ends = StoppingCriteriaList([RowEnd(self, generator.tokenizer)])
        return prepare(generator.model, [self.prompt], [self.seed], stopping_criteria=ends, **kwargs)[0]

    def ended(self, text: str, reason: str | None, new_ids: Sequence[int], backbone: Backbone) -> RowEvent:
        """Make the event of this text's end: its last piece `text`, the reason, and the scores of its tokens if asked.

        `new_ids` are all tokens that were written."""
        event = RowEvent(text, "length" if reason in (None, "length") else "stop")
        if self.scores is None or self.left.is_set():
            return event
        start = 0 if self.scores_prompt else len(self.prompt)
        return event._replace(scored=scored(backbone, [*self.prompt, *new_ids], start, self.scores))


class RowEnd(StoppingCriteria):
    """A stopping criterion: ends a text whose client has disconnected, or which contains a stop string."""

    def __init__(self, row: BatchRow, tokenizer: PreTrainedTokenizerBase) -> None:
        self.row, self.tokenizer = row, tokenizer
        # A character may take several tokens, and the character that completes a stop string may be incomplete.
        self.window = 4 * max(map(len, row.settings.stop), default=0) + 4

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.Tensor:
        ended = torch.full((len(input_ids),), self.row.left.is_set(), device=input_ids.device)
        if self.row.settings.stop:
            new_ids = input_ids[:, max(len(self.row.prompt), input_ids.shape[1] - self.window) :].tolist()
            texts = [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in new_ids]
            found = [any(string in text for string in self.row.settings.stop) for text in texts]
            ended |= torch.tensor(found, device=input_ids.device)
        return ended


class BatchWorker:
    """A thread that decodes requested texts, one batch of texts after the other."""

    def __init__(self, generator: TextGenerator, batch_size: int) -> None:
        self.generator, self.batch_size = generator, batch_size
        self.arrivals: queue.SimpleQueue[BatchRow | None] = queue.SimpleQueue()
        self.waiting: list[BatchRow] = []
        self.running: list[BatchRow] = []
        self.metrics = Metrics(lambda: len(self.running), lambda: self.arrivals.qsize() + len(self.waiting))
        self.thread: threading.Thread | None = None

    def start(self, warm_up: Callable[[], object]) -> None:
        """Start the thread, and wait until it has called `warm_up`. An error in `warm_up` is raised to the caller."""
        ready: Future[object] = Future()

        def run() -> None:
            try:
                ready.set_result(warm_up())
            except Exception as error:
                ready.set_exception(error)
                return
            while (batch := self.next_batch()) is not None:
                self.running = batch
                if batch:
                    self.decode(batch)

        self.thread = threading.Thread(target=run, name="batches", daemon=True)
        self.thread.start()
        ready.result()

    def add(self, row: BatchRow) -> None:
        self.arrivals.put(row)

    def stop(self) -> None:
        """Stop decoding after the current step, and end the thread."""
        for row in (*self.waiting, *self.running):
            row.left.set()
        self.arrivals.put(None)
        if self.thread is not None:
            self.thread.join(timeout=10)

    def next_batch(self) -> list[BatchRow] | None:
        """Choose the text that has waited longest, and others with the same settings and prompts of similar length.

        If no text is waiting, the call blocks until one arrives. `None` means that the worker was stopped."""
        arrived = [] if self.waiting else [self.arrivals.get()]
        while not self.arrivals.empty():
            arrived.append(self.arrivals.get())
        if None in arrived:
            return None
        self.waiting = [row for row in (*self.waiting, *filter(None, arrived)) if not row.left.is_set()]
        if not self.waiting:
            return []
        first = self.waiting[0]
        alike = [row for row in self.waiting if row.batch_key == first.batch_key]
        alike.sort(key=lambda row: abs(len(row.prompt) - len(first.prompt)))  # a stable sort: `first` stays first
        boundaries = [Backbone(model).rope_boundary for model in self.generator.models(first.settings)]
        alone = any(boundary is not None for boundary in boundaries)  # longrope: a long row would change short ones
        batch = alike[: 1 if alone else self.batch_size]
        self.waiting = [row for row in self.waiting if row not in batch]
        return batch

    def decode(self, asked: list[BatchRow]) -> None:
        """Decode a batch until all its texts have ended. An error is passed to the rows concerned, not raised."""
        requests: dict[BatchRow, Request] = {}
        backbone = Backbone(self.generator.model)
        for row in asked:
            try:
                if row.writes:
                    requests[row] = row.request(self.generator)
                else:
                    row.tell(row.ended("", None, (), backbone))
            except Exception as error:
                row.tell(RowEvent(error=error))
        try:
            if requests:
                self._decode(list(requests), list(requests.values()))
        except Exception as error:
            for row in requests:
                row.tell(RowEvent(error=error))

    def _decode(self, rows: list[BatchRow], requests: list[Request]) -> None:
        streams = [TextStream(self.generator.tokenizer, row.settings.stop) for row in rows]
        run = DecodingRun(decoding(self.generator.model, self.generator.source, requests, *rows[0].settings.how))
        reasons, ended = run.session.sequences.finish_reason, set()
        backbone = Backbone(self.generator.model)
        for step in run:
            self.metrics.add_step(map(len, step.ids.values()), step.lengths.values())
            for index, ids in step.ids.items():
                rows[index].new_tokens += len(ids)
                text = joined(streams[index].step(ids))
                if (reason := reasons[index]) is not None:
                    ended.add(index)
                    text += joined(streams[index].end())
                    rows[index].tell(rows[index].ended(text, reason, run.results[index].new_ids, backbone))
                elif text:
                    rows[index].tell(RowEvent(text))
        for index in set(range(len(rows))) - ended:  # the context had no room for a new token
            rows[index].tell(rows[index].ended("", None, (), backbone))
