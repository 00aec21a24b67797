"""Conversations, runs of the text generator and races of two texts, with the embedded backbone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decode.loop import Step
from decode.serve.chat import Conversation, Side, race
from decode.settings import Settings
from decode.texts import Decoding, Result, TextGenerator
from medusa.errors import RequestError
from medusa.records.pieces import TextStream
from tests.decode.serve.server_tools import begin, demo_generator
from tests.train.templates import CHATML

SHORT = Settings(max_new_tokens=12)
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    return demo_generator(SHORT)


@pytest.fixture
def with_template(generator: TextGenerator) -> Any:
    """The generator's tokenizer, with a chat template during one test."""
    generator.tokenizer.chat_template = CHATML
    yield generator.tokenizer
    generator.tokenizer.chat_template = None


def answer(
    generator: TextGenerator, conversation: Conversation, message: str, settings: Settings = SHORT, **how: Any
) -> str:
    turn = conversation.ask(message, generator.model)
    side = Side(
        begin(generator, turn.prompt, settings, **how), TextStream(generator.tokenizer, settings.stop, turn.prompt)
    )
    for _ in race([side]):
        pass
    conversation.keep(turn, side.result, side.text)
    return side.text


# --- conversations ----------------------------------------------------------------------------------------------------


def test_without_a_template_one_text_is_continued(generator: TextGenerator) -> None:
    conversation = Conversation(generator.tokenizer)
    parts = [answer(generator, conversation, message) for message in (PROMPT, "", "")]
    whole = answer(generator, Conversation(generator.tokenizer), PROMPT, Settings(max_new_tokens=36))
    assert "".join(parts) == whole


def test_without_a_template_a_message_is_appended_to_the_text(generator: TextGenerator) -> None:
    conversation = Conversation(generator.tokenizer)
    first = answer(generator, conversation, PROMPT)
    turn = conversation.ask("But the dog", generator.model)
    assert generator.tokenizer.decode(turn.prompt, skip_special_tokens=True) == f"{PROMPT}{first} But the dog"


def test_a_message_after_a_stop_string_follows_the_text_that_was_shown(generator: TextGenerator) -> None:
    whole = answer(generator, Conversation(generator.tokenizer), PROMPT)
    stop = whole.split()[2]
    conversation = Conversation(generator.tokenizer, stop=(stop,))
    turn, settings = conversation.ask(PROMPT, generator.model), replace(generator.settings, stop=(stop,))
    run = begin(generator, turn.prompt, settings)
    list(run)
    shown = whole[: whole.index(stop)]
    conversation.keep(turn, run.results[0], shown)
    asked = conversation.ask("But the dog", generator.model).prompt
    assert generator.tokenizer.decode(asked, skip_special_tokens=True).split() == f"{PROMPT}{shown} But the dog".split()
    assert stop in generator.tokenizer.decode(conversation.ask("", generator.model).prompt), (
        "or it would be written again"
    )


def test_after_the_end_of_a_text_a_new_text_begins(generator: TextGenerator) -> None:
    conversation = Conversation(generator.tokenizer)
    turn = conversation.ask(PROMPT, generator.model)
    run = begin(generator, turn.prompt)
    list(run)
    run.results[0].finish_reason = "eos"
    conversation.keep(turn, run.results[0], "")
    assert conversation.ask("One day", generator.model).prompt == generator.tokenizer("One day")["input_ids"]


def test_with_a_template_all_turns_are_rendered(generator: TextGenerator, with_template: Any) -> None:
    conversation = Conversation(with_template, system="Be kind.")
    said = answer(generator, conversation, "Hello")
    prompt = generator.tokenizer.decode(conversation.ask("And you?", generator.model).prompt)
    assert prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        f"<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n"
    )
    conversation.turns.clear()
    assert "Hello" not in generator.tokenizer.decode(conversation.ask("And you?", generator.model).prompt)


def test_invalid_messages_are_refused(generator: TextGenerator, with_template: Any) -> None:
    conversation = Conversation(with_template)
    with pytest.raises(RequestError, match="the message is empty"):
        conversation.ask(" \n", generator.model)
    with pytest.raises(RequestError, match="the context of 512 tokens is full; shorten the message"):
        conversation.ask("word " * 600, generator.model)
    with_template.chat_template = None
    with pytest.raises(RequestError, match="--system needs a chat template"):
        Conversation(with_template, system="Be kind.")
    with pytest.raises(RequestError, match="the prompt is empty"):
        Conversation(with_template).ask("", generator.model)


def test_a_full_context_is_reported(generator: TextGenerator) -> None:
    conversation = Conversation(generator.tokenizer)
    conversation.keep(conversation.ask(PROMPT, generator.model), Result([5] * 500, [5] * 12), "")
    for message in ("", "One day"):
        with pytest.raises(RequestError, match="the context of 512 tokens is full; start again with /reset"):
            conversation.ask(message, generator.model)


# --- runs -----------------------------------------------------------------------------------------------


def test_seconds_count_only_decoding(generator: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock does not move while the loop computes, so every second comes from the reader."""
    now = [0.0]
    monkeypatch.setattr("decode.texts.perf_counter", lambda: now[0])
    run = begin(generator, generator.tokenizer(PROMPT)["input_ids"])
    begun = run.seconds
    for _ in run:
        now[0] += 100.0
    assert run.results[0].seconds == begun


def test_a_stopped_run_keeps_its_tokens(generator: TextGenerator) -> None:
    run = begin(generator, generator.tokenizer(PROMPT)["input_ids"])
    next(iter(run))
    run.stop()
    result = run.results[0]
    assert result.finish_reason == "stopped"
    assert 0 < len(result.new_ids) < 12
    assert list(run) == []


# --- a race ----------------------------------------------------------------------------------------------------------


class Scripted(Decoding):
    """Writes `count` tokens, each of which takes so many seconds; notes when it wrote."""

    def __init__(self, name: str, seconds: float, count: int, notes: list[str]) -> None:
        self.name, self.each, self.count, self.notes, self.seconds = name, seconds, count, notes, 0.0

    def __iter__(self) -> Any:
        for _ in range(self.count):
            self.seconds += self.each
            self.notes.append(self.name)
            yield Step({0: [1]}, {0: 1})


def test_the_text_that_has_taken_least_time_continues(tokenizer: Any) -> None:
    notes: list[str] = []
    slow, fast = (Scripted(name, each, 4, notes) for name, each in (("slow", 3.0), ("fast", 1.0)))
    sides = [Side(run, TextStream(tokenizer)) for run in (slow, fast)]
    for _ in race(sides):
        pass
    assert notes == ["slow", "fast", "fast", "fast", "slow", "fast", "slow", "slow"]
    assert [side.text for side in sides] == ["bbbb", "bbbb"]
