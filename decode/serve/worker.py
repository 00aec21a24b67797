"""The thread that decodes for the server: waiting texts are put into batches, and each batch is decoded to its end.

The text that has waited longest goes into the next batch, together with texts that are sampled in the same way and have
prompts of similar length. Rows that have ended, or whose reader has left, leave the batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from decode.generation import decoding
from decode.request import prepare
from decode.results import DecodingRun
from decode.sequences import Request
from decode.serve.texts import TextGenerator, TextStream, joined
from decode.settings import Settings
from medusa.backbone import Backbone


class RowEvent(NamedTuple):
    """New text of a row, its end, or an error."""

    text: str = ""
    finish_reason: str | None = None
    error: Exception | None = None


@dataclass
class BatchRow:
    """One requested text, from its prompt to the function that informs its reader."""

    prompt: list[int]
    settings: Settings
    seed: int
    tell: Callable[[RowEvent], object]
    """Called by the thread that decodes."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the reader has left."""
    new_tokens: int = 0

    @property
    def batch_key(self) -> Settings:
        """Rows with equal keys can share a batch: their lengths and stops may differ, other settings may not."""
        return replace(self.settings, max_new_tokens=1, stop=(), ignore_eos=False)

    def request(self, generator: TextGenerator) -> Request:
        """Prepare the row for decoding.

        Raises:
            RequestError: as `decode.request.prepare`."""
        kwargs = replace(self.settings, stop=()).generate_kwargs(generator.tokenizer)
        ends = StoppingCriteriaList([RowEnd(self, generator.tokenizer)])
        return prepare(generator.model, [self.prompt], [self.seed], stopping_criteria=ends, **kwargs)[0]


class RowEnd(StoppingCriteria):
    """Ends a row whose reader has left, or whose new text contains a stop string.

    As in OpenAI's API, stop strings in the prompt do not count."""

    def __init__(self, row: BatchRow, tokenizer: PreTrainedTokenizerBase) -> None:
        self.row, self.tokenizer = row, tokenizer
        # A token may end inside the character that completes a string, and a character may take several tokens.
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
    """One thread that decodes waiting rows, batch after batch."""

    def __init__(self, generator: TextGenerator, batch_size: int) -> None:
        alone = Backbone(generator.model).rope_boundary is not None  # longrope: a long row would change short ones
        self.generator, self.batch_size = generator, 1 if alone else batch_size
        self.arrivals: queue.SimpleQueue[BatchRow | None] = queue.SimpleQueue()
        self.waiting: list[BatchRow] = []
        self.running: list[BatchRow] = []
        self.thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def start(self, warm_up: Callable[[], object]) -> None:
        """Start the thread, and wait until it has called `warm_up`.

        Raises:
            Exception: any error of `warm_up`."""
        ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                warm_up()
            except Exception as error:  # raised again in the thread that called `start`
                ready.put(error)
                return
            ready.put(None)
            while (batch := self.next_batch()) is not None:
                self.running = batch
                if batch:
                    self.decode(batch)

        self.thread = threading.Thread(target=run, name="batches", daemon=True)
        self.thread.start()
        if (error := ready.get()) is not None:
            raise error

    def add(self, row: BatchRow) -> None:
        """Let a row wait for its batch."""
        self.arrivals.put(row)

    def stop(self) -> None:
        """End the thread after the current step."""
        for row in (*self.waiting, *self.running):
            row.left.set()
        self.arrivals.put(None)
        if self.thread is not None:
            self.thread.join(timeout=10)

    def next_batch(self) -> list[BatchRow] | None:
        """The row that has waited longest, and the rows with its key whose prompts are nearest in length.

        Waits for rows if there are none. `None`: the worker has been stopped."""
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
        alike.sort(key=lambda row: abs(len(row.prompt) - len(first.prompt)))  # stable: `first`, then by arrival
        batch = alike[: self.batch_size]
        self.waiting = [row for row in self.waiting if not any(row is taken for taken in batch)]
        return batch

    def decode(self, asked: list[BatchRow]) -> None:
        """Decode a batch to its end. An error goes to the readers of the row or batch that failed."""
        rows, requests = [], []
        for row in asked:
            try:
                requests.append(row.request(self.generator))
                rows.append(row)
            except Exception as error:
                row.tell(RowEvent(error=error))
        try:
            if rows:
                self._decode(rows, requests)
        except Exception as error:
            for row in rows:
                row.tell(RowEvent(error=error))

    def _decode(self, rows: list[BatchRow], requests: list[Request]) -> None:
        streams = [TextStream(self.generator.tokenizer, row.settings.stop) for row in rows]
        run = DecodingRun(decoding(self.generator.model, self.generator.source, requests, rows[0].settings))
        reasons, ended = run.session.sequences.finish_reason, set()
        for step in run:
            for index, ids in step.ids.items():
                rows[index].new_tokens += len(ids)
                text = joined(streams[index].step(ids))
                if (reason := reasons[index]) is not None:
                    ended.add(index)
                    text += joined(streams[index].end())
                    rows[index].tell(RowEvent(text, "length" if reason == "length" else "stop"))
                elif text:
                    rows[index].tell(RowEvent(text))
        for index in set(range(len(rows))) - ended:  # the context had no room for a single token
            rows[index].tell(RowEvent("", "length"))
