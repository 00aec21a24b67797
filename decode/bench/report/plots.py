"""Draws the pictures of benchmarks, calibrations and verifications with matplotlib, in the colours of the reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from decode.bench.calibration.stored import Calibration
from decode.bench.compare import Comparison
from decode.bench.figures import AcceptedNode, Interval, MethodFigures, PositionFigures
from decode.bench.losslessness.cases import Case
from decode.bench.result import TemperatureFigures
from medusa.files import read_json

FOLDER = Path(__file__).parent
COLORS: dict[str, tuple[str, str]] = read_json(FOLDER / "colors.json")
"""Colours by name, as (light theme, dark theme). HTML pages replace the light colours of pictures by CSS variables."""
INK = {name: light for name, (light, _) in COLORS.items()}  # colours of the light theme, for drawing
WIDTH = 5.2  # inches: two pictures fit side by side on a desktop, and 10-point text stays readable on a phone
STAGE_INK = ("medusa", "amber", "violet", "blue", "plain")
CALIBRATED = {"tau": "predicted tau", "step_ms": "milliseconds of a step", "tokens_per_second": "tokens per second"}
"""Fields of `CalibrationPoint` that are drawn for the trees of a calibration, with their titles."""
HALO = withStroke(linewidth=3, foreground=INK["paper"])  # keeps an interval visible over its bar, in both themes
CASE_INK = {"topk": INK["medusa"], "sample": INK["violet"]}


def alone(draw: Callable[..., None], *data: object, height: float = 2.6, bars: int | None = None) -> Figure:
    """Make a figure of one plot, drawn by `draw(axes, *data)`, `height` inches high or high enough for `bars` bars."""
    if bars is not None:
        height = 0.9 + 0.42 * bars
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    draw(figure.subplots(), *data)
    return without_frames(figure)


def without_frames(figure: Figure) -> Figure:
    """Remove the top and right lines of the frames around all plots of a figure."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def speedups(
    axes: Axes, methods: Mapping[str, MethodFigures], ink: str = "blue", title: str = "times plain decoding"
) -> None:
    """Draw each method's speedup over plain decoding as a bar, with its interval. `ink`: colour, as in `bars`."""
    rows = {name: (its.speedup, its.speedup_interval) for name, its in methods.items()}
    bars(axes, rows, title, "{:.2f} x", ink)
    axes.axvline(1, color=INK["faint"], linewidth=0.8, linestyle=":")


def rates(axes: Axes, methods: Mapping[str, MethodFigures]) -> None:
    """Draw tokens per second of each method: the median round, and the range from the slowest round to the fastest."""
    found = {name: figures.tokens_per_second for name, figures in methods.items()}
    rows = {name: (rate.median, (rate.min, rate.max)) for name, rate in found.items()}
    bars(axes, rows, "tokens per second", "{:.0f}")


def bars(
    axes: Axes, rows: Mapping[str, tuple[float, Interval | None]], title: str, form: str, ink: str = "blue"
) -> None:
    """Draw a horizontal bar for each name, with its value in the format `form` and with its interval, if it has one.

    A bar whose name is a key of `INK` gets that colour; all other bars get the colour `INK[ink]`."""
    colors = [INK.get(name, INK[ink]) for name in rows]
    axes.barh(list(rows), [value for value, _ in rows.values()], color=colors, height=0.62)
    ends = [max([value, *(span or [])]) for value, span in rows.values()]
    for place, ((value, span), end) in enumerate(zip(rows.values(), ends, strict=True)):
        if span is not None:
            axes.plot(span, [place, place], color=INK["ink"], lw=1.4, marker="|", markersize=7, path_effects=[HALO])
        label = axes.annotate(form.format(value), (end, place), (6, 0), textcoords="offset points", va="center")
        label.set_bbox({"facecolor": INK["paper"], "edgecolor": "none", "pad": 1})  # hides a line behind the text
    axes.set(title=title, xlim=(0, 1.25 * max([*ends, 1e-9])))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def depths(axes: Axes, medusa: MethodFigures) -> None:
    """Draw the fraction of steps that accept a guess at each depth of the tree."""
    shares = medusa.accepted_by_depth
    places = range(1, len(shares) + 1)
    axes.bar(places, shares, color=INK["medusa"], width=0.7)
    for place, share in zip(places, shares, strict=True):
        axes.annotate(f"{share:.0%}", (place, share), (0, 3), textcoords="offset points", ha="center")
    axes.set(title=f"acceptance by depth (tau {medusa.tau:.2f})", xlabel="depth in the tree", xticks=places)
    axes.set(ylim=(0, 1.1), yticks=[0, 0.5, 1], yticklabels=["0", "50%", "100%"])


def stages(axes: Axes, times: Mapping[str, Mapping[str, float]]) -> None:
    """Draw how many milliseconds a step spends in each stage. `times`: milliseconds by method, then by stage."""
    left = dict.fromkeys(times, 0.0)
    for stage, ink in zip(next(iter(times.values())), STAGE_INK, strict=True):
        values = [of_step[stage] for of_step in times.values()]
        label = f"{stage} {times['medusa'][stage]:.2f} ms"
        axes.barh(list(times), values, left=list(left.values()), color=INK[ink], label=label, height=0.55)
        left = {name: left[name] + value for name, value in zip(times, values, strict=True)}
    for place, total in enumerate(left.values()):
        axes.annotate(f"{total:.2f}", (total, place), (5, 0), textcoords="offset points", va="center")
    axes.set(title="milliseconds of a step", xlim=(0, 1.15 * max([*left.values(), 1e-9])))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=2, frameon=False, title="with the drafter")


def positions(axes: Axes, stretches: Sequence[PositionFigures]) -> None:
    """Draw tau (mean tokens per step) along the text, one point for each stretch of new tokens."""
    taus = [part.tau for part in stretches]
    axes.plot([part.start for part in stretches], taus, color=INK["medusa"], marker="o", ms=4)
    axes.set(title="tau along the text", xlabel="new tokens before the step", ylim=(0, 1.15 * max(taus)))


def tree(axes: Axes, accepted: Sequence[AcceptedNode]) -> None:
    """Draw the draft tree from left to right. Wider lines lead to nodes that more steps accept.

    The label of a node is the rank of its guess (from 1), and the fraction of steps that accept it."""
    heights: dict[tuple[int, ...], float] = {}
    nodes: dict[tuple[int, ...], float] = {(): 1.0} | {tuple(node.path): node.share for node in accepted}
    rows = iter(range(len(nodes)))

    def place(node: tuple[int, ...]) -> float:
        children = [place(child) for child in sorted(nodes) if len(child) == len(node) + 1 and child[:-1] == node]
        heights[node] = sum(children) / len(children) if children else float(next(rows))
        return heights[node]

    place(())
    for node, share in nodes.items():
        x, y = len(node), heights[node]
        if node:
            ends, width = ([x - 1, x], [heights[node[:-1]], y]), 0.6 + 7 * share
            axes.plot(*ends, color=INK["medusa"], linewidth=width, alpha=0.55, solid_capstyle="round", zorder=1)
        axes.scatter([x], [y], s=26 if len(nodes) > 24 else 150, color=INK["medusa"], zorder=2)
        if node and len(nodes) <= 24:
            axes.annotate(f"{node[-1] + 1}: {share:.0%}", (x, y), (0, 9), textcoords="offset points", ha="center")
    deepest = max(map(len, nodes))
    axes.set(title="fraction of steps that accept each guess", xlim=(-0.2, deepest + 0.4), yticks=[])
    axes.set_ylim(max(heights.values()) + 0.5, -0.8)
    axes.set_xticks(range(deepest + 1), ["root", *(f"head {depth}" for depth in range(1, deepest + 1))])
    axes.spines.left.set_visible(False)


def tree_height(accepted: Sequence[AcceptedNode]) -> float:
    """Return the height in inches of a drawn tree."""
    inner = {tuple(node.path[:-1]) for node in accepted}
    leaves = sum(tuple(node.path) not in inner for node in accepted)
    return 1.2 + leaves * (0.36 if len(accepted) < 24 else 0.12)


def temperatures(axes: Axes, rows: Sequence[TemperatureFigures]) -> None:
    """Draw tau (mean tokens per step) against temperature, with intervals."""
    at = [row.temperature for row in rows]
    for row in rows:
        if row.tau_interval:
            axes.plot([row.temperature] * 2, row.tau_interval, color=INK["ink"], linewidth=1.4, marker="_", ms=7)
    axes.plot(at, [row.tau for row in rows], color=INK["medusa"], marker="o", ms=5)
    top = 1.15 * max(row.tau for row in rows)
    axes.set(title="tau against temperature", xlabel="temperature", xticks=at, ylim=(0, top))


def by_nodes(axes: Axes, calibration: Calibration, figure: str) -> None:
    """Draw `figure` of a calibration's trees (`tau`, `step_ms` or `tokens_per_second`) against their node counts."""
    points, best = calibration.points, calibration.best
    inks = {"static": "medusa", "dynamic": "amber", "n-grams": "blue", "heads and n-grams": "violet"}
    for label, ink in inks.items():
        kinds = (label, "plain") if label == "static" else (label,)
        if mine := {point.nodes: getattr(point, figure) for point in points if point.kind in kinds}:
            axes.plot(list(mine), list(mine.values()), marker="o", markersize=4, color=INK[ink], label=label)
    axes.plot(best.nodes, getattr(best, figure), "o", ms=11, fillstyle="none", color=INK["bad"], label="chosen")
    top = 1.1 * max(getattr(point, figure) for point in points)
    axes.set(title=CALIBRATED[figure], xlabel="nodes", xscale="log", ylim=(0, top))
    axes.legend(frameon=False, loc="lower right")
    nodes = sorted({point.nodes for point in points})
    shown = [count for i, count in enumerate(nodes) if i == 0 or count >= 1.3 * nodes[i - 1]]
    axes.set_xticks(shown, [str(count) for count in shown])
    axes.minorticks_off()


def calibration_plot(calibration: Calibration) -> Figure:
    """Draw a calibration in one picture: predicted tau, time of a step, and tokens per second."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), CALIBRATED, strict=True):
        by_nodes(axes, calibration, name)
    return without_frames(figure)


def changes(axes: Axes, comparison: Comparison) -> None:
    """Draw the ratio of each metric of the later benchmark run to that of the earlier one, with intervals."""
    names = [change.label for change in comparison.changes]
    for place, change in enumerate(comparison.changes):
        if change.ratio_interval:
            axes.plot(change.ratio_interval, [place, place], color=INK["ink"], linewidth=1.4, marker="|", ms=7)
        axes.plot([change.ratio], [place], "o", color=INK["medusa"], ms=6)
    axes.axvline(1, color=INK["faint"], linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set(title="later over earlier", ylim=(len(names) - 0.5, -0.5))


def frequencies(cases: Sequence[Case], name_of: Callable[[int], str]) -> Figure:
    """Draw how often rejection sampling writes the most probable tokens after one prompt; `name_of` labels the tokens.

    `cases` belong to this prompt; only rejection sampling is drawn. The upper plot shows the frequencies, and the
    probabilities of backbone and draft; the lower, frequency minus backbone probability in standard deviations."""
    judged = [case for case in cases if case.rule.acceptance == "rejection" and not case.rule.whole]
    target, draft = judged[0].target, judged[0].draft
    p, shown = target.topk(min(24, int((target > 0).sum())))
    at, figure = range(len(shown)), Figure(figsize=(11, 4.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.3])
    above.bar(at, p, color=INK["transformers"], alpha=0.35, label="backbone")
    if draft is not None:
        above.plot(at, draft[shown], color=INK["amber"], marker=".", label="draft (head 1)")
    for place, case in enumerate(judged):
        shift = [x + 0.24 * (place - 0.5) for x in at]
        color, label = CASE_INK[case.rule.draft], f"written, --draft {case.rule.draft}"
        above.plot(shift, case.frequencies[shown], "_", markersize=9, markeredgewidth=2, color=color, label=label)
        deviation = (p * (1 - p) / case.first.draws).sqrt().clamp_min(1e-12)
        below.plot(shift, (case.frequencies[shown] - p) / deviation, "o", markersize=3.5, color=color)
    above.set(yscale="log", ylabel="probability")
    above.legend(frameon=False, fontsize=8, ncols=4, loc="upper right")
    below.axhspan(-2, 2, color=CASE_INK["topk"], alpha=0.12)
    below.set(ylim=(-5, 5), ylabel="deviation")
    texts = [name_of(int(token)).replace("$", "\\$") for token in shown]  # matplotlib would parse $ as a formula
    below.set_xticks(list(at), texts, rotation=60, ha="right", fontsize=8)
    return without_frames(figure)
