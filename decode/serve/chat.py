"""Chats: conversations with a backbone, and races of two texts whose speeds a reader can compare."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.request import require_fitting
from decode.results import DecodingRun, Result, tau
from decode.serve.texts import TextGenerator, TextPiece, TextStream, joined
from decode.settings import Settings, is_lossy
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.records.record import Record, continuation_ids, prompt_ids


@dataclass
class Turn:
    """A message with the prompt that it makes, and the answer."""

    message: str
    prompt: list[int]
    result: Result | None = None
    text: str = ""


@dataclass
class Conversation:
    """A conversation: all turns so far. Without a chat template, messages and answers form one continued text."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system is not None and not self.has_template:
            raise RequestError("--system needs a chat template, and this backbone's tokenizer has none; leave it out")

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def ask(self, message: str, *models: PreTrainedModel) -> Turn:
        """The turn for a message. `keep` adds the turn to the conversation when it is answered.

        Without a template, an empty message continues the text.

        Args:
            models: the models whose contexts must have room for the answer.

        Raises:
            RequestError: the message is empty, the template refuses the message, or a context is full."""
        if self.has_template and not message.strip():
            raise RequestError("the message is empty; write something")
        prompt = self._templated(message) if self.has_template else self._continued(message)
        for backbone in map(Backbone, models):
            require_fitting([prompt], backbone)
            if backbone.context is not None and len(prompt) >= backbone.context:
                raise RequestError(f"the context of {backbone.context} tokens is full; start again with /reset")
        return Turn(message, prompt)

    def keep(self, turn: Turn, result: Result, text: str) -> None:
        """Add a turn with its finished (or stopped) answer."""
        turn.result, turn.text = result, text
        self.turns.append(turn)

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()

    def _templated(self, message: str) -> list[int]:
        messages: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.message}, {"role": "assistant", "content": turn.text}]
        messages.append({"role": "user", "content": message})
        return prompt_ids(Record("this conversation", messages=messages), self.tokenizer)

    def _continued(self, message: str) -> list[int]:
        last = self.turns[-1] if self.turns else None
        if last is None or last.result is None or last.result.finish_reason == "eos":  # the message begins a new text
            return prompt_ids(Record("the text", text=message, is_prompt=True), self.tokenizer)
        ids = last.result.input_ids + last.result.new_ids
        space = "" if last.text[-1:].isspace() else " "
        return [*ids, *continuation_ids(ids, space + message, self.tokenizer)] if message else ids


REFRESH = 0.08  # seconds between two snapshots of a growing text
Returned = TypeVar("Returned")


class Side:
    """One of the texts of a race while it is written."""

    def __init__(self, run: DecodingRun, stream: TextStream) -> None:
        self.run, self.steps, self.stream = run, iter(run), stream
        self.pieces: list[TextPiece] = []
        self.finished = False

    @property
    def result(self) -> Result:
        """The result so far, with its seconds so far."""
        self.run.results[0].seconds = self.run.seconds
        return self.run.results[0]

    @property
    def text(self) -> str:
        return joined(self.pieces)

    def step(self) -> None:
        """Write one step."""
        step = next(self.steps, None)
        self.pieces += self.stream.end() if step is None else self.stream.step(step.ids[0])
        self.finished = step is None

    def stop(self) -> None:
        """End the text now."""
        if not self.finished:
            self.run.stop()
            self.pieces += self.stream.end()
            self.finished = True


def race(sides: Sequence[Side]) -> Iterator[None]:
    """Write several texts to their ends, always one step of the text that has taken the least time so far.

    The texts never compute at the same time, so the time of each is its own, and a reader sees each grow at its own
    pace.
    """
    while unfinished := [side for side in sides if not side.finished]:
        min(unfinished, key=lambda side: side.run.seconds).step()
        yield


class Snapshot(NamedTuple):
    """The state of one side of a race at one moment."""

    pieces: list[TextPiece]
    tokens: int
    seconds: float
    tau: float
    finish_reason: str | None
    """`None` while the text is being written."""

    @classmethod
    def at(cls, side: Side) -> Snapshot:
        """The side as it is now."""
        result = side.result
        reason = result.finish_reason if side.finished else None
        return cls(list(side.pieces), len(result.new_ids), result.seconds, tau([result]), reason)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def verdict(plain: Side, drafted: Side, settings: Settings) -> tuple[str, str]:
    """The outcome of a race: how many times as fast drafting was, and whether the texts are the same."""
    faster = Snapshot.at(drafted).tokens_per_second / max(Snapshot.at(plain).tokens_per_second, 1e-9)
    return f"{faster:.2f}×", _texts_compared(plain.result, drafted.result, settings)


def _texts_compared(plain: Result, drafted: Result, settings: Settings) -> str:
    ours, theirs = drafted.new_ids, plain.new_ids
    if "stopped" in (plain.finish_reason, drafted.finish_reason):
        return "stopped: the speeds so far"
    if ours == theirs:
        return "the same text, token for token"
    if is_lossy(settings.rule.name):
        return f"different texts: acceptance {settings.rule.name} is lossy"
    if settings.do_sample:
        return "two samples of the same distribution"
    length = min(len(ours), len(theirs))
    at = next((place for place in range(length) if ours[place] != theirs[place]), length)
    return f"the texts diverge at token {at + 1}: two tokens are nearly tied, and rounding decides"


class ChatWorker:
    """One thread that writes the answers of all chat pages, in the order in which the pages ask."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator = generator
        self.thread = ThreadPoolExecutor(1, "chat")
        self.turn = asyncio.Lock()
        self.waiting = 0
        """Answers that are asked for and not finished."""

    def call(self, work: Callable[..., Returned], *args: object) -> Returned:
        """Run a function in the thread, and wait for its result."""
        return self.thread.submit(work, *args).result()

    async def write(
        self, begin: Callable[[], list[Side]], show: Callable[[list[Snapshot]], None], stopped: threading.Event
    ) -> list[Side]:
        """Write texts to their ends, or until `stopped`. The list is empty if `stopped` was set before their turn.

        Args:
            begin: starts the texts, in the thread.
            show: receives snapshots while the texts grow, in the caller's thread.

        Raises:
            RequestError: as `begin`."""
        loop = asyncio.get_running_loop()

        def work() -> list[Side]:
            shown = perf_counter()
            sides = begin()
            for _ in race(sides):
                if stopped.is_set():
                    for side in sides:
                        side.stop()
                elif perf_counter() - shown > REFRESH:
                    loop.call_soon_threadsafe(show, [Snapshot.at(side) for side in sides])
                    shown = perf_counter()
            return sides

        self.waiting += 1
        try:
            async with self.turn:
                return [] if stopped.is_set() else await loop.run_in_executor(self.thread, work)
        finally:
            self.waiting -= 1
