"""The page of `medusa benchmark --report`. The JSON that is written with it holds every figure of the page."""

from __future__ import annotations

from collections.abc import Mapping

from decode.bench.compare import Comparison, interval_in_words
from decode.bench.figures import BenchmarkResult, MethodFigures
from decode.bench.report import plots
from decode.bench.report.page import Picture, ReportPage
from decode.request import is_lossy
from medusa.files import readable

INTERVAL = (
    "The thin lines hold 95 % of the figures when prompts and rounds are resampled (for tokens per second: all rounds)."
)
SHOWN_SHARE = 0.01  # of steps that accept a node; a dynamic tree takes many nodes now and then
NOT_LISTED = {"tree", "command", "date", "commit", "prompts_sha256"}
"""Settings that stand elsewhere on the page, or are no use there."""


def page(result: BenchmarkResult | None, comparisons: list[Comparison]) -> ReportPage:
    """The page of a run, of comparisons, or of both."""
    title = "Benchmarks compared" if result is None else _title(result)
    made = ReportPage("benchmark.html.j2", title)
    made.content = {"result": result, "comparisons": comparisons}
    if result is not None:
        _add_headline(made, result)
        _add_speed(made, result)
        _add_guesses(made, result)
        _add_time(made, result.methods)
        _add_categories(made, result.medusa.by_category or {})
        _add_lossy_and_calibration(made, result)
        made.content["circumstance_rows"] = circumstances(result)
    _add_comparisons(made, comparisons)
    return made


def _title(result: BenchmarkResult) -> str:
    settings = result.settings
    drafter = f"the drafter {settings.drafter}" if settings.heads is None else f"the heads {settings.heads}"
    return f"Decoding speed of {settings.backbone} with {drafter}"


def _add_headline(made: ReportPage, result: BenchmarkResult) -> None:
    settings, medusa = result.settings, result.medusa
    greedy = settings.temperature == 0
    kind, verdict = _verdict(medusa)
    made.content |= {
        "verdict_kind": kind,
        "verdict": verdict,
        "is_lossy": is_lossy(settings.acceptance),
        "headline": [
            (f"{medusa.speedup_vs_generate:.2f}", "times model.generate"),
            (f"{medusa.speedup:.2f}", "times our own plain loop"),
            (f"{medusa.tau:.2f}", "tokens a step (tau)"),
            (f"{medusa.tokens_per_second.median:.0f}", "tokens per second"),
            (f"{medusa.equal_to_plain:.0%}", "texts equal to plain decoding")
            if greedy
            else ("sampled", "texts: no two samples are compared"),
        ],
    }


def _verdict(medusa: MethodFigures) -> tuple[str, str]:
    """(good, bad or faint, what the interval of the speedup says)."""
    span = medusa.speedup_vs_generate_interval
    if span is None:
        return "faint", "One prompt, one round: a single measurement."
    if span[0] > 1:
        return "good", "Faster than model.generate, beyond the noise of this measurement."
    if span[1] < 1:
        return "bad", "Slower than model.generate: this drafter does not pay here."
    return "faint", "No difference from model.generate that this measurement can show."


def _add_speed(made: ReportPage, result: BenchmarkResult) -> None:
    methods, greedy = result.methods, result.settings.temperature == 0
    height = plots.height_of(len(methods))
    made.content |= {
        "speed_pictures": [
            made.picture(plots.alone(plots.speedups, methods, height=height), f"Median over rounds. {INTERVAL}"),
            made.picture(
                plots.alone(plots.rates, methods, height=height),
                "All new tokens over all of the time, with the prefill.",
            ),
        ],
        "speed_rows": [speed_row(name, figures, greedy) for name, figures in methods.items()],
    }


def speed_row(name: str, figures: MethodFigures, greedy: bool) -> list[str]:
    """The cells of one method in the table of speeds."""
    rate = figures.tokens_per_second
    return [
        name,
        *(f"{value:.1f}" for value in (rate.median, rate.min, rate.max)),
        f"{figures.tau:.3f}" if figures.steps else "",
        *_speedups(figures),
        f"{figures.equal_to_plain:.0%}" if greedy else "(sampled)",
    ]


def _speedups(figures: MethodFigures) -> list[str]:
    return [
        f"{figures.speedup:.3f}",
        interval_in_words(figures.speedup_interval),
        f"{figures.speedup_vs_generate:.3f}",
        interval_in_words(figures.speedup_vs_generate_interval),
    ]


def _add_guesses(made: ReportPage, result: BenchmarkResult) -> None:
    medusa, temperatures = result.medusa, result.temperatures
    drawn: list[Picture] = []
    if medusa.accepted_by_depth:
        caption = "Fraction of steps that accepted a guess at each depth of the tree."
        drawn.append(made.picture(plots.alone(plots.depths, medusa), caption))
        caption = "Mean tokens a step, by the position where the step began."
        drawn.append(made.picture(plots.alone(plots.positions, medusa.tau_by_position), caption))
        if temperatures:
            caption = "All lossless, one round each."
            drawn.append(made.picture(plots.alone(plots.temperatures, temperatures), caption))
        if nodes := [node for node in medusa.accepted_by_node or [] if node.share >= SHOWN_SHARE]:
            caption = (
                "Each guess by its rank among the guesses of its head. The width of a line is the fraction of steps "
                "that accepted the guess. Guesses below 1 % of the steps are left out."
            )
            figure = plots.alone(plots.tree, nodes, height=plots.tree_height(nodes))
            drawn.append(made.picture(figure, caption))
    made.content |= {
        "guess_pictures": drawn,
        "depth_rows": [[str(depth), f"{share:.3f}"] for depth, share in enumerate(medusa.accepted_by_depth, 1)],
        "temperature_rows": [
            [
                f"{row.temperature:g}",
                f"{row.tau:.3f}",
                interval_in_words(row.tau_interval),
                f"{row.speedup_vs_generate:.3f}",
                interval_in_words(row.speedup_vs_generate_interval),
            ]
            for row in temperatures or []
        ],
    }


def _add_time(made: ReportPage, methods: Mapping[str, MethodFigures]) -> None:
    timed = {name: figures.step_ms for name, figures in methods.items() if figures.step_ms is not None}
    caption = (
        "propose: the drafter. verify: the forward of the backbone. accept: judging the guesses. compact: dropping "
        "rejected guesses from the cache. The prefill belongs to no step."
    )
    made.content |= {
        "time_pictures": [made.picture(plots.alone(plots.stages, timed, height=3), caption)] if timed else [],
        "stages": list(next(iter(timed.values()), {})),
        "time_rows": [
            [name, *(f"{value:.3f}" for value in times.values()), f"{sum(times.values()):.3f}"]
            for name, times in timed.items()
        ],
    }


def _add_categories(made: ReportPage, categories: Mapping[str, MethodFigures]) -> None:
    figure = plots.alone(plots.categories, categories, height=plots.height_of(len(categories))) if categories else None
    made.content |= {
        "category_pictures": [] if figure is None else [made.picture(figure, INTERVAL)],
        "category_rows": [
            [
                name,
                f"{figures.tokens_per_second.median:.1f}",
                f"{figures.tau:.3f}",
                interval_in_words(figures.tau_interval),
                *_speedups(figures),
            ]
            for name, figures in categories.items()
        ],
    }


def _add_lossy_and_calibration(made: ReportPage, result: BenchmarkResult) -> None:
    captions = (
        "Mean tokens a step.",
        "One node is plain decoding.",
        "tau over the time of a step; circled: the choice.",
    )
    calibration = result.medusa.calibration
    made.content |= {
        "lossy_rows": [
            [
                row.acceptance + ("" if row.lossless else " (lossy)"),
                f"{row.tau:.3f}",
                f"{row.speedup_vs_generate:.3f}",
                f"{row.log_likelihood:.3f}",
            ]
            for row in result.lossy or []
        ],
        "calibration_pictures": [
            made.picture(plots.alone(plots.by_nodes, calibration, name, label=f"calibration {name}"), caption)
            for name, caption in zip(plots.CALIBRATED, captions, strict=True)
            if calibration is not None
        ],
    }


def _add_comparisons(made: ReportPage, comparisons: list[Comparison]) -> None:
    caption = "The thin lines hold 95 % of the ratios when prompts are resampled, with the same prompts in both runs."
    made.content |= {
        "change_pictures": [
            [made.picture(plots.alone(plots.changes, found, height=plots.height_of(len(found.changes))), caption)]
            if found.changes
            else []
            for found in comparisons
        ],
        "change_rows": [
            [
                [
                    change.label,
                    *(f"{value:.3f}" for value in (change.earlier, change.later, change.ratio)),
                    interval_in_words(change.ratio_interval),
                    change.verdict,
                ]
                for change in found.changes
            ]
            for found in comparisons
        ],
        "rate_rows": [
            [[name, f"{then:.1f}", f"{now:.1f}"] for name, (then, now) in found.rates.items()] for found in comparisons
        ],
    }


def circumstances(result: BenchmarkResult) -> list[list[str]]:
    """What was measured, on which machine and how: rows of a name and a value."""
    machine, settings = result.machine, result.settings
    listed: dict[str, object] = {
        "date": settings.date,
        "machine": machine.device,
        "processor": machine.processor if machine.gpu else None,
        "threads": machine.threads,
        "dtype": machine.dtype,
        "system": machine.system,
        "versions": f"Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}, "
        f"medusa-heads {machine.medusa}",
        "commit": settings.commit,
    }
    if machine.memory is not None:
        memory = machine.memory
        listed["weights"] = f"backbone {readable(memory.backbone)}, heads {readable(memory.heads)}"
        listed["peak memory"] = ", ".join(f"{place} {readable(size)}" for place, size in memory.peak.items())
    options = {name: value for name, value in settings.to_json().items() if name not in NOT_LISTED}
    listed |= {name.replace("_", " "): value for name, value in options.items()}
    return [[name, str(value)] for name, value in listed.items() if value not in (None, [], ())]
