"""One self-contained HTML page: words, tables and pictures; no script, no network, light and dark, any width."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    # name: in the light theme, in the dark one. A picture drawn with the light one follows the page's theme.
    "ink": ("#1f2933", "#e4e7eb"),
    "faint": ("#616e7c", "#9aa5b1"),
    "line": ("#d9dee3", "#3e4c59"),
    "paper": ("#ffffff", "#161b20"),
    "card": ("#f5f7f8", "#1f272e"),
    "good": ("#0a7a4b", "#5fd39a"),
    "bad": ("#b3261e", "#ff8a80"),
    "plain": ("#9aa5b0", "#77838f"),
    "transformers": ("#52606d", "#b8c2cc"),
    "medusa": ("#0b7a75", "#3cbcb1"),
    "amber": ("#f2a541", "#f2b661"),
    "violet": ("#7a3e9d", "#c59ae0"),
    "blue": ("#3b76c4", "#7fb0ec"),
}


def _variables(theme: int) -> str:
    return " ".join(f"--{name}: {colors[theme]};" for name, colors in COLORS.items())


STYLE = (
    f":root {{ color-scheme: light dark; {_variables(0)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}"
    """
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 76rem;
  margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1.25rem; }
p { max-width: 46rem; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.faint, figcaption { color: var(--faint); font-size: .875rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.facts div { background: var(--card); border-radius: 8px; padding: .7rem .9rem; }
.facts b { display: block; font-size: 1.7rem; line-height: 1.2; font-weight: 650; color: var(--medusa);
  font-variant-numeric: tabular-nums; }
.facts span { color: var(--faint); font-size: .875rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .75rem 0; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--faint); font-weight: 500; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
table.words td { white-space: normal; text-align: left; overflow-wrap: anywhere; }
table.words td:first-child { white-space: nowrap; overflow-wrap: normal; }
pre { background: var(--card); border-radius: 8px; padding: .7rem .9rem; overflow-x: auto; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 1rem 0; min-width: 0; } figure svg { display: block; width: 100%; height: auto; }
figure svg text { fill: var(--ink); }
figure.wide svg { min-width: 44rem; }
.side { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
@media print { :root { color-scheme: light; } }
"""
)


class Page:
    """A page under construction: parts come in the order of the calls, and `save` writes them."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts = [f"<h1>{escape(title)}</h1>"]
        self.figures: list[Figure] = []

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind`: good, bad or faint."""
        self.parts.append(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """(figure, what it is) in large print, beside each other."""
        boxes = "".join(f"<div><b>{escape(figure)}</b><span>{escape(what)}</span></div>" for figure, what in facts)
        self.parts.append(f'<div class="facts">{boxes}</div>')

    def code(self, text: str) -> None:
        self.parts.append(f"<pre>{escape(text)}</pre>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> None:
        """Cells are texts; a narrow screen scrolls the table, not the page. `kind` words: long cells are broken."""
        lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        start = f'<table class="{kind}">' if kind else "<table>"
        self.parts.append(f'<div class="scroll">{start}' + "\n".join(lines) + "</table></div>")

    def picture(self, figure: Figure, caption: str) -> None:
        """A wide matplotlib figure, which a narrow screen scrolls; the caption is what who cannot see it is told."""
        self.parts.append(f'<div class="scroll">{self._figure(figure, caption, "wide")}</div>')

    def pictures(self, figures: Sequence[tuple[Figure, str]]) -> None:
        """Narrow matplotlib figures with their captions: beside each other where there is room."""
        self.parts.append('<div class="side">' + "".join(self._figure(*pair) for pair in figures) + "</div>")

    def _figure(self, figure: Figure, caption: str, kind: str = "") -> str:
        self.figures.append(figure)
        picture = themed_svg(figure, f"p{len(self.figures)}", caption)
        start = f'<figure class="{kind}">' if kind else "<figure>"
        return f"{start}{picture}<figcaption>{escape(caption)}</figcaption></figure>"

    def save_pictures(self, folder: Path) -> None:
        """Every figure as a PNG, on white, named by its label."""
        for number, figure in enumerate(self.figures, 1):
            name = figure.get_label() or f"picture {number}"
            figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight", facecolor="white")

    def save(self, path: Path) -> None:
        write_text(
            path,
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head><body>\n"
            + "\n".join(self.parts)
            + "\n</body></html>\n",
        )


def themed_svg(figure: Figure, prefix: str, label: str) -> str:
    """A figure as inline SVG: its text is text, its colours follow the page's theme, its ids are its own."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    for side in ("width", "height"):  # the page decides; the view box keeps the shape
        svg = re.sub(rf'(<svg [^>]*?) {side}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\1{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]+|'DejaVu Sans'[^;\"]*", _font, svg)
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{name})")
    svg = svg.replace("#000000", "var(--ink)")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _font(found: re.Match[str]) -> str:
    family = "system-ui, sans-serif"
    return f"font-family: {family}" if found[0].startswith("font-family") else family
