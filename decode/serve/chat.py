"""Conversations with a backbone, and races: plain decoding and a drafter write the same answer side by side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.draft import DraftRecord
from decode.request import require_fitting
from decode.rules import is_lossy
from decode.settings import Settings, near_tie
from decode.texts import Decoding, Result, TextGenerator, tau
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import Json
from medusa.records.pieces import TextPiece, TextStream, joined
from medusa.records.record import Record, continuation_ids, prompt_ids
from medusa.records.replies import remembered


@dataclass
class Turn:
    """One turn of a conversation: the user's message, the prompt that is decoded for it, and the answer."""

    message: str
    prompt: list[int]
    result: Result | None = None
    text: str = ""
    reply: Json = field(default_factory=dict)
    """The answer as a message of the history, with its special tokens."""


@dataclass
class Conversation:
    """A conversation. Without a chat template, or with `raw`, its messages and answers form one text.

    A text has no system message: `system` must be `None`."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    raw: bool = False
    template_options: Json = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    """The strings that end an answer."""
    way_out: str = "start again with /reset"
    """What a user can do when the conversation fills the context."""

    def __post_init__(self) -> None:
        if self.system is not None and self.tokenizer.chat_template is None:
            raise RequestError("--system needs a chat template, and this backbone's tokenizer has none; leave it out")
        if self.system is not None and self.raw:
            raise RequestError("--system needs the chat template, and --raw turns it off; leave one of them out")

    @property
    def has_template(self) -> bool:
        """Whether a chat template formats the conversation."""
        return self.tokenizer.chat_template is not None and not self.raw

    def ask(self, message: str, *models: PreTrainedModel) -> Turn:
        """Make the turn for a message. The turn joins the conversation when `keep` receives its answer.

        Without a chat template, an empty message continues the text. Raise a `RequestError` if a message for a template
        is empty, the template fails, or the context of a model has no room for the prompt and one token."""
        if self.has_template and not message.strip():
            raise RequestError("the message is empty; write something")
        prompt = self._templated(message) if self.has_template else self._continued(message)
        for backbone in map(Backbone, models):
            if backbone.context is not None and len(prompt) >= backbone.context:
                way = self.way_out if self.turns else "shorten the message"
                raise RequestError(f"the context of {backbone.context} tokens is full; {way}")
            require_fitting([prompt], backbone)
        return Turn(message, prompt)

    def keep(self, turn: Turn, result: Result, text: str) -> None:
        """Add a turn to the conversation, with the result and text of its answer, which the user may have stopped."""
        turn.result, turn.text = result, text
        ended = result.finish_reason == "eos"
        turn.reply = remembered(result.new_ids, turn.prompt, self.tokenizer, ended, self.stop)
        self.turns.append(turn)

    def _templated(self, message: str) -> list[int]:
        messages: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.message}, turn.reply]
        messages.append({"role": "user", "content": message})
        return prompt_ids(Record("this conversation", messages=messages), self.tokenizer, options=self.template_options)

    def _continued(self, message: str) -> list[int]:
        last = self.turns[-1] if self.turns else None
        if last is None or last.result is None or last.result.finish_reason == "eos":  # the message begins a new text
            return prompt_ids(Record("the text", text=message), self.tokenizer)
        ids = last.result.input_ids + last.result.new_ids
        if not message:  # goes on after a stop string, which the model would otherwise write again
            return ids
        if last.result.finish_reason == "stop":  # the text goes on as it was shown, without the stop string
            ids = [*last.result.input_ids, *continuation_ids(last.result.input_ids, last.text, self.tokenizer)]
        space = "" if last.text[-1:].isspace() else " "
        return [*ids, *continuation_ids(ids, space + message, self.tokenizer)]


REFRESH = 0.08  # seconds between two snapshots of a growing text


class Side:
    """One text of a race between plain decoding and a drafter, while the text is decoded."""

    def __init__(self, run: Decoding, stream: TextStream) -> None:
        self.run, self.steps, self.stream = run, iter(run), stream
        self.pieces: list[TextPiece] = []
        self.drafts: list[DraftRecord | None] = []
        """The draft of each step, if the run keeps drafts; `None` for a step without a draft."""
        self.finished = False

    @property
    def result(self) -> Result:
        self.run.results[0].seconds = self.run.seconds
        return self.run.results[0]

    @property
    def text(self) -> str:
        return joined(self.pieces)

    def step(self) -> None:
        step = next(self.steps, None)
        if step is not None:
            self.drafts.append(step.drafts.get(0))
        self.pieces += self.stream.end() if step is None else self.stream.step(step.ids[0])
        self.finished = step is None

    def stop(self) -> None:
        if not self.finished:
            self.run.stop()
            self.pieces += self.stream.end()
            self.finished = True


def race(sides: Sequence[Side]) -> Iterator[None]:
    """Decode several texts until all are finished, one decoding step of one text at a time; yields after each step.

    The next step is of the text with the least decoding time so far, so each text appears to grow at its own speed."""
    while unfinished := [side for side in sides if not side.finished]:
        min(unfinished, key=lambda side: side.run.seconds).step()
        yield


class Snapshot(NamedTuple):
    """The text and the metrics of one side of a race at one moment."""

    pieces: list[TextPiece]
    tokens: int
    seconds: float
    tau: float
    finish_reason: str | None  # why the text ended; `None` while it is decoded
    drafts: list[DraftRecord | None]  # of each step, see `Side`

    @classmethod
    def at(cls, side: Side) -> Snapshot:
        result = side.result
        reason = result.finish_reason if side.finished else None
        return cls(list(side.pieces), len(result.new_ids), result.seconds, tau([result]), reason, list(side.drafts))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


EVEN = 0.97, 1.03  # ratios of two speeds between which a single race shows no difference


class Verdict(NamedTuple):
    """The outcome of a race."""

    speedup: float | None  # the drafter's; `None` if the texts are not finished, or differ in length
    same: str  # whether the two texts are equal, in words

    @property
    def is_faster(self) -> bool:
        """Whether the drafter was visibly faster than plain decoding."""
        return self.speedup is not None and round(self.speedup, 2) > EVEN[1]

    @property
    def speed(self) -> str:
        """The drafter's speed, compared with that of plain decoding, in words; empty if it is not known."""
        if self.speedup is None:
            return ""
        if self.is_faster:
            return f"{self.speedup:.2f}× as fast"
        is_even = round(self.speedup, 2) >= EVEN[0]
        return "about the same speed" if is_even else f"{100 * (1 - self.speedup):.0f} % slower"


def verdict(plain: Side, drafted: Side, settings: Settings) -> Verdict:
    """Compare the two texts of a race, and their speeds if both texts are finished and of the same length."""
    ours, theirs = drafted.result, plain.result
    if "stopped" in (ours.finish_reason, theirs.finish_reason):
        return Verdict(None, "stopped: speeds are compared only for finished texts")
    same = _texts_compared(theirs, ours, settings)
    if len(ours.new_ids) != len(theirs.new_ids):
        return Verdict(None, f"{same}. Speeds are compared only for texts of the same length")
    if not ours.new_ids:
        return Verdict(None, same)
    return Verdict(Snapshot.at(drafted).tokens_per_second / max(Snapshot.at(plain).tokens_per_second, 1e-9), same)


def _texts_compared(plain: Result, drafted: Result, settings: Settings) -> str:
    ours, theirs = drafted.new_ids, plain.new_ids
    if ours == theirs:
        return "the same text, token for token"
    if is_lossy(settings.rule.name):
        return f"different texts: acceptance {settings.rule.name} is lossy"
    if settings.do_sample:
        return "two samples of the same distribution"
    at = next(place for place, (a, b) in enumerate(zip_longest(ours, theirs), 1) if a != b)
    return f"the texts diverge at token {at}: {near_tie()}"


class Shown(NamedTuple):
    """The words above a text on the page: its title, what a step does, and its kind (`plain` or `drafted`)."""

    title: str
    subtitle: str
    kind: str


@dataclass
class Exchange:
    """A turn of the conversation as the page shows it: the texts that answer the message, and their comparison."""

    turn: Turn
    texts: list[Shown]
    snapshots: list[Snapshot]  # of the finished texts
    verdict: Verdict | None  # `None`: there is only one text


class Stop(threading.Event):
    """A request to stop an answer. An answer that still waits for its turn ends at once."""

    job: Future[list[Side]] | None = None  # the answer's work in the worker's thread

    def set(self) -> None:
        super().set()
        if self.job is not None:
            self.job.cancel()  # does nothing once the work has begun


class ChatWorker:
    """A thread that decodes the answers for all open chat pages, one after the other in the order of the requests."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator = generator
        self.thread = ThreadPoolExecutor(1, "chat")
        self.waiting = 0  # number of requested answers that are not finished

    async def write(
        self, begin: Callable[[], list[Side]], show: Callable[[list[Snapshot]], None], stop: Stop
    ) -> list[Side]:
        """Decode the texts of one race until all are finished, or until `stop` is set, and return them.

        The race waits for earlier races. If it is stopped before its turn, it ends at once, and the list is empty.
        `begin` starts the texts in the worker's thread. `show` receives snapshots of the texts in the event loop's
        thread."""
        loop = asyncio.get_running_loop()

        def work() -> list[Side]:
            shown = perf_counter()
            sides = [] if stop.is_set() else begin()
            for _ in race(sides):
                if stop.is_set():
                    for side in sides:
                        side.stop()
                elif perf_counter() - shown > REFRESH:
                    loop.call_soon_threadsafe(show, [Snapshot.at(side) for side in sides])
                    shown = perf_counter()
            return sides

        self.waiting += 1
        stop.job = self.thread.submit(work)
        try:
            return await asyncio.wrap_future(stop.job)
        except asyncio.CancelledError:
            if not stop.is_set():  # the task of the caller was cancelled
                raise
            return []
        finally:
            self.waiting -= 1
