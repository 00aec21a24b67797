"""The page of `medusa benchmark --report`. The JSON that is written with it holds every figure of the page."""

from __future__ import annotations

from matplotlib.figure import Figure

from decode.bench.compare import Comparison
from decode.bench.figures import BenchmarkResult
from decode.bench.report import plots
from decode.bench.report.page import Picture, ReportPage
from decode.settings import is_lossy

INTERVAL = "Thin lines hold 95 % of the figures when prompts and rounds are resampled."
STAGES = (
    "propose: the drafter. verify: the forward of the backbone. accept: judging the guesses. compact: dropping "
    "rejected guesses from the cache. The prefill belongs to no step."
)
SHOWN_SHARE = 0.01  # of steps that accept a node: dynamic trees hold many nodes that are hardly ever accepted


def page(result: BenchmarkResult | None, comparisons: list[Comparison]) -> ReportPage:
    """The page of a run, of comparisons, or of both."""
    made = ReportPage("benchmark.html.j2", "Benchmarks compared")
    made.content = {"result": result}
    if result is not None:
        settings = result.settings
        drafter = f"the drafter {settings.drafter}" if settings.heads is None else f"the heads {settings.heads}"
        made.title = f"Decoding speed of {settings.backbone} with {drafter}"
        made.content |= {"is_lossy": is_lossy(settings.acceptance), "drawn": draw(made, result)}
    caption = "Thin lines hold 95 % of the ratios when prompts are resampled, with the same prompts in both runs."
    made.content["comparisons"] = [
        (found, made.picture(plots.alone(plots.changes, found, height=plots.height_of(len(found.changes))), caption))
        for found in comparisons
    ]
    return made


def draw(made: ReportPage, result: BenchmarkResult) -> dict[str, list[Picture]]:
    """The pictures of a run, by section."""
    medusa, methods, alone = result.medusa, result.methods, plots.alone
    height = plots.height_of(len(methods))
    speed = [
        (alone(plots.speedups, methods, height=height), f"Median over rounds. {INTERVAL}"),
        (alone(plots.rates, methods, height=height), "All new tokens over all time, with the prefill."),
    ]
    guesses: list[tuple[Figure, str]] = []
    if medusa.accepted_by_depth:
        guesses = [
            (alone(plots.depths, medusa), "Fraction of steps that accepted a guess at each depth of the tree."),
            (alone(plots.positions, medusa.tau_by_position), "Mean tokens a step, by where the step began."),
        ]
        if result.temperatures:
            guesses.append((alone(plots.temperatures, result.temperatures), "All lossless, one round each."))
        if nodes := [node for node in medusa.accepted_by_node or [] if node.share >= SHOWN_SHARE]:
            caption = (
                "Each guess by its rank among the guesses of its head. The width of a line is the fraction of steps "
                "that accepted the guess. Guesses below 1 % of the steps are left out."
            )
            guesses.append((alone(plots.tree, nodes, height=plots.tree_height(nodes)), caption))
    timed = {name: figures.step_ms for name, figures in methods.items() if figures.step_ms}
    time = [(alone(plots.stages, timed, height=3), STAGES)] if timed else []
    kinds = medusa.by_category
    categories = [(alone(plots.categories, kinds, height=plots.height_of(len(kinds))), INTERVAL)] if kinds else []
    captions = ("Mean tokens a step.", "One node is plain decoding.", "tau over step time; circled: the choice.")
    calibration = [
        (alone(plots.by_nodes, medusa.calibration, name, label=f"calibration {name}"), caption)
        for name, caption in zip(plots.CALIBRATED, captions, strict=True)
        if medusa.calibration is not None
    ]
    found = {"speed": speed, "guesses": guesses, "time": time, "categories": categories, "calibration": calibration}
    return {section: [made.picture(*pair) for pair in pairs] for section, pairs in found.items()}
