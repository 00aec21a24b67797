"""The page of `medusa chat --web`: its logic and a simulated reader; `test_chat_browser.py` has a real browser."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="needs the extra web")

from nicegui import app, ui
from nicegui.testing import user_simulation

from decode.draft import DraftRecord
from decode.serve.chat import ChatWorker, Conversation, Side, Snapshot, Stop, Verdict, verdict
from decode.serve.chat_card import marked
from decode.serve.chat_options import NO_DRAFTER, drafters_of
from decode.serve.chat_page import ChatPage, PageConfig
from decode.settings import Settings
from decode.texts import Result, TextGenerator
from medusa.commands.speed import speed_line
from medusa.files import per_second
from medusa.records.pieces import TextPiece, TextStream
from tests.decode.serve.server_tools import begin, demo_generator
from tests.train.templates import CHATML

SHORT = Settings(max_new_tokens=8)
RECORD = DraftRecord([5, 6], [0, 0], [0, 1])


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    return demo_generator(SHORT)


@pytest.fixture
def with_template(generator: TextGenerator) -> Iterator[None]:
    """The generator's tokenizer has a chat template during one test."""
    generator.tokenizer.chat_template = CHATML
    yield
    generator.tokenizer.chat_template = None


# --- logic -----------------------------------------------------------------------------------------------------------


def test_drafted_tokens_of_a_step_are_one_mark_without_outer_spaces() -> None:
    texts = [("a <b>", False), (" c", True), ("&d ", True), ("e", False), ("\n", True)]
    pieces = [TextPiece(text, drafted) for text, drafted in texts]
    assert marked(pieces) == "a &lt;b&gt; <mark>c&amp;d</mark> e\n"


def test_the_text_of_a_step_with_a_draft_is_a_button() -> None:
    pieces = [TextPiece("a", False), TextPiece(" b", False, 1), TextPiece(" <c", True, 1), TextPiece("d", False, 2)]
    button = '<span class="step" role="button" data-step='
    with_draft = [None, RECORD]  # no draft in step 0, and none yet in step 2
    assert marked(pieces, with_draft) == f'a {button}"1">b <mark>&lt;c</mark></span>d'
    reached = f'{button}"0" tabindex="0">a</span> {button}"1" tabindex="-1">b <mark>&lt;c</mark></span>d'
    assert marked(pieces, [RECORD, RECORD], finished=True) == reached


def side(ids: list[int], seconds: float, reason: str = "length") -> Any:
    result = Result([1], ids, [1] * len(ids), [1] * len(ids), reason, seconds)
    return SimpleNamespace(result=result, finished=True, pieces=[], drafts=[])


EVEN = "about the same speed"
SAME, TIED = "the same text, token for token", "two tokens are nearly tied, and rounding decides"


@pytest.mark.parametrize(
    ("theirs", "ours", "settings", "speed", "told"),
    [
        (side([1, 2], 2.0), side([1, 2], 1.0), SHORT, "2.00× as fast", SAME),
        (side([], 1.0), side([], 0.5), SHORT, "", SAME),
        (
            side([1, 2], 1.0),
            side([1, 2], 0.5, "stopped"),
            SHORT,
            "",
            "stopped: speeds are compared only for",
        ),
        (side([1, 2], 1.0), side([1], 0.5), SHORT, "", f"at token 2: {TIED}. Speeds are compared only for texts of"),
        (side([1, 2], 1.0), side([1, 3], 1.0), SHORT, EVEN, f"the texts diverge at token 2: {TIED}"),
        (side([1], 1.0), side([3], 1.0), Settings(temperature=1.0), EVEN, "two samples of the same distribution"),
        (side([1], 1.0), side([3], 1.0), Settings(acceptance="topk:2"), EVEN, "acceptance topk:2 is lossy"),
    ],
)
def test_the_verdict_of_a_race(theirs: Any, ours: Any, settings: Settings, speed: str, told: str) -> None:
    found = verdict(theirs, ours, settings)
    assert found.speed == speed
    assert told in found.same


@pytest.mark.parametrize(
    ("ratio", "speed"),
    [
        (0.94, "6 % slower"),
        (0.964, "4 % slower"),
        (0.966, EVEN),
        (1.0, EVEN),
        (1.034, EVEN),
        (1.04, "1.04× as fast"),
        (None, ""),
    ],
)
def test_only_a_visibly_faster_drafter_is_called_faster(ratio: float | None, speed: str) -> None:
    found = Verdict(ratio, SAME)
    assert found.speed == speed
    assert found.is_faster == ("as fast" in speed)


@pytest.mark.parametrize(("rate", "shown"), [(31.04, "31.0"), (99.94, "99.9"), (99.96, "100"), (1054.4, "1054")])
def test_slow_rates_have_a_decimal(rate: float, shown: str) -> None:
    assert per_second(rate) == shown
    assert speed_line(round(100 * rate), 100.0, 1.0).split()[2] == shown


def sides_of(generator: TextGenerator, message: str = "Once upon a time") -> list[Side]:
    ids = Conversation(generator.tokenizer).ask(message, generator.model).prompt
    return [
        Side(begin(generator, ids, SHORT, source=one), TextStream(generator.tokenizer))
        for one in (None, generator.source)
    ]


def test_the_worker_writes_texts_in_sequence(generator: TextGenerator) -> None:
    """Three readers ask at once; the second reader leaves before the second answer starts."""
    at_work: list[str] = []

    async def scene() -> list[list[Side]]:
        worker = ChatWorker(generator)
        stops = [Stop() for _ in range(3)]
        stops[1].set()

        def begin(name: str) -> list[Side]:
            at_work.append(f"{name} on {threading.current_thread().name}")
            return sides_of(generator)

        asked = [worker.write(lambda n=n: begin(str(n)), lambda looks: None, stops[n]) for n in range(3)]
        return await asyncio.gather(*asked)

    first, second, third = asyncio.run(scene())
    assert at_work == ["0 on chat_0", "2 on chat_0"]
    assert second == []
    assert first[0].text == first[1].text == third[0].text != ""


def test_the_worker_stops_on_request(generator: TextGenerator) -> None:
    stop = Stop()

    def begin() -> list[Side]:
        sides = sides_of(generator)
        sides[0].step()
        stop.set()
        return sides

    sides = asyncio.run(ChatWorker(generator).write(begin, lambda looks: None, stop))
    assert {side.result.finish_reason for side in sides} == {"stopped"}
    assert Snapshot.at(sides[0]).finish_reason == "stopped"
    assert sum(len(side.result.new_ids) for side in sides) < 8


# --- a simulated reader ----------------------------------------------------------------------------------------------


def simulated(
    generator: TextGenerator, scene: Callable[[Any, list[ChatPage]], Awaitable[None]], system: str | None = None
) -> None:
    """Run a scene with a reader and the pages that he has opened, the first of them already."""
    config, pages = PageConfig(ChatWorker(generator), "demo", "heads", system, 0), list[ChatPage]()

    async def run() -> None:
        async with user_simulation(root=lambda: pages.append(ChatPage(config)) or pages[-1].build()) as user:
            await user.open("/")
            while not pages[0].restored:
                await asyncio.sleep(0.01)
            await scene(user, pages)

    asyncio.run(run())


def listener_of(element: Any, event: str) -> str:
    """The id of an element's listener to an event."""
    return next(name for name, one in element._event_listeners.items() if one.type == event)


def test_a_conversation_is_continued_and_reset(generator: TextGenerator) -> None:
    async def scene(user: Any, pages: list[ChatPage]) -> None:
        await user.should_see("it is not an assistant")
        user.find("Once upon a time").click()
        await user.should_see("the same text, token for token", retries=600)
        first = pages[0].conversation.turns[0]
        assert first.text
        user.find(ui.textarea).type("The dog")
        await pages[0]._ask()
        assert [turn.message for turn in pages[0].conversation.turns] == ["Once upon a time", "The dog"]
        assert pages[0].conversation.turns[1].prompt[: len(first.prompt)] == first.prompt
        turns = list(pages[0].conversation.turns)
        await pages[0]._again()
        assert [turn.message for turn in pages[0].conversation.turns] == ["Once upon a time", "The dog"]
        assert pages[0].conversation.turns[1] is not turns[1]
        assert pages[0].conversation.turns[1].prompt == turns[1].prompt
        assert len(pages[0].articles) == 2
        await user.open("/")  # the same tab, loaded again
        await user.should_see("The dog")
        assert [turn.text for turn in pages[1].conversation.turns] == [turn.text for turn in turns]
        user.tab_id = "another reader's"
        await user.open("/")
        assert pages[2].conversation.turns == []
        with user:
            pages[1]._reset()
        assert pages[1].conversation.turns == [] != pages[0].conversation.turns

    simulated(generator, scene)


def test_an_answer_that_is_not_written_again_is_kept(generator: TextGenerator) -> None:
    """The reader asks to write it again, and stops before the model is free."""

    async def scene(user: Any, pages: list[ChatPage]) -> None:
        (page,) = pages
        with user:
            await page._answer("Once upon a time")
            before = list(page.conversation.turns)
            free = threading.Event()
            page.config.worker.thread.submit(free.wait)
            again = asyncio.create_task(page._again())
            while page.stop is None:
                await asyncio.sleep(0.01)
            page.stop.set()
            await again
            free.set()
        assert page.conversation.turns == before
        assert [exchange.turn for exchange in page.history.exchanges] == before
        assert len(page.articles) == 1

    simulated(generator, scene)


def test_a_message_sent_too_early_stays_in_the_field(generator: TextGenerator) -> None:
    async def scene(user: Any, pages: list[ChatPage]) -> None:
        (page,) = pages
        with user:
            page.stop = Stop()  # an answer is being written
            page.input.value = "And then?"
            await page._ask()
        assert page.input.value == "And then?"
        assert user.notify.messages == ["the answer is not finished: wait, or stop it first"]
        assert page.articles == []

    simulated(generator, scene)


def test_a_message_without_an_answer_goes_back_into_the_field(generator: TextGenerator) -> None:
    """One message does not fit the context. The answer to the other is stopped before the model is free."""

    async def scene(user: Any, pages: list[ChatPage]) -> None:
        (page,) = pages
        with user:
            page.input.value = "word " * 600
            await page._ask()
            assert page.input.value == "word " * 600
            assert user.notify.messages == ["the context of 512 tokens is full; shorten the message"]
            free = threading.Event()
            page.config.worker.thread.submit(free.wait)
            page.input.value = "The dog"
            asked = asyncio.create_task(page._ask())
            while page.stop is None:
                await asyncio.sleep(0.01)
            assert page.input.value == ""
            page.input.value = "And then?"  # typed while waiting
            page.stop.set()
            await asyncio.wait_for(asked, 60)
            free.set()
        assert page.input.value == "The dog\nAnd then?"
        assert page.articles == [] == page.conversation.turns

    simulated(generator, scene)


@pytest.fixture
def slowly(generator: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> TextGenerator:
    """The generator, with texts that do not end before a test stops them."""
    step = Side.step
    monkeypatch.setattr(Side, "step", lambda self: (time.sleep(0.02), step(self)))
    return replace(generator, settings=Settings(max_new_tokens=400))


@pytest.mark.parametrize("closed", [False, True], ids=["reload", "lost connection"])
def test_an_answer_that_is_being_written_is_kept_with_the_options(slowly: TextGenerator, closed: bool) -> None:
    async def scene(user: Any, pages: list[ChatPage]) -> None:
        options = pages[0].options
        options.both, options.drafter = True, "heads, chain of 7 nodes"
        with user:
            assert options.change(lambda now: replace(now, temperature=0.7, max_new_tokens=300))
        user.find("Once upon a time").click()
        while not (pages[0].articles and (shown := pages[0].articles[0].cards[1].snapshot) and shown.tokens):
            await asyncio.sleep(0.01)
        if closed:
            user.client.delete()
        await user.open("/")
        await user.should_see("stopped: speeds are compared only for finished texts", retries=600)
        page = pages[1]
        (turn,) = page.conversation.turns
        assert (turn.message, turn.result.finish_reason, page.stop) == ("Once upon a time", "stopped", None)
        assert 0 < len(turn.result.new_ids) < 300
        assert page.articles[0].cards[1].snapshot.pieces != []
        assert page.options.drafter == "heads, chain of 7 nodes"
        assert (page.options.settings.temperature, page.options.settings.max_new_tokens) == (0.7, 300)
        assert page.about == "heads, chain of 7 nodes · rejection"
        assert [len(other.articles) for other in pages] == [1, 1]
        page._leave()
        assert page.history.page is None

    simulated(slowly, scene)


def test_a_message_that_waits_is_in_the_field_after_a_reload(generator: TextGenerator) -> None:
    async def scene(user: Any, pages: list[ChatPage]) -> None:
        free = threading.Event()
        pages[0].config.worker.thread.submit(free.wait)
        user.find("Once upon a time").click()
        while pages[0].stop is None:
            await asyncio.sleep(0.01)
        await user.open("/")
        while len(pages) < 2 or not pages[1].input.value:
            await asyncio.sleep(0.01)
        free.set()
        assert pages[1].input.value == "Once upon a time"
        assert pages[1].articles == [] == pages[1].conversation.turns

    simulated(generator, scene)


def test_a_duplicated_tab_continues_with_a_copy(slowly: TextGenerator) -> None:
    """The answer of the first tab is not stopped."""

    async def scene(user: Any, pages: list[ChatPage]) -> None:
        user.find("Once upon a time").click()
        while pages[0].stop is None:
            await asyncio.sleep(0.01)
        app.storage._tabs["another"] = app.storage._tabs[user.tab_id]  # as NiceGUI does for a duplicate
        user.tab_id = "another"
        await user.open("/")
        while not pages[1].restored:
            await asyncio.sleep(0.01)
        assert pages[0].stop is not None
        assert not pages[0].stop.is_set()
        assert pages[1].stop is None
        assert pages[1].options is not pages[0].options
        pages[0].stop.set()
        while pages[0].stop is not None:
            await asyncio.sleep(0.01)
        assert [len(page.conversation.turns) for page in pages] == [1, 0]

    simulated(slowly, scene)


@pytest.mark.parametrize(
    ("typed", "used"), [(3.7, 4), (None, 8), (0, 1), (-5, 1), (1e9, 100_000), (float("inf"), 100_000), (60, 60)]
)
def test_the_field_of_the_length_shows_what_is_used(generator: TextGenerator, typed: float | None, used: int) -> None:
    async def scene(user: Any, pages: list[ChatPage]) -> None:
        (field,) = (one for one in user.client.elements.values() if isinstance(one, ui.number))
        with user:
            field.value = typed
            field._handle_event({"listener_id": listener_of(field, "change"), "args": {}})
            field.sanitize()  # when the field loses the focus
        assert pages[0].options.settings.max_new_tokens == used == field.value
        assert field.props["model-value"] == str(used)
        assert user.notify.messages == []

    simulated(generator, scene)


@pytest.mark.parametrize(("acceptance", "used"), [(None, 0.7), ("greedy", 0.0)])
def test_the_slider_of_the_temperature_shows_what_is_used(
    generator: TextGenerator, acceptance: str | None, used: float
) -> None:
    """A value that the settings refuse goes back."""
    settings = replace(SHORT, acceptance=acceptance)

    async def scene(user: Any, pages: list[ChatPage]) -> None:
        slider = next(one for one in user.client.elements.values() if isinstance(one, ui.slider))
        slider._handle_event({"listener_id": listener_of(slider, "update:modelValue"), "args": 0.7})
        assert (
            pages[0].options.settings.temperature == slider.value == slider._to_dict()["props"]["model-value"] == used
        )
        assert len(user.notify.messages) == (used == 0.0)

    simulated(replace(generator, settings=settings), scene)


def test_a_system_message_applies_from_the_next_answer_on(generator: TextGenerator, with_template: Any) -> None:
    async def scene(user: Any, pages: list[ChatPage]) -> None:
        (page,) = pages
        with user:
            await page._answer("Hello")
            page.options.system = "Be brief."
            assert page.options.change(lambda now: replace(now, temperature=0.7))
            await user.should_see("heads, 8 nodes · rejection")
            assert page.options.change(lambda now: replace(now, temperature=0.0))
            await page._answer("And now?")
            page.options.system = "  "
            await page._answer("And in the end?")
        prompts = [generator.tokenizer.decode(turn.prompt) for turn in page.conversation.turns]
        assert [prompt.partition("<|im_end|>")[0] for prompt in prompts] == [
            "<|im_start|>system\nBe kind.",
            "<|im_start|>system\nBe brief.",
            "<|im_start|>user\nHello",
        ]
        await user.open("/")  # a reload
        await user.should_see("And in the end?")
        assert pages[1].options.system.strip() == ""

    simulated(generator, scene, "Be kind.")


def test_the_drafters_of_a_page(generator: TextGenerator) -> None:
    """Every drafter writes the same text, with what is loaded already."""
    drafters = drafters_of(generator, "heads")
    assert list(drafters) == [
        "heads, 8 nodes",
        "heads, chain of 7 nodes",
        "heads, dynamic tree of 16 nodes",
        "ngram",
        NO_DRAFTER,
    ]
    ids = generator.tokenizer("Once upon a time")["input_ids"]
    texts = []
    for source in drafters.values():
        texts.append(begin(generator, ids, SHORT, source=source).finish()[0].new_ids)
    assert texts == [texts[0]] * len(texts)
    drawn = replace(generator, settings=Settings(temperature=1.0, draft="sample"))
    assert list(drafters_of(drawn, "heads")) == ["heads, 8 nodes", "heads, chain of 7 nodes", NO_DRAFTER]
    compiled = replace(generator, settings=Settings(compile=True))
    assert list(drafters_of(compiled, "heads")) == ["heads, 8 nodes", NO_DRAFTER]


def test_options_belong_to_a_page_and_wrong_options_are_refused(generator: TextGenerator) -> None:
    greedy = replace(generator, settings=Settings(max_new_tokens=8, acceptance="greedy"))

    async def scene(user: Any, pages: list[ChatPage]) -> None:
        with user:
            assert pages[0].options.change(lambda now: replace(now, max_new_tokens=4))
            assert not pages[0].options.change(lambda now: replace(now, temperature=0.7))
        assert user.notify.messages == [
            "acceptance 'greedy' writes no samples; use temperature 0 (do_sample=False) or 'rejection'"
        ]
        assert pages[0].options.settings == Settings(max_new_tokens=4, acceptance="greedy")

    simulated(greedy, scene)
    assert greedy.settings.max_new_tokens == 8
