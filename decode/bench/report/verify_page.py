"""The page of `medusa verify`."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from decode.bench.losslessness.cases import FALSE_ALARM, Case, figures_table, threshold
from decode.bench.losslessness.run import VerificationResult
from decode.bench.report.colors import INK
from decode.bench.report.page import ReportPage
from decode.bench.report.plots import plain_frame

TOKENS_SHOWN = 24
CASE_INK = {"backbone": INK["transformers"], "draft": INK["amber"], "topk": INK["medusa"], "sample": INK["violet"]}

CAPTION = (
    "Prompt {}, temperature {:g}, top-p {:g}. Above: the most probable first tokens. Bars are probabilities of the "
    "backbone, the line is the first head (if heads draft), marks are frequencies of the written tokens. Below: "
    "(frequency - probability) in standard deviations of a true sample, with a band that holds 95 % of them."
)


class TokenNames:
    """Short names of tokens for tables and pictures: spaces and line breaks are visible."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer

    def __call__(self, token: int | None) -> str:
        if token is None:
            return "the end"
        text = str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))
        return text.replace(" ", "\u00b7").replace("\n", "\u21b5") or str(token)


def page(outcome: VerificationResult, names: TokenNames) -> ReportPage:
    """The report of a verification."""
    asked, amateur = outcome.asked, outcome.asked.settings.amateur
    drafter = f"the heads {asked.heads}" if asked.heads else f"drafts by {asked.drafter}"
    made = ReportPage("verify.html.j2", f"Do {drafter} change what the backbone {asked.loaded.name} writes?")
    groups: dict[tuple[int, float, float], list[Case]] = {}
    for case in outcome.cases:
        groups.setdefault((case.prompt + 1, case.temperature, case.top_p), []).append(case)
    head, rows = figures_table(outcome.cases)
    made.content = {
        "outcome": outcome,
        "amateur": {} if amateur is None else amateur.to_dict(),
        "threshold": f"{threshold(outcome.cases):.1e}",
        "false_alarm": f"{FALSE_ALARM:.0e}",
        "names": names,
        "pictures": [made.picture(draw(cases, names), CAPTION.format(*key)) for key, cases in groups.items()],
        "head": head,
        "rows": rows,
    }
    return made


def draw(cases: list[Case], names: TokenNames) -> Figure:
    """The rejection cases of one prompt: probabilities, drafts and frequencies above, deviations below."""
    judged = [case for case in cases if case.rule.acceptance == "rejection"]
    target, draft = judged[0].target, judged[0].draft
    shown = target.topk(min(TOKENS_SHOWN, int((target > 0).sum()))).indices
    at = range(len(shown))
    figure = Figure(figsize=(11, 4.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.3])
    above.bar(at, target[shown], color=CASE_INK["backbone"], alpha=0.35, label="backbone")
    if draft is not None:
        above.plot(at, draft[shown], color=CASE_INK["draft"], marker=".", label="draft (head 1)")
    for place, case in enumerate(judged):
        shift = [x + 0.24 * (place - 0.5) for x in at]
        color, label = CASE_INK[case.rule.draft], f"written, --draft {case.rule.draft}"
        above.plot(shift, case.frequencies[shown], "_", markersize=9, markeredgewidth=2, color=color, label=label)
        deviation = (target[shown] * (1 - target[shown]) / case.first.draws).sqrt().clamp_min(1e-12)
        below.plot(shift, (case.frequencies[shown] - target[shown]) / deviation, "o", markersize=3.5, color=color)
    _label(above, below)
    texts = [names(int(token)).replace("$", "\\$") for token in shown]  # matplotlib would read a formula
    below.set_xticks(list(at), texts, rotation=60, ha="right", fontsize=8)
    return figure


def _label(above: Axes, below: Axes) -> None:
    above.set_yscale("log")
    above.set_ylabel("probability")
    above.legend(frameon=False, fontsize=8, ncols=4, loc="upper right")
    below.axhspan(-2, 2, color=CASE_INK["topk"], alpha=0.12)
    below.set_ylim(-5, 5)
    below.set_ylabel("deviation")
    for axes in (above, below):
        plain_frame(axes)
