"""The web page of `medusa chat --web`, which shows plain decoding and a drafter side by side.

NiceGUI serves the page with its scripts and fonts, so the page loads nothing from other servers. Every open page has
its own conversation. All pages share one model and one thread, which decodes their texts one after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path

from nicegui import app, ui
from nicegui.server import Server
from starlette.middleware.trustedhost import TrustedHostMiddleware

from decode.results import prompt_seeds
from decode.serve.chat import ChatWorker, Conversation, Side, Snapshot, Turn, verdict
from decode.serve.texts import TextPiece, TextStream, joined
from decode.settings import Settings
from medusa.errors import RequestError

STATIC = Path(__file__).parent / "static"
ICON = (STATIC / "chat.svg").read_text(encoding="utf-8")
OPENINGS = {  # messages to start with; True: for backbones with a chat template
    True: ["Explain tree attention to a child.", "Write a short poem about the sea.", "List ten uses of a paper clip."],
    False: ["Once upon a time", "One sunny day, a girl named Mia", "The old boat"],
}
WELCOME = (
    "The same model writes both texts. For the second text, a drafter guesses several tokens ahead. Guesses that the "
    "model accepted are <mark>marked</mark>; every other token took one forward of its own."
)
NO_TEMPLATE = (
    "This model has no chat template, so it is not an assistant: it continues your text. Send an empty message to "
    "continue the text as it is."
)


@dataclass(frozen=True)
class PageConfig:
    """The values that all open chat pages share: the thread with the model, default settings, and names to show."""

    worker: ChatWorker
    settings: Settings
    backbone: str
    drafter: str
    system: str | None
    seed: int
    raw: bool = False
    """Whether the chat template is turned off."""


def serve(config: PageConfig, host: str, port: int, allowed_hosts: list[str], on_start: Callable[[], object]) -> None:
    """Serve the chat page until the process is stopped. `on_start` is called when the server begins to listen."""
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts)

    async def announce() -> None:
        while not Server.instance.started:  # startup handlers are called before the server listens
            await asyncio.sleep(0.02)
        on_start()

    app.on_startup(announce)
    ui.run(
        lambda: ChatPage(config).build(),
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


def marked(pieces: Sequence[TextPiece]) -> str:
    """Convert pieces of text to HTML. Consecutive accepted guesses share a `<mark>`, without the spaces around them."""
    html = ""
    for drafted, group in groupby(pieces, key=lambda piece: piece.drafted):
        text = joined(list(group))
        guessed = text.strip() if drafted else ""
        before, _, after = text.partition(guessed) if guessed else (text, "", "")
        html += escape(before) + (f"<mark>{escape(guessed)}</mark>" if guessed else "") + escape(after)
    return html


class Card:
    """A box on the page that shows a text while it is decoded, with or without the drafter, and its speed below."""

    def __init__(self, title: str, subtitle: str, kind: str) -> None:
        with ui.element("section").classes(f"card {kind}"):
            with ui.element("header"):
                ui.label(title).classes("title")
                ui.label(subtitle).classes("subtitle")
            self.text = ui.html("", sanitize=False).classes("text")
            self.figures = []
            with ui.element("footer"):
                for unit in ("tokens/s", "tokens per step", "tokens", "seconds"):
                    with ui.element("div").classes("figure"):
                        self.figures.append(ui.label("–").classes("value"))
                        ui.label(unit).classes("unit")

    def show(self, now: Snapshot) -> None:
        """Show the text and the metrics of the snapshot `now`."""
        cursor = '<i class="cursor"></i>' if now.finish_reason is None else ""
        end = ' <span class="end">■ end of the text</span>' if now.finish_reason == "eos" else ""
        self.text.content = marked(now.pieces).lstrip() + cursor + end  # a continued text begins with a space
        shown = (f"{now.tokens_per_second:.0f}", f"{now.tau:.2f}", str(now.tokens), f"{now.seconds:.2f}")
        for label, figure in zip(self.figures, shown, strict=True):
            label.text = figure


class ChatPage:
    """One open chat page with its conversation."""

    def __init__(self, config: PageConfig) -> None:
        self.config, self.generator = config, config.worker.generator
        assert self.generator.source is not None, "a page without a drafter has nothing to compare"
        self.num_nodes = self.generator.source.num_nodes
        self.conversation = Conversation(self.generator.tokenizer, config.system, raw=config.raw)
        self.templated = self.conversation.has_template
        self.settings = config.settings
        self.answers = 0
        self.stopped: threading.Event | None = None  # set it to stop the current answer; `None`: no answer is written

    def build(self) -> None:
        """Add the header, the log of messages and the input field to the page."""
        ui.colors(primary="#128053")
        ui.add_css((STATIC / "chat.css").read_text(encoding="utf-8"))
        ui.add_head_html(f"<script>{(STATIC / 'chat.js').read_text(encoding='utf-8')}</script>")
        ui.context.client.on_delete(self._forget)
        dark = ui.dark_mode(None)
        with ui.header().classes("top"):
            ui.html(ICON, sanitize=False).classes("logo")
            with ui.element("div").classes("names"):
                ui.label(self.config.backbone.rstrip("/").rsplit("/", 1)[-1]).classes("backbone")
                ui.label(f"{self.config.drafter}, {self.num_nodes} nodes · {self.settings.rule.name}").classes("about")
            ui.space()
            self.both = ui.switch("side by side", value=True).props("dense")
            with ui.button(icon="tune").props("flat round dense aria-label=Options"):
                self._options()
            light = ui.button(icon="contrast", on_click=lambda: dark.set_value(dark.value is None or not dark.value))
            light.props("flat round dense aria-label='Light or dark'")
            ui.button(icon="restart_alt", on_click=self._reset).props("flat round dense aria-label='Start again'")
        with ui.element("main").props("role=log aria-live=polite"):
            self.log = ui.element("div").classes("log")
        with ui.footer().classes("bottom"), ui.element("div").classes("ask"):
            self.input = ui.textarea(placeholder="Write a message" if self.templated else "Write a beginning")
            self.input.classes("field").props("autogrow autofocus borderless dense rows=1")
            self.input.on("keydown.enter.exact.prevent", self._ask)
            self.button = ui.button(icon="arrow_upward", on_click=self._ask_or_stop).props("round unelevated")
            self.button.props("aria-label=Send")
        self._welcome()

    def _options(self) -> None:
        with ui.menu().props("anchor='bottom right' self='top right'"), ui.element("div").classes("options"):
            label = ui.label()
            slider = ui.slider(min=0, max=1.5, step=0.1, value=self.settings.temperature)
            slider.props("aria-label=Temperature")
            label.bind_text_from(slider, "value", lambda t: f"Temperature {t:.1f}" if t else "Temperature 0: greedy")
            ui.label("Maximum of new tokens")
            length = ui.number(value=self.settings.max_new_tokens, min=1, max=100_000, step=32, precision=0)
            length.props("dense outlined aria-label='Maximum of new tokens'")
        if self.settings.compile:
            slider.disable()  # steps were compiled for this temperature
        slider.on("change", lambda: self._change(lambda now: replace(now, temperature=float(slider.value))))
        length.on("change", lambda: self._change(lambda now: replace(now, max_new_tokens=int(length.value or 0))))

    def _change(self, change: Callable[[Settings], Settings]) -> None:
        try:
            self.settings = change(self.settings)
        except RequestError as error:
            ui.notify(str(error), type="negative")

    def _welcome(self) -> None:
        with self.log, ui.element("div").classes("welcome") as self.welcome:
            ui.html(ICON, sanitize=False).classes("emblem")
            ui.label("The same text, faster").classes("hello")
            for paragraph in [WELCOME] if self.templated else [WELCOME, NO_TEMPLATE]:
                ui.html(f"<p>{paragraph}</p>", sanitize=False)
            with ui.element("div").classes("openings"):
                for text in OPENINGS[self.templated]:
                    ui.button(text, on_click=lambda text=text: self._answer(text)).props("outline no-caps rounded")

    def _forget(self) -> None:
        """Stop the current answer, and replace the conversation by an empty one."""
        if self.stopped is not None:
            self.stopped.set()
        self.conversation = Conversation(self.generator.tokenizer, self.config.system, raw=self.config.raw)

    def _reset(self) -> None:
        self._forget()
        self.log.clear()
        self._welcome()

    async def _ask_or_stop(self) -> None:
        if self.stopped is not None:
            self.stopped.set()
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
            turn = conversation.ask(message, *self.generator.models(self.settings))
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
        """Decode the answer with the drafter and, if the user chose it, also without; show the texts as they grow."""
        settings, conversation, worker = self.settings, self.conversation, self.config.worker
        ways = [True, False] if self.both.value else [False]
        with self.log, ui.element("article"):
            if turn.message:
                ui.label(turn.message).classes("message")
            state = ui.label(f"{worker.waiting} before you" if worker.waiting else "").classes("state")
            with ui.element("div").classes("sides" if len(ways) > 1 else "sides alone"):
                cards = [Card("Plain decoding", "one token per step", "plain")] if len(ways) > 1 else []
                guesses = f"up to {self.num_nodes - 1} guesses per step"
                cards.append(Card(f"With {self.config.drafter}", guesses, "drafted"))
            result = ui.element("div").classes("verdict")

        def show(snapshots: list[Snapshot]) -> None:
            if self.conversation is conversation:  # otherwise the user has reset or closed the page
                state.text = ""
                for card, snapshot in zip(cards, snapshots, strict=True):
                    card.show(snapshot)

        seed = prompt_seeds(self.config.seed, [self.answers])[0]
        self.answers += 1

        def side(plain: bool) -> Side:
            stream = TextStream(self.generator.tokenizer, settings.stop, () if self.templated else turn.prompt)
            return Side(self.generator.run(turn.prompt, settings, seed, plain), stream)

        sides = await worker.write(lambda: list(map(side, ways)), show, stopped)
        if sides:
            show([Snapshot.at(side) for side in sides])
        if len(sides) == 2 and self.conversation is conversation:
            faster, same = verdict(sides[0], sides[1], settings)
            with result:
                ui.label(faster).classes("faster")
                ui.label("as fast").classes("than")
                ui.label(same).classes("same")
        return sides
