"""The page of `medusa benchmark --report`: every figure in it stands in the JSON that it is made from."""

from __future__ import annotations

from typing import Any

from decode.bench.compare import interval_in_words
from decode.bench.report import plots as pictures
from decode.bench.report.html import Page
from decode.request import is_lossy
from medusa.files import readable

INTERVAL = (
    "Lines over bars: 95 % of resamplings of prompts and rounds lie within (for tokens per second, the slowest and the "
    "fastest round)."
)


def page(outcome: dict[str, Any]) -> Page:
    """From what `--json` writes: a run, comparisons, or both."""
    if "methods" not in outcome:
        made = Page("Benchmarks compared")
        for comparison in outcome["comparisons"]:
            add_comparison(made, comparison)
        return made
    settings, methods = outcome["settings"], outcome["methods"]
    made = Page(f"How much sooner do the heads {settings['heads']} let {settings['backbone']} write?")
    add_verdict(made, outcome)
    add_speed(made, settings, methods)
    add_guesses(made, outcome)
    add_time(made, methods)
    if methods["medusa"]["by_category"]:
        add_categories(made, methods["medusa"]["by_category"])
    if outcome.get("lossy"):
        add_lossy(made, outcome["lossy"])
    if methods["medusa"].get("calibration"):
        add_calibration(made, methods["medusa"])
    for comparison in outcome.get("comparisons", []):
        add_comparison(made, comparison)
    add_circumstances(made, outcome)
    return made


def add_verdict(made: Page, outcome: dict[str, Any]) -> None:
    settings, medusa = outcome["settings"], outcome["methods"]["medusa"]
    span = medusa["speedup_vs_generate_interval"]
    if span is None:
        made.text("One prompt, one round: a single measurement.", "faint")
    elif span[0] > 1:
        made.text("Sooner than model.generate, beyond this measurement's noise.", "good")
    elif span[1] < 1:
        made.text("Later than model.generate: these heads do not pay here.", "bad")
    else:
        made.text("No difference from model.generate that this measurement can see.", "faint")
    if is_lossy(settings["acceptance"]):
        made.text(f"Acceptance {settings['acceptance']} is lossy: this is not the backbone's own text.", "bad")
    same = f"{medusa['equal_to_plain']:.0%}" if settings["temperature"] == 0 else "sampled"
    made.facts(
        [
            (f"{medusa['speedup_vs_generate']:.2f}", "times model.generate"),
            (f"{medusa['speedup']:.2f}", "times our own plain loop"),
            (f"{medusa['tau']:.2f}", "tokens a step (tau)"),
            (f"{medusa['tokens_per_second']['median']:.0f}", "tokens per second"),
            (same, "texts equal to plain decoding" if same != "sampled" else "texts: no two draws are compared"),
        ]
    )
    made.text(
        f"{settings['prompts']} prompts, at most {settings['max_new_tokens']} new tokens each, temperature "
        f"{settings['temperature']:g}, acceptance {settings['acceptance']}, a tree of {settings['nodes']} "
        f"nodes, batch size {settings['batch_size']}, {settings['rounds']} round(s).",
        "faint",
    )


def add_speed(made: Page, settings: dict[str, Any], methods: dict[str, Any]) -> None:
    made.heading("Speed")
    height = pictures.height_of(len(methods))
    made.pictures(
        [
            (pictures.alone(pictures.speedups, methods, height=height), f"Median over rounds. {INTERVAL}"),
            (pictures.alone(pictures.rates, methods, height=height), "Tokens given, over all time, the prefill too."),
        ]
    )
    head = ["method", "tokens/s", "slowest", "fastest", "tau", "x plain", "95 %", "x generate", "95 %", "same text"]
    greedy = settings["temperature"] == 0
    made.table(head, [speed_row(name, figures, greedy) for name, figures in methods.items()])


def speed_row(name: str, figures: dict[str, Any], greedy: bool) -> list[str]:
    rate = figures["tokens_per_second"]
    return [
        name,
        *(f"{rate[which]:.1f}" for which in ("median", "min", "max")),
        f"{figures['tau']:.3f}" if figures["steps"] else "",
        f"{figures['speedup']:.3f}",
        interval_in_words(figures["speedup_interval"]),
        f"{figures['speedup_vs_generate']:.3f}",
        interval_in_words(figures["speedup_vs_generate_interval"]),
        f"{figures['equal_to_plain']:.0%}" if greedy else "(sampled)",
    ]


def add_guesses(made: Page, outcome: dict[str, Any]) -> None:
    medusa = outcome["methods"]["medusa"]
    if not medusa["accepted_by_depth"]:
        return
    made.heading("Guesses that come true")
    drawn = [
        (pictures.alone(pictures.depths, medusa), "Share of steps that accepted a guess at each depth of the tree."),
        (pictures.alone(pictures.positions, medusa["tau_by_position"]), "Mean tokens a step, by where the step began."),
    ]
    if outcome.get("temperatures"):
        drawn.append(
            (pictures.alone(pictures.temperatures, outcome["temperatures"]), "Lossless everywhere; one round each.")
        )
    # A dynamic tree takes many nodes now and then: those that one step in a hundred accepts can be seen.
    if nodes := [node for node in medusa.get("accepted_by_node", []) if node["share"] >= 0.01]:
        drawn.append(
            (
                pictures.alone(pictures.tree, nodes, height=pictures.tree_height(nodes)),
                "Each guess by its rank among its head's; lines are as wide as it is often accepted. Guesses that "
                "fewer than one step in a hundred accepts are left out.",
            )
        )
    made.pictures(drawn)
    made.table(
        ["depth", "steps that accept so deep"],
        [[str(depth), f"{share:.3f}"] for depth, share in enumerate(medusa["accepted_by_depth"], 1)],
    )
    if rows := outcome.get("temperatures"):
        made.table(
            ["temperature", "tau", "95 %", "x generate", "95 %"],
            [
                [
                    f"{row['temperature']:g}",
                    f"{row['tau']:.3f}",
                    interval_in_words(row["tau_interval"]),
                    f"{row['speedup_vs_generate']:.3f}",
                    interval_in_words(row["speedup_vs_generate_interval"]),
                ]
                for row in rows
            ],
        )


def add_time(made: Page, methods: dict[str, Any]) -> None:
    made.heading("Where the time of a step goes")
    timed = {name: figures["step_ms"] for name, figures in methods.items() if "step_ms" in figures}
    made.pictures(
        [
            (
                pictures.alone(pictures.stages, methods, height=3),
                "verify is the backbone's forward; propose the heads; accept and compact judge guesses and keep the "
                "cache in order. The prefill is in no step.",
            )
        ]
    )
    stages = list(timed["medusa"])
    made.table(
        ["ms a step", *stages, "all"],
        [
            [name, *(f"{times[stage]:.3f}" for stage in stages), f"{sum(times.values()):.3f}"]
            for name, times in timed.items()
        ],
    )


def add_categories(made: Page, by_category: dict[str, Any]) -> None:
    made.heading("By kind of prompt")
    height = pictures.height_of(len(by_category))
    made.pictures([(pictures.alone(pictures.categories, by_category, height=height), INTERVAL)])
    made.table(
        ["kind", "tokens/s", "tau", "95 %", "x plain", "95 %", "x generate", "95 %"],
        [
            [
                name,
                f"{figures['tokens_per_second']['median']:.1f}",
                f"{figures['tau']:.3f}",
                interval_in_words(figures["tau_interval"]),
                f"{figures['speedup']:.3f}",
                interval_in_words(figures["speedup_interval"]),
                f"{figures['speedup_vs_generate']:.3f}",
                interval_in_words(figures["speedup_vs_generate_interval"]),
            ]
            for name, figures in by_category.items()
        ],
    )


def add_lossy(made: Page, rows: list[dict[str, Any]]) -> None:
    made.heading("Lossy rules")
    made.text(
        f"At temperature {rows[0]['temperature']:g}. The rules marked lossy change the text. Likelihood: mean log "
        "p(token) in nats under the backbone itself; plain sampling shows what its own text has, and text above that "
        "is more predictable than the model speaks."
    )
    made.table(
        ["rule", "tau", "x generate", "log-likelihood"],
        [
            [
                row["acceptance"] + ("" if row["lossless"] else " (lossy)"),
                f"{row['tau']:.3f}",
                f"{row['speedup_vs_generate']:.3f}",
                f"{row['log_likelihood']:.3f}",
            ]
            for row in rows
        ],
    )


def add_calibration(made: Page, medusa: dict[str, Any]) -> None:
    calibration = medusa["calibration"]
    best = calibration["points"][calibration["chosen"]]
    made.heading("The choice of the tree")
    made.text(
        f"Calibrated here on {calibration['texts']['texts']} texts: {best['nodes']} nodes were fastest, with a "
        f"foretold tau of {best['tau']:.3f}. This run measured {medusa['tau']:.3f}, on its own prompts and tree."
    )
    made.pictures(
        [
            (pictures.alone(pictures.sizes_of_tree, calibration, name, label=f"calibration {name}"), caption)
            for name, caption in zip(
                pictures.CALIBRATED,
                ("Mean tokens a step.", "One node is plain decoding.", "Their quotient; the circle is the choice."),
                strict=True,
            )
        ]
    )


def add_comparison(made: Page, comparison: dict[str, Any]) -> None:
    made.heading(f"{comparison['later']} against {comparison['earlier']}")
    if not comparison["same_machine"]:
        made.text(
            "Machine, threads or dtype differ. Speedups are ratios within a run and may be compared; tokens per second "
            "may not.",
            "bad",
        )
    if comparison["changes"]:
        height = pictures.height_of(len(comparison["changes"]))
        made.pictures(
            [
                (
                    pictures.alone(pictures.changes, comparison, height=height),
                    "Lines: 95 % of resamplings lie within; both runs keep the same prompts in each.",
                )
            ]
        )
    made.table(
        ["figure", "then", "now", "now / then", "95 %", ""],
        [
            [
                change["label"],
                f"{change['earlier']:.3f}",
                f"{change['later']:.3f}",
                f"{change['ratio']:.3f}",
                interval_in_words(change["ratio_interval"]),
                change["verdict"],
            ]
            for change in comparison["changes"]
        ],
    )
    if comparison["same_machine"]:
        made.table(
            ["tokens/s", "then", "now"],
            [[name, f"{then:.1f}", f"{now:.1f}"] for name, (then, now) in comparison["rates"].items()],
        )
    if comparison["differences"]:
        made.text("What else differs:")
        made.table(["", "then", "now"], comparison["differences"], "words")
    else:
        made.text("Machine and settings are the same.", "faint")


def add_circumstances(made: Page, outcome: dict[str, Any]) -> None:
    """What was measured, where and how."""
    machine, settings = outcome["machine"], outcome["settings"]
    made.heading("How it was measured")
    made.code(settings["command"])
    memory = machine["memory"]
    shown = {
        "date": settings["date"],
        "machine": machine["gpu"] or machine["processor"],
        "processor": machine["processor"] if machine["gpu"] else None,
        "threads": machine["threads"],
        "dtype": machine["dtype"],
        "system": machine["system"],
        "versions": f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"medusa-heads {machine['medusa']}",
        "commit": settings["commit"],
        "weights": f"backbone {readable(memory['backbone'])}, heads {readable(memory['heads'])}",
        "peak memory": ", ".join(f"{place} {readable(size)}" for place, size in memory["peak"].items()),
    }
    skipped = {"tree", "command", "date", "commit", "prompts_sha256"}
    shown |= {name.replace("_", " "): value for name, value in settings.items() if name not in skipped}
    made.table(["", ""], [[name, str(value)] for name, value in shown.items() if value not in (None, [], ())], "words")
