"""The web page of `medusa chat --web`, which shows plain decoding and a drafter side by side.

NiceGUI serves the page with its scripts and fonts, so the page loads nothing from other servers. Every open page has
its own conversation, which the server keeps in memory, so that a reload of the page shows it again. All pages share
one model and one thread, which decodes their texts one after the other."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nicegui import app, binding, ui
from nicegui.server import Server
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers import PreTrainedTokenizerBase

from decode.drafters.base import DrafterFactory
from decode.serve.chat import ChatWorker, Conversation, Exchange, Shown, Side, Snapshot, Stop, Turn, verdict
from decode.serve.chat_card import Article, StepPanel
from decode.serve.chat_options import PageOptions, drafters_of
from decode.texts import prompt_seeds
from medusa.errors import RequestError, first_line
from medusa.files import Json
from medusa.records.pieces import TextStream

STATIC = Path(__file__).parent / "static"
ICON = (STATIC / "chat.svg").read_text(encoding="utf-8")
OPENINGS = {  # messages to start with; True: for backbones with a chat template
    True: ["Explain tree attention to a child.", "Write a short poem about the sea.", "List ten uses of a paper clip."],
    False: ["Once upon a time", "One sunny day, a girl named Mia", "The old boat"],
}
WELCOME = (
    "The same model writes both texts. For the second text, a drafter guesses several tokens ahead. Guesses that the "
    "model accepted are <mark>marked</mark>; every other token took one forward of its own. Point at a word or tap it "
    "to see all guesses of its step."
)
NO_TEMPLATE = (
    "This model has no chat template, so it is not an assistant: it continues your text. Send an empty message to "
    "continue the text as it is."
)


SEND_ON_ENTER = """(event) => {
  if (event.isComposing || event.keyCode === 229) return; // the Enter key ends the input of a Chinese word, for example
  event.preventDefault();
  emit();
}"""
HISTORY = "history"  # name of the conversation in the storage of a browser tab, which the server keeps in memory
RECONNECT = 30.0  # seconds for which the page of a broken connection waits for the browser


@dataclass(frozen=True)
class PageConfig:
    """The values that all open chat pages share: the thread with the model, and names to show."""

    worker: ChatWorker
    backbone: str
    drafter: str
    system: str | None
    seed: int
    raw: bool = False
    """Whether the chat template is turned off."""
    template_options: Json = field(default_factory=dict)

    def conversation(self, tokenizer: PreTrainedTokenizerBase, system: str | None) -> Conversation:
        """Make an empty conversation."""
        options, stop = self.template_options, self.worker.generator.settings.stop or ()
        way = 'press "Start again"'
        return Conversation(tokenizer, system, raw=self.raw, template_options=options, stop=stop, way_out=way)


@dataclass
class History:
    """All that a reload of the page shows again. The pages that one browser tab loads share it."""

    conversation: Conversation
    options: PageOptions
    exchanges: list[Exchange] = field(default_factory=list)
    answers: int = 0  # number of answers begun, from which the next answer's seed is made
    unsent: str = ""  # a message that got no answer, and goes back into the field
    tab: str | None = None  # the id of the browser tab
    page: ChatPage | None = None  # the page that shows the history; `None`: the tab is closed
    writing: Stop | None = None  # set it to stop the answer that is being written; `None`: there is none

    def copy(self) -> History:
        """Copy the history for another browser tab."""
        conversation = replace(self.conversation, turns=list(self.conversation.turns))
        return History(conversation, replace(self.options), list(self.exchanges), self.answers)


def serve(config: PageConfig, host: str, port: int, allowed_hosts: list[str], on_start: Callable[[], object]) -> None:
    """Serve the chat page until the process is stopped. `on_start` is called when the server begins to listen."""
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts)
    binding.MAX_PROPAGATION_TIME = math.inf  # the thread that decodes delays updates, of which NiceGUI would warn

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
        reconnect_timeout=RECONNECT,
    )


class ChatPage:
    """One open chat page with its conversation."""

    def __init__(self, config: PageConfig) -> None:
        self.config, self.generator = config, config.worker.generator
        assert self.generator.tokenizer is not None, "a chat needs a tokenizer"
        self.tokenizer = self.generator.tokenizer
        drafters = drafters_of(self.generator, config.drafter)
        options = PageOptions(self.generator.settings, drafters, next(iter(drafters)), config.system or "")
        self.history = History(config.conversation(self.tokenizer, config.system), options, page=self)
        self.templated = self.conversation.has_template
        self.restored = False
        self.articles: list[Article] = []
        self.stop: Stop | None = None  # set it to stop the current answer; `None`: no answer is written

    @property
    def conversation(self) -> Conversation:
        return self.history.conversation

    @property
    def options(self) -> PageOptions:
        return self.history.options

    @property
    def about(self) -> str:
        return f"{self.options.drafter} · {self.options.settings.rule.name}"

    def build(self) -> None:
        """Add the header, the log of messages and the input field to the page."""
        ui.colors(primary="#128053")
        ui.add_css((STATIC / "chat.css").read_text(encoding="utf-8"))
        ui.add_head_html(f"<script>{(STATIC / 'chat.js').read_text(encoding='utf-8')}</script>")
        ui.context.client.on_connect(self._restore)
        ui.context.client.on_delete(self._leave)
        dark = ui.dark_mode(None)
        with ui.header().classes("top"):
            ui.html(ICON, sanitize=False).classes("logo")
            with ui.element("div").classes("names"):
                ui.label(self.config.backbone.rstrip("/").rsplit("/", 1)[-1]).classes("backbone")
                ui.label().classes("about").bind_text_from(self, "about")
            ui.space()
            self.both = ui.switch("side by side", value=True).props("dense")
            self.tune = ui.button(icon="tune").props("flat round dense aria-label=Options")
            self.tune.disable()  # until its menu is there
            light = ui.button(icon="contrast", on_click=lambda: dark.set_value(dark.value is None or not dark.value))
            light.props("flat round dense aria-label='Light or dark'")
            ui.button(icon="restart_alt", on_click=self._reset).props("flat round dense aria-label='Start again'")
        with ui.element("main").props("role=log aria-live=polite"):
            self.log = ui.element("div").classes("log")
        with ui.footer().classes("bottom"), ui.element("div").classes("ask"):
            self.input = ui.textarea(placeholder="Write a message" if self.templated else "Write a beginning")
            self.input.classes("field").props("autogrow autofocus borderless dense rows=1 aria-label=Message")
            self.input.on("keydown.enter.exact", self._ask, js_handler=SEND_ON_ENTER)
            self.button = ui.button(icon="arrow_upward", on_click=self._ask_or_stop).props("round unelevated")
            self.button.props("aria-label=Send")
        self.panel = StepPanel(self.tokenizer)
        self._welcome()

    def _welcome(self) -> None:
        with self.log, ui.element("div").classes("welcome") as self.welcome:
            ui.html(ICON, sanitize=False).classes("emblem")
            ui.label("The same text, faster").classes("hello")
            for paragraph in [WELCOME] if self.templated else [WELCOME, NO_TEMPLATE]:
                ui.html(f"<p>{paragraph}</p>", sanitize=False)
            with ui.element("div").classes("openings"):
                for text in OPENINGS[self.templated]:
                    ui.button(text, on_click=lambda text=text: self._send(text)).props("outline no-caps rounded")

    async def _restore(self) -> None:
        """Show what this browser tab showed before a reload, with its options; an answer that it wrote is stopped."""
        if self.restored:  # the same page has lost its connection for a moment
            return
        self.restored = True
        kept, tab = app.storage.tab.get(HISTORY), ui.context.client.tab_id
        if isinstance(kept, History):
            self.history = kept if kept.tab == tab else kept.copy()  # browsers can duplicate a tab
        history = app.storage.tab[HISTORY] = self.history
        history.tab, history.page = tab, self
        with self.tune:
            self.options.build(self.templated)
        self.tune.enable()
        self.both.bind_value(self.options, "both")
        self._show_kept()
        if history.writing is not None:
            history.writing.set()
            self._occupy(history.writing)
            while history.writing is not None:
                await asyncio.sleep(0.05)
            self._occupy(None)
        if history.page is self:
            self._show_kept()
            self._take_back()

    def _show_kept(self) -> None:
        """Show the exchanges of the history that the page does not show yet."""
        for exchange in self.history.exchanges[len(self.articles) :]:
            self._article(exchange.turn.message, exchange.texts).end(exchange)

    def _take_back(self) -> None:
        """Put a message that got no answer back into the field, above what the reader has typed since."""
        self.input.value = "\n".join(filter(None, (self.history.unsent, self.input.value)))
        self.history.unsent = ""

    def _leave(self) -> None:
        """Stop the current answer, and show the history no more. The answer stays in the history."""
        if self.stop is not None:
            self.stop.set()
        if self.history.page is self:  # otherwise the browser tab has loaded another page
            self.history.page = None

    def _reset(self) -> None:
        self._leave()
        before = self.history
        conversation = self.config.conversation(self.tokenizer, before.conversation.system)
        self.history = History(conversation, before.options, tab=before.tab, page=self)
        app.storage.tab[HISTORY] = self.history
        self.articles.clear()
        self.log.clear()
        self._welcome()

    def _occupy(self, stop: Stop | None) -> None:
        """Let the button below stop an answer, or send a message if `stop` is `None`."""
        self.stop = stop
        self.button.props("icon=arrow_upward aria-label=Send" if stop is None else "icon=stop aria-label=Stop")

    async def _ask_or_stop(self) -> None:
        if self.stop is not None:
            self.stop.set()
        else:
            await self._ask()

    async def _ask(self) -> None:
        if self.stop is not None:  # the message stays in the field
            ui.notify("the answer is not finished: wait, or stop it first", position="top")
        else:
            message, self.input.value = self.input.value or "", ""
            await self._send(message)

    async def _send(self, message: str) -> None:
        """Answer a message. A message that gets no answer goes back into the field, of this page or after a reload."""
        history = self.history
        if self.stop is None and not await self._answer(message):
            history.unsent = message
            if history.page is self:
                self._take_back()

    async def _again(self) -> None:
        """Write the last answer again, with the options of now and another seed."""
        history = self.history
        if self.stop is not None or not history.exchanges:
            return
        before = history.exchanges.pop()
        history.conversation.turns.pop()
        self._drop_last_article()
        with self.log:  # the button that called this method is gone
            if not await self._answer(before.turn.message):
                history.conversation.turns.append(before.turn)
                history.exchanges.append(before)
                if history.page is self:
                    self._article(before.turn.message, before.texts).end(before)

    async def _answer(self, message: str) -> bool:
        """Answer a message, and add the answer to the history; returns whether it was added."""
        if self.stop is not None:
            return False
        history = self.history
        if self.templated:
            history.conversation.system = self.options.system.strip() or None
        try:
            turn = history.conversation.ask(message, *self.generator.models)
        except RequestError as error:
            ui.notify(str(error), type="warning")
            return False
        source = self.options.drafters[self.options.drafter]
        texts = [Shown("Plain decoding", "one token per step", "plain")] if source is None or self.options.both else []
        if source is not None:
            guesses = f"up to {source.num_nodes - 1} guesses per step"
            texts.append(Shown(f"With {self.options.drafter.rsplit(', ', 1)[0]}", guesses, "drafted"))
        article = self._article(message, texts)
        history.writing = Stop()
        self._occupy(history.writing)
        added = False
        try:
            added = await self._write(turn, source, article, history.writing)
        except Exception as error:  # also one of the model: the page goes on, and the terminal shows where it arose
            if not isinstance(error, RequestError):
                traceback.print_exc()
            if history.page is self:
                ui.notify(first_line(error), type="negative", timeout=0, close_button=True)
        finally:
            history.writing = None
            self._occupy(None)
        if not added and history.page is self:
            self._drop_last_article()
        return added

    def _article(self, message: str, texts: list[Shown]) -> Article:
        """Add the boxes of an exchange to the end of the log."""
        self.welcome.set_visibility(False)
        for earlier in self.articles:
            earlier.again.set_visibility(False)
        with self.log:
            self.articles.append(Article(message, texts, self.panel.show, self._again))
        return self.articles[-1]

    def _drop_last_article(self) -> None:
        self.articles.pop().box.delete()
        self.welcome.set_visibility(not self.articles)
        if self.articles:
            self.articles[-1].again.set_visibility(True)

    async def _write(self, turn: Turn, source: DrafterFactory | None, article: Article, stop: Stop) -> bool:
        """Decode the texts of an article, show them as they grow, and add the exchange to the history.

        Return False if the answer was stopped before its turn came."""
        settings, history, worker = self.options.settings, self.history, self.config.worker
        article.state.text = f"{worker.waiting} before you" if worker.waiting else ""
        seed = prompt_seeds(self.config.seed, [history.answers])[0]
        history.answers += 1

        def show(snapshots: list[Snapshot]) -> None:
            if history.page is self:  # otherwise the user has reset, loaded again or closed the page
                article.show(snapshots)

        def side(shown: Shown) -> Side:
            stream = TextStream(self.tokenizer, settings.stop, () if self.templated else turn.prompt)
            used = None if shown.kind == "plain" else source
            write = replace(self.generator, settings=settings, source=used)
            keep_drafts = used is not None and not settings.compile
            return Side(write.start([turn.prompt], [seed], keep_drafts), stream)

        sides = await worker.write(lambda: list(map(side, article.texts)), show, stop)
        if not sides:
            return False
        told = verdict(sides[0], sides[1], settings) if len(sides) == 2 else None
        exchange = Exchange(turn, article.texts, [Snapshot.at(side) for side in sides], told)
        history.conversation.keep(turn, sides[-1].result, sides[-1].text)
        history.exchanges.append(exchange)
        if history.page is self:
            article.end(exchange)
        return True
