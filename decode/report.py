"""One self-contained HTML page: words, tables and pictures; no script, no network, light and dark, any width."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --faint: #616e7c; --line: #d9dee3; --paper: #ffffff; --card: #f5f7f8;
  --good: #0b7a75; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --faint: #9aa5b1; --line: #3e4c59; --paper: #161b20; --card: #1f272e; --good: #4fd1c5;
    --bad: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 76rem;
  margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1.25rem; }
p { max-width: 46rem; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.faint, figcaption { color: var(--faint); font-size: .875rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .75rem 0; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--faint); font-weight: 500; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
figure { margin: 1rem 0; } figure img { width: 100%; height: auto; background: #ffffff; border-radius: 8px; }
"""


class Page:
    """A page under construction: parts come in the order of the calls, and `save` writes them."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind`: good, bad or faint."""
        self.parts.append(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Cells are texts; a narrow screen scrolls the table, not the page."""
        lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        self.parts.append('<div class="scroll"><table>' + "\n".join(lines) + "</table></div>")

    def picture(self, figure: Figure, caption: str) -> None:
        """A matplotlib figure, kept in the page as PNG; the caption is what a reader who cannot see it is told."""
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=140, bbox_inches="tight")
        encoded = base64.b64encode(data.getvalue()).decode()
        self.parts.append(
            f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{encoded}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def save(self, path: Path) -> None:
        write_text(
            path,
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head><body>\n"
            + "\n".join(self.parts)
            + "\n</body></html>\n",
        )
