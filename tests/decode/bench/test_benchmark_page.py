"""The page of a benchmark shows the figures of the JSON, in the file and, if one is installed, in a browser."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from decode.bench.compare import Comparison, compare
from decode.bench.figures import interval_in_words
from decode.bench.report.page import benchmark_page
from decode.bench.report.plots import COLORS
from decode.bench.result import FASTER, BenchmarkResult
from decode.settings import Settings
from medusa.files import per_second
from tests.decode.bench.made_up import outcome

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, Any], str]:
    """The JSON of a run compared with an earlier one, and its page."""
    then, now = outcome([0.8, 0.9, 0.7]), outcome([0.4, 0.6, 0.5], tree=[[0], [0, 0], [1]])
    comparison = compare(then, now, ("old.json", "this run"))
    content = now.to_json() | {"comparisons": [comparison.to_json()]}
    return json.loads(json.dumps(content)), written(now, comparison)


def written(result: BenchmarkResult | None, *comparisons: Comparison) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.html"
        benchmark_page(result, list(comparisons)).save(path)
        return path.read_text(encoding="utf-8")


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, for tests of other parts of a page."""
    monkeypatch.setattr("decode.bench.report.page.themed_svg", lambda *_: "")


class TablesAndPictures(HTMLParser):
    """The rows of all tables, and the texts of all pictures."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.drawn: list[str] = []
        self.inside: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.inside in ("text", "tspan"):
            self.drawn.append(data.strip())


def assert_figures_are_the_jsons(html: str, content: dict[str, Any]) -> None:
    """Every table's rows, and the numbers in the pictures."""
    seen = TablesAndPictures(html)
    methods = content["methods"]
    medusa = methods["medusa"]
    for name, figures in methods.items():
        rate = figures["tokens_per_second"]
        expected = [
            name,
            *(f"{figures['speedup']:.3f}", interval_in_words(figures["speedup_interval"])),
            f"{figures['speedup_vs_generate']:.3f}",
            interval_in_words(figures["speedup_vs_generate_interval"]),
            f"{figures['tau']:.3f}",
            *(f"{rate[k]:.1f}" for k in ("median", "min", "max")),
            f"{figures['equal_to_plain']:.0%}",
        ]
        assert expected in seen.rows
        assert f"{figures['speedup']:.2f} x" in seen.drawn
        assert per_second(rate["median"]) in seen.drawn
    for name, figure in (("over the steps of all texts", "tau"), ("mean of each text's tau", "mean_tau")):
        assert [name, f"{medusa[figure]:.3f}", interval_in_words(medusa[f"{figure}_interval"])] in seen.rows
    for depth, share in enumerate(medusa["accepted_by_depth"], 1):
        assert [str(depth), f"{share:.3f}"] in seen.rows
        assert f"{share:.0%}" in seen.drawn
    for name in ("plain", "medusa"):
        times = methods[name]["step_ms"].values()
        assert [name, *(f"{t:.3f}" for t in times), f"{sum(times):.3f}"] in seen.rows
    for kind, figures in medusa["by_category"].items():
        (row,) = (row for row in seen.rows if row[0] == kind)
        assert (row[2], row[6]) == (f"{figures['tau']:.3f}", f"{figures['speedup_vs_generate']:.3f}")
    for node in medusa["accepted_by_node"]:
        label = f"{node['path'][-1] + 1}: {node['share']:.0%}"
        assert (label in seen.drawn) == (node["share"] >= 0.01)
    for row in content["temperatures"]:
        assert any(r[:2] == [f"{row['temperature']:g}", f"{row['tau']:.3f}"] for r in seen.rows)
    assert ["typical (lossy)", "3.250", "2.125", "-1.375"] in seen.rows
    for change in content["comparisons"][0]["changes"]:
        (row,) = (row for row in seen.rows if row[0] == change["label"])
        assert row[1:4] == [f"{change[k]:.3f}" for k in ("earlier", "later", "ratio")]
        assert row[5] == change["verdict"]
    assert ["commit", "abc"] in seen.rows
    assert ["rounds", "2"] in seen.rows


def test_figures_on_the_page_equal_the_json(both: tuple[dict[str, Any], str]) -> None:
    content, html = both
    assert_figures_are_the_jsons(html, content)
    assert "medusa benchmark --x &#39;a b&#39;" in html
    predicted = "tau is 3.00, 20% lower than the calibration predicted (3.75)."
    reason = "Likely reason: the calibration was made from other text, "
    assert f"{predicted} {reason}32 texts of 3072 tokens (a&lt;b.jsonl); calibrate with prompts like these." in html


def test_the_check_detects_a_wrong_figure(both: tuple[dict[str, Any], str]) -> None:
    content, html = both
    wrong = html.replace(f"{content['methods']['medusa']['speedup']:.2f} x", "9.99 x")
    with pytest.raises(AssertionError):
        assert_figures_are_the_jsons(wrong, content)


def test_the_page_is_complete_without_a_network(both: tuple[dict[str, Any], str]) -> None:
    _, html = both
    assert not re.search(r'(src|href)="(?!#)', html), "it loads something"
    assert "<script" not in html
    assert "<b>heads</b>" not in html, "names are escaped"
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)), "every picture has ids of its own"
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.findall(r"#[0-9a-f]{6}\b", drawn), "a colour that does not follow the theme"
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) <= COLORS.keys()


@pytest.mark.usefixtures("without_pictures")
def test_one_prompt_and_one_round_give_a_page_without_intervals() -> None:
    result = outcome([0.5])
    for figures in result.methods.values():
        figures.speedup_interval = figures.speedup_vs_generate_interval = figures.tau_interval = None
    result.medusa.accepted_by_depth = []
    assert "No headline: " in written(result)


@pytest.mark.usefixtures("without_pictures")
def test_a_gain_is_shown_as_a_big_number_with_the_next_command() -> None:
    """Options that change nothing are folded."""
    result = outcome([0.5, 0.4])
    result.settings.generation = Settings().to_dict() | {"top_k": 5, "epsilon": 0.2}
    page, heads = written(result), result.settings.heads
    assert result.headline.verdict == FASTER
    assert "<span>times plain decoding</span>" in page
    shown, _, folded = page.partition("<summary>Options without effect here</summary>")
    for name, place in (("top k", shown), ("rounds", shown), ("top p", folded), ("epsilon", folded)):
        assert f"<td>{name}</td>" in place
    assert page.count("<details>") > 4
    assert result.next_commands[0] == f"medusa generate {shlex.quote(heads)} --prompt 'Once upon a time'"
    assert page.rindex("<pre>medusa generate ") > page.rindex("<table")
    assert page.count("<pre>") == 2, "the command of the run, and what to type next"


@pytest.mark.usefixtures("without_pictures")
def test_no_gain_is_no_big_number_and_no_command_no_empty_box() -> None:
    none = outcome([0.5, 0.4], nodes=1)
    none.settings.command = ""
    page = written(none)
    assert "<span>times plain decoding</span>" not in page
    assert "<h1>No measurable gain over plain decoding</h1>" in page
    assert "<title>No measurable gain over plain decoding: demo" in page
    assert page.count("<pre>") == len(none.next_commands), "what to type next"
    assert "<tr></tr>" not in page.replace("<th></th>", ""), "a table without headings has no row for them"


def test_a_loss_is_followed_by_a_calibration() -> None:
    slower = outcome([1.5, 1.4])
    assert slower.next_commands == [f"medusa calibrate {shlex.quote(slower.settings.heads)} --prompts FILE"]
    slower.settings.heads, slower.settings.drafter, slower.machine.dtype = None, "ngram", "bfloat16"
    assert "--drafter ngram --dtype bfloat16" in slower.next_commands[1]


def test_a_page_can_compare_files_only() -> None:
    then = outcome([0.8, 0.9, 0.7])
    html = written(None, compare(then, then, ("a.json", "b.json")))
    assert "b.json against a.json" in html
    assert "Machine and settings are the same." in html


PROBE = """<script>
const root = document.documentElement, style = getComputedStyle(document.body);
const drawn = [...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect());
parent.document.body.dataset.probe = JSON.stringify({
  overflow: root.scrollWidth - innerWidth, inner: innerWidth,
  low: drawn.filter(r => r.height < 60).length, wide: drawn.filter(r => r.width > innerWidth).length,
  paper: style.backgroundColor, ink: style.color,
  drawn: getComputedStyle(document.querySelector('figure svg text')).fill});
</script></body>"""


@pytest.fixture
def in_browser(tmp_path: Path) -> Callable[..., str]:
    """The page's document after a real browser has loaded it."""
    if BROWSER is None:
        pytest.skip("no Chromium here")

    def load(html: str, *options: str) -> str:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
        command = [BROWSER, *words, *options, path.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    return load


def test_a_browser_shows_the_figures_of_the_json(both: tuple[dict[str, Any], str], in_browser: Any) -> None:
    content, html = both
    assert_figures_are_the_jsons(in_browser(html), content)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (390, True), (1280, True)])
def test_both_themes_are_readable_on_desktop_and_phone(
    both: tuple[dict[str, Any], str], in_browser: Any, width: int, dark: bool
) -> None:
    _, html = both
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    # A window is never narrower than 500 pixels there, a frame is.
    inside = escape(html.replace("</body>", PROBE))
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{inside}"></iframe>'
    around = f"<!doctype html><style>:root {{ color-scheme: light dark }}</style><body>{frame}</body>"
    shown = in_browser(around, *options)
    found = json.loads(unescape(re.search(r'data-probe="([^"]*)"', shown)[1]))  # type: ignore[index]
    assert found["inner"] == width
    assert found["overflow"] <= 0, "the page scrolls sideways"
    assert (found["low"], found["wide"]) == (0, 0), "a picture is squeezed or cut"
    for name in ("paper", "ink"):
        assert found[name] == rgb(COLORS[name][dark])
    assert found["drawn"] == rgb(COLORS["ink"][dark]), "text in pictures follows the theme"


def rgb(color: str) -> str:
    return f"rgb({int(color[1:3], 16)}, {int(color[3:5], 16)}, {int(color[5:7], 16)})"


def luminance(color: str) -> float:
    """WCAG 2: relative luminance."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize(
    ("name", "least"),
    [("ink", 7.0), ("faint", 4.5), ("good", 4.5), ("bad", 4.5), *((n, 2.0) for n in ("plain", "amber", "medusa"))],
)
def test_colours_contrast_with_the_background(theme: int, name: str, least: float) -> None:
    """WCAG: 4.5 for text; bars show their value as text, so a weak contrast loses nothing."""
    one, other = sorted((luminance(COLORS[name][theme]), luminance(COLORS["paper"][theme])))
    assert (other + 0.05) / (one + 0.05) >= least
