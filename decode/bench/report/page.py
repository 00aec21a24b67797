"""Reports as self-contained HTML pages: no script, no network, light and dark, for any width.

A page is a Jinja template of the folder `templates` with `report.css` and its pictures inside.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from decode.bench.compare import interval_in_words
from decode.bench.report.colors import COLORS
from medusa.files import readable, write_text

FOLDER = Path(__file__).parent


class Picture:
    """A matplotlib figure on a page, with its caption, which also describes the picture to screen readers."""

    def __init__(self, figure: Figure, caption: str, number: int) -> None:
        self.figure, self.caption, self.number = figure, caption, number

    @property
    def svg(self) -> Markup:
        """The figure as inline SVG, for templates."""
        return Markup(themed_svg(self.figure, f"p{self.number}", self.caption))


class ReportPage:
    """A page under construction: add pictures, set `content`, then save the page."""

    def __init__(self, template: str, title: str) -> None:
        self.template, self.title = template, title
        self.pictures: list[Picture] = []
        self.content: dict[str, object] = {}
        """The values that the template shows, by name."""

    def picture(self, figure: Figure, caption: str) -> Picture:
        """Number a picture, so that `content` can hold it."""
        self.pictures.append(Picture(figure, caption, len(self.pictures) + 1))
        return self.pictures[-1]

    def html(self) -> str:
        """The whole page."""
        environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {"fixed": fixed, "percent": percent, "interval": interval_in_words, "bytes": readable}
        css = Markup((FOLDER / "report.css").read_text(encoding="utf-8"))
        return environment.get_template(self.template).render(self.content, title=self.title, colors=COLORS, css=css)

    def save(self, path: Path) -> None:
        """Write the page."""
        write_text(path, self.html())

    def save_pictures(self, folder: Path) -> None:
        """Write every figure as a PNG on white, named after its label."""
        for picture in self.pictures:
            name = picture.figure.get_label() or f"picture {picture.number}"
            picture.figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight", facecolor="white")


def fixed(value: float, digits: int = 0) -> str:
    """A number with `digits` places, for templates."""
    return f"{value:.{digits}f}"


def percent(value: float) -> str:
    """A fraction as a whole percentage, for templates."""
    return f"{value:.0%}"


def themed_svg(figure: Figure, prefix: str, label: str) -> str:
    """A figure as inline SVG: its text stays text, its colours follow the page's theme, its ids begin with `prefix`."""
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
    svg = re.sub(r"font-family: [^;\"]+|'DejaVu Sans'[^;\"]*", _system_font, svg)
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{name})")
    svg = svg.replace("#000000", "var(--ink)")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{Markup.escape(label)}" ', 1)


def _system_font(found: re.Match[str]) -> str:
    family = "system-ui, sans-serif"
    return f"font-family: {family}" if found[0].startswith("font-family") else family
