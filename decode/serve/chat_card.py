"""Parts of the chat page: texts with their speed and their comparison, and the panel with the guesses of one step."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from html import escape
from itertools import groupby

from nicegui import events, ui
from transformers import PreTrainedTokenizerBase

from decode.draft import DraftRecord
from decode.serve.chat import Exchange, Shown, Snapshot
from decode.serve.step_tree import drawing, node_texts, summary
from medusa.files import per_second
from medusa.records.pieces import TextPiece, joined

LEGEND = '<p class="legend"><i class="accepted"></i>accepted <i class="rejected"></i>rejected</p>'
ShowStep = Callable[[str, int, DraftRecord], None]
"""(id of the text's element, index of a step, the step's draft): show the draft to the reader."""


def marked(pieces: Sequence[TextPiece], drafts: Sequence[DraftRecord | None] = (), finished: bool = False) -> str:
    """Convert pieces of text to HTML. Consecutive accepted guesses share a `<mark>`, without the spaces around them.

    The text of a step that has a draft becomes a button, which shows the draft. If the text is `finished`, the Tab key
    reaches the first button, and the arrow keys reach the others (`static/chat.js`)."""
    html, reached = "", False
    for step, group in groupby(pieces, key=lambda piece: piece.step):
        first, *others = group
        text = first.text.lstrip()
        html += first.text[: len(first.text) - len(text)]  # spaces look better outside of the button
        runs = groupby([first._replace(text=text), *others], key=lambda piece: piece.drafted)
        text = "".join(_marked(drafted, list(run)) for drafted, run in runs)
        if text and step < len(drafts) and drafts[step] is not None:
            tab = f' tabindex="{-1 if reached else 0}"' if finished else ""
            text = f'<span class="step" role="button" data-step="{step}"{tab}>{text}</span>'
            reached = True
        html += text
    return html


def _marked(drafted: bool, pieces: list[TextPiece]) -> str:
    text = joined(pieces)
    guessed = text.strip() if drafted else ""
    before, _, after = text.partition(guessed) if guessed else (text, "", "")
    return escape(before) + (f"<mark>{escape(guessed)}</mark>" if guessed else "") + escape(after)


class Card:
    """A box on the page that shows a text while it is decoded, with or without a drafter, and its speed below."""

    def __init__(self, shown: Shown, show_step: ShowStep) -> None:
        self.shown, self.show_step = shown, show_step
        self.snapshot: Snapshot | None = None
        with ui.element("section").classes(f"card {shown.kind}"):
            with ui.element("header"):
                ui.label(shown.title).classes("title")
                ui.label(shown.subtitle).classes("subtitle")
                copy = ui.button(icon="content_copy", on_click=self._copy).classes("copy")
                copy.props(f'flat round dense size=sm title="Copy" aria-label="Copy the text: {escape(shown.title)}"')
            self.text = ui.html("", sanitize=False).classes("text")
            for event in ("pointermove", "focusin", "click", "keydown"):
                self.text.on(event, self._ask_step, js_handler="(event) => steps.on(event, emit)")
            self.figures = []
            with ui.element("footer"):
                for unit in ("tokens/s", "tokens per step", "tokens", "seconds"):
                    with ui.element("div").classes("figure"):
                        self.figures.append(ui.label("–").classes("value"))
                        ui.label(unit).classes("unit")

    def show(self, now: Snapshot) -> None:
        """Show the text and the metrics of the snapshot `now`."""
        self.snapshot, finished = now, now.finish_reason is not None
        cursor = "" if finished else '<i class="cursor"></i>'
        end = ' <span class="end">■ end of the text</span>' if now.finish_reason == "eos" else ""
        first = [
            piece._replace(text=piece.text.lstrip()) for piece in now.pieces[:1]
        ]  # continued texts begin with a space
        self.text.content = marked([*first, *now.pieces[1:]], now.drafts, finished) + cursor + end
        shown = (per_second(now.tokens_per_second), f"{now.tau:.2f}", str(now.tokens), f"{now.seconds:.2f}")
        for label, figure in zip(self.figures, shown, strict=True):
            label.text = figure

    def _ask_step(self, event: events.GenericEventArguments) -> None:
        drafts = [] if self.snapshot is None else self.snapshot.drafts
        step = event.args  # from the browser, so it can be anything
        if isinstance(step, int) and 0 <= step < len(drafts) and (record := drafts[step]) is not None:
            self.show_step(self.text.html_id, step, record)

    async def _copy(self) -> None:
        text = "" if self.snapshot is None else joined(self.snapshot.pieces).strip()
        copied = await ui.run_javascript(f"return copyText({json.dumps(text)})", timeout=5)
        ui.notify("copied" if copied else "the browser does not allow copying; select the text instead")


class Article:
    """One exchange on the page: the message, the cards of the texts that answer it, and their comparison."""

    def __init__(
        self, message: str, texts: list[Shown], show_step: ShowStep, again: Callable[[], Awaitable[None]]
    ) -> None:
        """Add the boxes to the page. `again`: write the answer again; the button shows when the texts have ended."""
        self.texts = texts
        with ui.element("article") as self.box:
            if message:
                ui.label(message).classes("message")
            self.state = ui.label().classes("state")
            with ui.element("div").classes("sides" if len(texts) > 1 else "sides alone"):
                self.cards = [Card(shown, show_step) for shown in texts]
            with ui.element("div").classes("below"):
                self.result = ui.element("div").classes("verdict")
                self.again = ui.button(icon="refresh", on_click=again).props("flat round dense size=sm")
                self.again.props("title='Write again' aria-label='Write this answer again'").set_visibility(False)

    def show(self, snapshots: list[Snapshot]) -> None:
        """Show the texts while they grow."""
        self.state.text = ""
        for card, snapshot in zip(self.cards, snapshots, strict=True):
            card.show(snapshot)

    def end(self, exchange: Exchange) -> None:
        """Show the finished texts with their comparison, and the button that writes the answer again."""
        self.show(exchange.snapshots)
        self.again.set_visibility(True)
        if exchange.verdict is None:
            return
        with self.result:
            if speed := exchange.verdict.speed:
                figure, _, rest = speed.partition("× ") if exchange.verdict.is_faster else ("", "", speed)
                if figure:
                    ui.label(f"{figure}×").classes("faster")
                ui.label(rest).classes("than" if figure else "than even")
            ui.label(exchange.verdict.same).classes("same")


class StepPanel:
    """A panel over the page that shows the tree of guesses of one step; `static/chat.js` places it beside the step."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        with ui.element("aside").classes("peek").props("role=status aria-label='Guesses of a step'"):
            self.content = ui.html("", sanitize=False)

    def show(self, text_id: str, step: int, record: DraftRecord) -> None:
        """Show the draft of the step with index `step`, for the text in the page's element `text_id`."""
        texts = node_texts(record, self.tokenizer)
        heading = f'<p class="heading"><b>Step {step + 1}</b> {escape(summary(record, texts))}</p>'
        tree = f'<div class="scroll">{drawing(record, texts)}</div>'
        self.content.content = f'<div data-shown="{text_id} {step}">{heading}{tree}{LEGEND}</div>'
