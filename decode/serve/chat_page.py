"""The page of `medusa chat --web`: plain decoding and a drafter side by side, every guess that was right in colour.

NiceGUI serves it, scripts and fonts included, so nothing is fetched from elsewhere. Every page that is opened has a
conversation of its own; what they share is the model, at which a single thread writes: one text after the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from nicegui import app, ui
from nicegui.server import Server
from starlette.middleware.trustedhost import TrustedHostMiddleware

from decode.request import is_lossy
from decode.results import prompt_seeds, tau
from decode.serve.conversation import Conversation, Side, Turn, Writer, race
from decode.serve.text_stream import Piece, TextStream
from decode.settings import Settings
from medusa.errors import RequestError

STYLE = Path(__file__).with_name("chat_page.css")
REFRESH = 0.08  # seconds between two looks at a text that grows
OPENINGS = {  # to begin with, for backbones with a chat template and without
    True: ["Explain tree attention to a child.", "Write a short poem about the sea.", "List ten uses of a paper clip."],
    False: ["Once upon a time", "One sunny day, a girl named Mia", "The old boat"],
}
WELCOME = (
    "Both texts are by the same model. The second one is helped by guesses several tokens ahead; those that the model "
    "agreed with are <mark>marked</mark>, the others cost it a forward each."
)
NO_TEMPLATE = (
    "This model has no chat template, so it is no assistant: it goes on with your text as it is. An empty message lets "
    "it go on."
)
# Follows the text as it grows, unless the reader has scrolled away from its end.
FOLLOW = """
addEventListener("load", () => {
  let follow = true;
  addEventListener("scroll", () => { follow = innerHeight + scrollY > document.body.scrollHeight - 160; });
  new ResizeObserver(() => { if (follow) scrollTo(0, document.body.scrollHeight); }).observe(document.body);
});
"""
ACCENT = "#128053"
ICON = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32" fill="{ACCENT}">'
    f'<g fill="none" stroke="{ACCENT}" stroke-width="2.6"><path d="M6 16c10 0 9-10 18-10M6 16c10 0 9 10 18 10" '
    'opacity=".45"/><path d="M6 16h18"/></g><circle cx="6" cy="16" r="4"/><circle cx="26" cy="16" r="4"/>'
    '<g opacity=".45"><circle cx="27" cy="6" r="3"/><circle cx="27" cy="26" r="3"/></g></svg>'
)


class Snapshot(NamedTuple):
    """What a page shows of one side at some moment."""

    pieces: list[Piece]
    tokens: int
    seconds: float
    tau: float
    finish_reason: str | None
    """`None` while it is written."""

    @classmethod
    def at(cls, side: Side) -> Snapshot:
        result = side.result
        reason = result.finish_reason if side.finished else None
        return cls(list(side.pieces), len(result.new_ids), result.seconds, tau([result]), reason)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class Worker:
    """Where all pages have their texts written: by one thread, in the order in which they ask."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.thread = ThreadPoolExecutor(1, "desk")
        self.turn = asyncio.Lock()
        self.asking = 0

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do something on the thread that writes."""
        return self.thread.submit(work, *args).result()

    async def write(
        self, begin: Callable[[], list[Side]], show: Callable[[list[Snapshot]], None], stopped: threading.Event
    ) -> list[Side]:
        """Write what `begin` starts to its end, or until `stopped`; `show` is called meanwhile, in this thread.

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

        self.asking += 1
        try:
            async with self.turn:
                return [] if stopped.is_set() else await loop.run_in_executor(self.thread, work)
        finally:
            self.asking -= 1


@dataclass(frozen=True)
class PageConfig:
    """What all pages have in common."""

    desk: Worker
    settings: Settings
    backbone: str
    drafter: str
    system: str | None
    seed: int


def serve(site: PageConfig, host: str, port: int, allowed_hosts: Sequence[str], on_start: Callable[[], None]) -> None:
    """Serve pages until the program is ended."""
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts))

    async def announce() -> None:
        while not Server.instance.started:  # startup handlers are called before anybody listens
            await asyncio.sleep(0.02)
        on_start()

    app.on_startup(announce)
    ui.run(
        lambda: Page(site).build(),
        host=host,
        port=port,
        title="medusa chat",
        favicon=ICON,
        dark=None,
        tailwind=False,
        show=False,
        reload=False,
        show_welcome_message=False,
    )


def marked(pieces: Sequence[Piece]) -> str:
    """Pieces as HTML: what was guessed and accepted in one step is one mark, without the spaces around it."""
    html = ""
    for drafted, group in groupby(pieces, key=lambda piece: piece.drafted):
        text = "".join(piece.text for piece in group)
        words = text.strip()
        before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        html += f"{before}<mark>{escape(words)}</mark>{after}" if drafted and words else escape(text)
    return html


def _said_of_temperature(value: float) -> str:
    return f"Temperature {value:.1f}" if value else "Temperature 0: greedy"


def verdict(plain: Side, drafted: Side, settings: Settings) -> tuple[str, str]:
    """What a race has shown: how many times as fast, and whether the texts are the same."""
    faster = Snapshot.at(drafted).tokens_per_second / max(Snapshot.at(plain).tokens_per_second, 1e-9)
    ours, theirs = drafted.result.new_ids, plain.result.new_ids
    if "stopped" in (plain.result.finish_reason, drafted.result.finish_reason):
        return f"{faster:.2f}×", "stopped: the speeds so far"
    if ours == theirs:
        return f"{faster:.2f}×", "the same text, token for token"
    if is_lossy(settings.acceptor.name):
        return f"{faster:.2f}×", f"another text: acceptance {settings.acceptor.name} is lossy"
    if settings.do_sample:
        return f"{faster:.2f}×", "two samples of the same distribution"
    parted = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    return f"{faster:.2f}×", f"the texts part at token {parted + 1}: a near-tie, rounded otherwise"


class Card:
    """One side of a race."""

    def __init__(self, title: str, subtitle: str, kind: str) -> None:
        with ui.element("section").classes(f"card {kind}"):
            with ui.element("header"):
                ui.label(title).classes("title")
                ui.label(subtitle).classes("subtitle")
            self.text = ui.html("", sanitize=False).classes("text")
            with ui.element("footer"):
                self.speed = self._figure("tokens/s")
                self.tau = self._figure("tokens a step")
                self.count = self._figure("tokens")
                self.seconds = self._figure("seconds")

    @staticmethod
    def _figure(unit: str) -> ui.label:
        with ui.element("div").classes("figure"):
            value = ui.label("–").classes("value")
            ui.label(unit).classes("unit")
        return value

    def show(self, look: Snapshot) -> None:
        cursor = '<i class="cursor"></i>' if look.finish_reason is None else ""
        end = ' <span class="end">■ end of the text</span>' if look.finish_reason == "eos" else ""
        self.text.content = marked(look.pieces).lstrip() + cursor + end  # a text that goes on begins with a space
        self.speed.text = f"{look.tokens_per_second:.0f}"
        self.tau.text = f"{look.tau:.2f}"
        self.count.text = str(look.tokens)
        self.seconds.text = f"{look.seconds:.2f}"


class Page:
    """One reader's conversation."""

    def __init__(self, site: PageConfig) -> None:
        self.site, self.writer = site, site.desk.writer
        self.conversation = Conversation(self.writer.tokenizer, site.system)
        self.templated = self.conversation.has_template
        self.settings = site.settings
        self.answers = 0
        self.stopped: threading.Event | None = None
        """Set to end what is being written; `None` while nothing is."""

    def build(self) -> None:
        ui.colors(primary=ACCENT)
        ui.add_css(STYLE.read_text(encoding="utf-8"))
        ui.add_head_html(f"<script>{FOLLOW}</script>")
        ui.context.client.on_delete(self._leave)
        dark = ui.dark_mode(None)
        with ui.header().classes("top"):
            ui.html(ICON, sanitize=False).classes("logo")
            with ui.element("div").classes("names"):
                ui.label(self.site.backbone.rstrip("/").rsplit("/", 1)[-1]).classes("backbone")
                ui.label(self._about()).classes("about")
            ui.space()
            self.both = ui.switch("side by side", value=True).props("dense")
            with ui.button(icon="tune").props("flat round dense aria-label=Options"):
                self._options()
            ui.button(icon="contrast", on_click=lambda: self._turn_light(dark)).props(
                "flat round dense aria-label='Light or dark'"
            )
            ui.button(icon="restart_alt", on_click=self._reset).props("flat round dense aria-label='Begin anew'")
        with ui.element("main").props("role=log aria-live=polite"):
            self.log = ui.element("div").classes("log")
        with ui.footer().classes("bottom"), ui.element("div").classes("ask"):
            self.input = ui.textarea(placeholder="Write a message" if self.templated else "Write a beginning")
            self.input.classes("field").props("autogrow autofocus borderless dense rows=1")
            self.input.on("keydown.enter.exact.prevent", self._ask)
            self.button = ui.button(icon="arrow_upward", on_click=self._ask_or_stop).props("round unelevated")
            self.button.props("aria-label=Send")
        self._welcome()

    def _about(self) -> str:
        source = self.writer.source
        assert source is not None, "a page without a drafter has nothing to compare"
        return f"{self.site.drafter}, {source.num_nodes} nodes · {self.settings.acceptor.name}"

    @staticmethod
    def _turn_light(dark: Any) -> None:
        dark.set_value(not dark.value if dark.value is not None else True)

    def _options(self) -> None:
        with ui.menu().props("anchor='bottom right' self='top right'"), ui.element("div").classes("options"):
            warmth = ui.label()
            temperature = ui.slider(min=0, max=1.5, step=0.1, value=self.settings.temperature)
            temperature.props("aria-label=Temperature")
            warmth.bind_text_from(temperature, "value", _said_of_temperature)
            ui.label("Tokens at most")
            length = ui.number(value=self.settings.max_new_tokens, min=1, max=100_000, step=32, precision=0)
            length.props("dense outlined aria-label='Tokens at most'")
        if self.settings.compile:
            temperature.disable()  # the steps are compiled for this one
        temperature.on("change", lambda: self._change(temperature=float(temperature.value)))
        length.on("change", lambda: self._change(max_new_tokens=int(length.value or 0)))

    def _change(self, **changes: Any) -> None:
        try:
            changed = replace(self.settings, **changes)
            _ = changed.acceptor  # a rule that was asked for may not fit another temperature
        except RequestError as error:
            ui.notify(str(error), type="negative")
        else:
            self.settings = changed

    def _welcome(self) -> None:
        with self.log, ui.element("div").classes("welcome") as self.welcome:
            ui.html(ICON, sanitize=False).classes("emblem")
            ui.label("The same text, sooner").classes("hello")
            ui.html(f"<p>{WELCOME}</p>", sanitize=False)
            if not self.templated:
                ui.html(f"<p>{NO_TEMPLATE}</p>", sanitize=False)
            with ui.element("div").classes("openings"):
                for opening in OPENINGS[self.templated]:
                    button = ui.button(opening, on_click=lambda text=opening: self._answer(text))
                    button.props("outline no-caps rounded")

    def _reset(self) -> None:
        self._stop()
        self.conversation = Conversation(self.writer.tokenizer, self.site.system)
        self.log.clear()
        self._welcome()

    def _leave(self) -> None:
        """The page was closed: nobody waits for its answer."""
        self._stop()
        self.conversation = Conversation(self.writer.tokenizer, self.site.system)

    def _stop(self) -> None:
        if self.stopped is not None:
            self.stopped.set()

    async def _ask_or_stop(self) -> None:
        if self.stopped is not None:
            self._stop()
        else:
            await self._ask()

    async def _ask(self) -> None:
        if self.stopped is None:
            message, self.input.value = self.input.value or "", ""
            await self._answer(message)

    async def _answer(self, message: str) -> None:
        if self.stopped is not None:
            return
        conversation = self.conversation
        try:
            turn = conversation.ask(message, *self.writer.models(self.settings))
        except RequestError as error:
            ui.notify(str(error), type="warning")
            return
        self.stopped = stopped = threading.Event()
        self.button.props("icon=stop aria-label=Stop")
        self.welcome.set_visibility(False)
        try:
            sides = await self._write(turn, stopped)
            if sides and self.conversation is conversation:
                conversation.keep(turn, sides[-1].result, sides[-1].text)
        except RequestError as error:
            ui.notify(str(error), type="negative", timeout=0, close_button=True)
        finally:
            self.stopped = None
            self.button.props("icon=arrow_upward aria-label=Send")

    async def _write(self, turn: Turn, stopped: threading.Event) -> list[Side]:
        """Show a message, and the answer as it grows; plain decoding first where it takes part."""
        both, settings, conversation = bool(self.both.value), self.settings, self.conversation
        with self.log, ui.element("article"):
            if turn.message:
                ui.label(turn.message).classes("message")
            state = ui.label("").classes("state")
            with ui.element("div").classes("sides" if both else "sides alone"):
                cards = [Card("Plain decoding", "a token a step", "plain")] if both else []
                cards.append(Card(f"With {self.site.drafter}", self._guesses(), "drafted"))
            result = ui.element("div").classes("verdict")
        if self.site.desk.asking:
            state.text = f"{self.site.desk.asking} before you"

        def show(looks: list[Snapshot]) -> None:
            if self.conversation is conversation:  # else the reader has begun anew, or left
                state.text = ""
                for card, look in zip(cards, looks, strict=True):
                    card.show(look)

        seed = prompt_seeds(self.site.seed, [self.answers])[0]
        self.answers += 1
        sides = await self.site.desk.write(lambda: self._begin(turn, settings, seed, both), show, stopped)
        if sides:
            show([Snapshot.at(side) for side in sides])
        if len(sides) == 2 and self.conversation is conversation:
            faster, same = verdict(sides[0], sides[1], settings)
            with result:
                ui.label(faster).classes("faster")
                ui.label("as fast").classes("than")
                ui.label(same).classes("same")
        return sides

    def _guesses(self) -> str:
        assert self.writer.source is not None
        return f"up to {self.writer.source.num_nodes - 1} guesses a step"

    def _begin(self, turn: Turn, settings: Settings, seed: int, both: bool) -> list[Side]:
        before = () if self.templated else turn.prompt
        return [
            Side(
                self.writer.run(turn.prompt, settings, seed, plain),
                TextStream(self.writer.tokenizer, settings.stop, before),
            )
            for plain in ([True, False] if both else [False])
        ]
