"""The options of an open chat page: sampling, length, system message, and the drafter with its tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nicegui import ui

from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext, DrafterFactory
from decode.drafters.layouts import Layout, resolve_tree
from decode.drafters.trained_heads import TrainedHeads
from decode.settings import Settings
from decode.texts import TextGenerator
from medusa.errors import RequestError
from medusa.tree import Tree

NO_DRAFTER = "none: plain decoding"
DYNAMIC = "dynamic:16"


def drafters_of(generator: TextGenerator, name: str) -> dict[str, DrafterFactory | None]:
    """List the drafters that a reader can choose, by their names on the page; the first is the generator's own.

    All of them use what is loaded already: the same heads on other trees, and `ngram`, which needs no model. `None`
    stands for plain decoding. Compiled steps belong to one drafter and one tree, so there the list is short."""
    source, settings = generator.source, generator.settings
    assert source is not None, "a page without a drafter has nothing to compare"
    own: dict[str, DrafterFactory | None] = {f"{name}, {source.num_nodes} nodes": source}
    none: dict[str, DrafterFactory | None] = {NO_DRAFTER: None}
    if settings.compile:
        return own | none
    more: dict[str, DrafterFactory | None] = {}
    if isinstance(source, TrainedHeads):
        layouts: list[tuple[str, Layout]] = [("chain", Tree.chain(source.heads.config.num_heads))]
        if settings.draft == "topk":
            layouts.append(("dynamic tree", resolve_tree(DYNAMIC, source.heads, settings.stop_drafting)))
        for kind, layout in layouts:
            if _fits(source, layout, generator):
                more[f"{name}, {kind} of {layout.num_nodes} nodes"] = TrainedHeads(source.heads, layout)
    if settings.draft == "topk" and name != "ngram":
        more["ngram"] = drafter_factory("ngram", DrafterContext(generator.model, tokenizer=generator.tokenizer))
    return own | more | none


def _fits(source: TrainedHeads, layout: Layout, generator: TextGenerator) -> bool:
    config, backbone = source.heads.config, generator.model.config.get_text_config(decoder=True)
    try:
        layout.candidates.require_fit(config.num_heads, config.draft_vocab_size(backbone.vocab_size))
    except RequestError:  # a vocabulary smaller than the ranks of the tree
        return False
    return True


@dataclass
class PageOptions:
    """What the reader of one page has chosen."""

    settings: Settings
    drafters: dict[str, DrafterFactory | None]
    drafter: str
    system: str = ""  # the system message; empty: none
    both: bool = True  # whether plain decoding writes the text, too

    def change(self, change: Callable[[Settings], Settings]) -> bool:
        """Change the settings; settings that do not fit together are left as they are, with a message."""
        try:
            self.settings = change(self.settings)
        except RequestError as error:
            ui.notify(str(error), type="negative")
            return False
        return True

    def build(self, templated: bool) -> None:
        """Add the fields of the options to the page. Only a `templated` conversation can have a system message."""
        with ui.menu().props("anchor='bottom right' self='top right'"), ui.element("div").classes("options"):
            self._sampling()
            self._length()
            ui.label("Drafter")
            drafter = ui.select(list(self.drafters), value=self.drafter)
            drafter.props("dense outlined options-dense aria-label=Drafter").bind_value_to(self, "drafter")
            if templated:
                ui.label("System message")
                system = ui.textarea(placeholder="none").props("dense outlined autogrow aria-label='System message'")
                system.bind_value(self, "system")

    def _length(self) -> None:
        ui.label("Maximum of new tokens")
        used = self.settings.max_new_tokens
        length = ui.number(value=used, min=1, max=100_000, step=32, precision=0, format="%.0f")
        length.props("dense outlined aria-label='Maximum of new tokens'")

        def lengthen() -> None:
            if length.value is not None:
                length.sanitize()  # rounds; NiceGUI does it only later, when the field loses the focus
                self.change(lambda now: replace(now, max_new_tokens=int(length.value)))
            length.value = self.settings.max_new_tokens

        length.on("change", lengthen)

    def _sampling(self) -> None:
        settings = self.settings
        words = ui.label()
        # Compiled steps take any temperature above 0, or draw nothing.
        least = 0.1 if settings.compile and settings.temperature else 0
        temperature = ui.slider(min=least, max=1.5, step=0.1, value=settings.temperature)
        temperature.props("aria-label=Temperature")
        words.bind_text_from(temperature, "value", lambda t: f"Temperature {t:.1f}" if t else "Temperature 0: greedy")
        mass = ui.label()
        top_p = ui.slider(min=0.05, max=1, step=0.05, value=settings.top_p).props("aria-label='Top p'")
        mass.bind_text_from(top_p, "value", lambda p: f"Top p {p:.2f}" if p < 1 else "Top p 1: off")
        top_p.bind_enabled_from(temperature, "value", lambda t: t > 0)

        def sample() -> None:
            heat = float(temperature.value)
            mass = float(top_p.value) if heat else 1.0  # greedy decoding draws nothing
            if not self.change(lambda now: replace(now, temperature=heat, top_p=mass)):
                temperature.value, top_p.value = self.settings.temperature, self.settings.top_p

        if settings.compile and not settings.temperature:
            temperature.disable()
        for slider in (temperature, top_p):  # the event `change` can come before the value
            slider.on_value_change(sample)
