"""Makes reports as HTML pages from Jinja templates: self-contained, without scripts, in a light and a dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from decode.bench.compare import Comparison
from decode.bench.figures import interval_in_words
from decode.bench.losslessness.cases import FALSE_ALARM, Case, figures_table, threshold
from decode.bench.losslessness.verify import VerificationResult
from decode.bench.report import plots
from decode.bench.result import BenchmarkResult, counted
from decode.drafters import in_words
from decode.rules import is_lossy
from medusa.files import per_second, readable, write_text

SHOWN_SHARE = 0.01  # nodes that a smaller share of steps accepts are not drawn; dynamic trees have many of them


@dataclass
class ReportPage:
    """An HTML report: the file name of its template, the values that the template shows, and its pictures by name."""

    template: str
    title: str
    content: Mapping[str, object]
    figures: Mapping[str, Figure]
    subject: str = ""  # what was measured, shown below the title

    def save(self, path: Path) -> None:
        """Render the page as HTML, and write it to the file `path`."""
        loader = FileSystemLoader(plots.FOLDER / "templates")
        jinja = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader
        )
        jinja.filters |= {"interval": interval_in_words, "bytes": readable, "counted": counted}
        jinja.filters["rate"] = per_second
        jinja.filters["fixed"] = lambda value, digits=0: f"{value:.{digits}f}"
        html = jinja.get_template(self.template).render(
            self.content,
            title=self.title,
            subject=self.subject,
            drawn={name: partial(themed_svg, name, figure) for name, figure in self.figures.items()},
            colors=plots.COLORS,
            css=Markup((plots.FOLDER / "report.css").read_text(encoding="utf-8")),
        )
        write_text(path, html)

    def save_pictures(self, folder: Path) -> None:
        """Write each figure to `folder` as a PNG file with a white background."""
        for name, figure in self.figures.items():
            figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight", facecolor="white")


def themed_svg(name: str, figure: Figure, caption: str) -> Markup:
    """Render a figure as inline SVG, whose colours follow the page's theme. Screen readers read `caption`.

    `name`: the beginning of all ids in the SVG, which must differ between the plots of a page."""
    out, prefix = io.StringIO(), re.sub(r"\W+", "-", name)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for side in ("width", "height"):  # the page sets the size; the view box keeps the aspect ratio
        svg = re.sub(rf'(<svg [^>]*?) {side}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\1{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]+", "font-family: system-ui, sans-serif", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    for name, light in plots.INK.items():
        svg = svg.replace(light, f"var(--{name})")
    svg = svg.replace("#000000", "var(--ink)")
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{Markup.escape(caption)}" ', 1))


def benchmark_page(result: BenchmarkResult | None, comparisons: list[Comparison]) -> ReportPage:
    """Make the report of a benchmark run, of comparisons between runs, or of both."""
    content: dict[str, object] = {"result": result, "comparisons": comparisons}
    title, subject, figures = "Benchmarks compared", "", {}
    if result is not None:
        title, subject = result.headline.title, result.subject
        content["is_lossy"] = is_lossy(result.settings.acceptance)
        figures = benchmark_figures(result)
    for number, found in enumerate(comparisons, 1):
        name = "changes" if number == 1 else f"changes {number}"
        figures[name] = plots.alone(plots.changes, found, bars=len(found.changes))
    return ReportPage("benchmark.html.j2", title, content, figures, subject)


def benchmark_figures(result: BenchmarkResult) -> dict[str, Figure]:
    """Draw the pictures of a benchmark run, by name."""
    medusa, methods, alone = result.medusa, result.methods, plots.alone
    size = len(methods)
    found = {"speedups": alone(plots.speedups, methods, bars=size), "rates": alone(plots.rates, methods, bars=size)}
    if medusa.accepted_by_depth:
        found["depths"] = alone(plots.depths, medusa)
        found["positions"] = alone(plots.positions, medusa.tau_by_position)
        if result.temperatures:
            found["temperatures"] = alone(plots.temperatures, result.temperatures)
        if nodes := [node for node in medusa.accepted_by_node or [] if node.share >= SHOWN_SHARE]:
            found["tree"] = alone(plots.tree, nodes, height=plots.tree_height(nodes))
    if timed := {name: figures.step_ms for name, figures in methods.items() if figures.step_ms}:
        found["stages"] = alone(plots.stages, timed, height=3)
    if kinds := medusa.by_category:
        found["categories"] = alone(plots.speedups, kinds, "medusa", "drafter, times plain decoding", bars=len(kinds))
    if medusa.calibration is not None:
        for name in plots.CALIBRATED:
            found[f"calibration {name}"] = alone(plots.by_nodes, medusa.calibration, name)
    return found


def verify_page(outcome: VerificationResult) -> ReportPage:
    """Make the report of a verification: the comparison of greedy texts, and the tests of samples."""
    asked, amateur = outcome.asked, outcome.asked.settings.amateur
    groups: dict[str, list[Case]] = {}
    for case in outcome.cases:
        name = f"prompt {case.prompt + 1}, temperature {case.temperature:g}, top-p {case.top_p:g}"
        groups.setdefault(name, []).append(case)
    names = partial(token_name, asked.loaded.tokenizer)
    head, rows = figures_table(outcome.cases)
    content: dict[str, object] = {"outcome": outcome, "names": names, "head": head, "rows": rows}
    content["amateur"] = {} if amateur is None else amateur.to_dict()
    content |= {"threshold": f"{threshold(outcome.cases):.1e}", "false_alarm": f"{FALSE_ALARM:.0e}"}
    drafter = in_words(asked.drafter, asked.heads)
    title = f"Does decoding with {drafter} change what the backbone {asked.loaded.name} writes?"
    figures = {name: plots.frequencies(cases, names) for name, cases in groups.items()}
    return ReportPage("verify.html.j2", title, content, figures)


def token_name(tokenizer: PreTrainedTokenizerBase | None, token: int | None) -> str:
    """Return a token's text with visible spaces and line breaks, or its id. `None` stands for the end of a text."""
    if token is None:
        return "the end"
    if tokenizer is None:
        return str(token)
    # The token after itself, because some tokenizers drop the space before the first token.
    text = str(tokenizer.decode([token, token])).removeprefix(str(tokenizer.decode([token])))
    return text.replace(" ", "\u00b7").replace("\n", "\u21b5") or str(token)
