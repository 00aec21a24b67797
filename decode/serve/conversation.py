"""A conversation with a backbone, written with its drafter or without: what `medusa chat` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.draft import DrafterFactory
from decode.generation import medusa_session
from decode.reference import plain_session
from decode.request import prepare, require_fitting
from decode.results import Result, Run
from decode.sequences import Request
from decode.serve.text_stream import Piece, TextStream
from decode.settings import Settings
from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.records import Record, continuation_ids, prompt_ids

NOWHERE = "this conversation"  # where messages come from, in errors


@dataclass
class Writer:
    """Who writes: a backbone with its tokenizer, and the drafter that guesses ahead, if any."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: DrafterFactory | None

    def __post_init__(self) -> None:
        if self.source is not None:
            require_tree_forward(self.model)  # tried once a model, so before the first answer is waited for

    def models(self, settings: Settings) -> list[PreTrainedModel]:
        """All that a text must fit into."""
        return [self.model, *([] if settings.amateur is None else [settings.amateur.model])]

    def run(self, prompt: Sequence[int], settings: Settings, seed: int = 0, plain: bool = False, **kwargs: Any) -> Run:
        """Begin to write after `prompt`; `plain`: one token a step. `kwargs` are further ones of `model.generate`.

        Raises:
            RequestError: as `decode.request.prepare`."""
        start = perf_counter()
        requests = prepare(self.model, [prompt], [seed], **settings.generate_kwargs(self.tokenizer), **kwargs)
        return self.run_all(requests, settings, plain, perf_counter() - start)

    def run_all(
        self, requests: Sequence[Request], settings: Settings, plain: bool = False, seconds: float = 0.0
    ) -> Run:
        """Begin to write a batch that was prepared by the same settings, but for lengths and ends, in `seconds`."""
        start = perf_counter()
        if plain or self.source is None:
            session = plain_session(self.model, requests, compile=settings.compile, amateur=settings.amateur)
        else:
            session = medusa_session(
                self.model,
                None,
                requests,
                None,
                settings.acceptor,
                compile=settings.compile,
                drafter=self.source,
                amateur=settings.amateur,
            )
        return Run(session, seconds + perf_counter() - start)

    def warm_up(self, prompt: Sequence[int], settings: Settings) -> None:
        """Write a few tokens in each way, so that the first answer pays for nothing that later ones do not."""
        for plain in [True] if self.source is None else [True, False]:
            for count, _ in enumerate(self.run(prompt, settings, plain=plain)):
                if count == 4:
                    break


@dataclass
class Turn:
    """A message, what is to be continued for it, and what was written."""

    message: str
    prompt: list[int]
    result: Result | None = None
    text: str = ""


@dataclass
class Conversation:
    """What was said so far. A tokenizer without a chat template has none: then all is one text that goes on."""

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
        """A turn that is to be answered by `models`, one or several; it becomes part of the conversation by `keep`.

        Without a template an empty message goes on with the text.

        Raises:
            RequestError: nothing to say, a message that the template refuses, or one for which there is no room."""
        if self.has_template and not message.strip():
            raise RequestError("the message is empty; write something")
        prompt = self._prompt(message)
        for backbone in map(Backbone, models):
            require_fitting([prompt], backbone)
            if backbone.context is not None and len(prompt) >= backbone.context:
                raise RequestError(f"the context of {backbone.context} tokens is full; begin anew (/reset)")
        return Turn(message, prompt)

    def keep(self, turn: Turn, result: Result, text: str) -> None:
        """Remember a finished (or stopped) answer."""
        turn.result, turn.text = result, text
        self.turns.append(turn)

    def reset(self) -> None:
        self.turns.clear()

    def _prompt(self, message: str) -> list[int]:
        if not self.has_template:
            return self._continued(message)
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.message}, {"role": "assistant", "content": turn.text}]
        messages.append({"role": "user", "content": message})
        return prompt_ids(Record(NOWHERE, messages=messages), self.tokenizer)

    def _continued(self, message: str) -> list[int]:
        last = self.turns[-1].result if self.turns else None
        if last is None or last.finish_reason == "eos":  # the text has ended: this is another one
            return prompt_ids(Record("the text", text=message, is_prompt=True), self.tokenizer)
        ids = last.input_ids + last.new_ids
        return [*ids, *continuation_ids(ids, self.joint + message, self.tokenizer)] if message else ids

    @property
    def joint(self) -> str:
        """What stands between the text so far and a message that goes on with it."""
        return "" if not self.turns or self.turns[-1].text[-1:].isspace() else " "


class Side:
    """One of the texts of a race, as far as it was written."""

    def __init__(self, run: Run, stream: TextStream) -> None:
        self.run, self.steps, self.stream = run, iter(run), stream
        self.pieces: list[Piece] = []
        self.finished = False

    @property
    def result(self) -> Result:
        """Its seconds are those so far."""
        self.run.results[0].seconds = self.run.seconds
        return self.run.results[0]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def step(self) -> None:
        step = next(self.steps, None)
        self.pieces += self.stream.end() if step is None else self.stream.step(step.ids[0])
        self.finished = step is None

    def stop(self) -> None:
        """Write no more."""
        if not self.finished:
            self.run.stop()
            self.pieces += self.stream.end()
            self.finished = True


def race(sides: Sequence[Side]) -> Iterator[None]:
    """Write several texts by one step at a time, always of the one that has taken the least time so far.

    So they never compute at the same time, each one's time is its own alone, and a reader sees all of them grow at the
    pace that they would have by themselves.
    """
    while unfinished := [side for side in sides if not side.finished]:
        min(unfinished, key=lambda side: side.run.seconds).step()
        yield
