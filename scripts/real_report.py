"""The report of scripts/real_model.py: one page of tables, and pictures of speed and of tau by training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from matplotlib.axes import Axes

from decode.bench.report import plots
from decode.bench.report.plots import INK
from medusa.commands.fit.state import FitState
from medusa.files import Json, replacing, write_text
from script_tools import markdown_table

NAMES = {"plain": "plain decoding", "transformers": "`model.generate`"}


def write_report(state: FitState, speeds: Sequence[tuple[str, int, float]]) -> str:
    """Write report.md and its pictures to the folder of a run; return the page. Unfinished stages are left out."""
    done, sections = state.stages, []
    about = done["plan"]["machine"]
    minutes = sum(its["cpu_seconds"] for its in done.values()) / 60
    machine = f"{about['processor']}, {about['threads']} thread, PyTorch {about['torch']}"
    machine += f", transformers {about['transformers']}, commit {about['commit']}"
    note = f"{machine}. {minutes:.0f} CPU minutes in all. Brackets hold 95 % intervals over prompts."
    title = f"# {about['model']}, {about['parameters']:,} parameters"
    sections.append(f"{title}\n\n`{state.content['command']}`\n\n{note}")
    sections.append(f"## The plan, and what happened\n\n{plan_table(done)}")
    for where in speeds:
        if (found := done.get("speed {} {} {}".format(*where))) is not None:
            title = "Speed in {}, {} thread{}, temperature {:g}".format(*where[:2], "s" * (where[1] > 1), where[2])
            sampled = where[2] > 0
            sections.append(speed_section(state, found, title, "speed-{}-{}-{:g}".format(*where), sampled))
    if (found := done.get("long")) is not None:
        sections.append(speed_section(state, found, f"Speed after prompts of {found['tokens']:,} tokens", "speed-long"))
    if taus := {name.split()[1]: its["tau"] for name, its in done.items() if name.startswith("tau ")}:
        sections.append(f"## tau by kind of heads and nodes of a dynamic tree\n\n{tau_table(taus)}")
    if points := list(curve(done)):
        sections.append(curve_section(state, points))
    if "engine" in done:
        sections.append(engine_section(done["engine"]))
    page = "\n\n".join(sections) + "\n"
    write_text(state.folder / "report.md", page)
    return page


def value_of(value: float, span: Sequence[float] | None) -> str:
    """Format a figure with its interval, if it has one: a single prompt has none."""
    return f"{value:.2f}" + (f" ({span[0]:.2f} to {span[1]:.2f})" if span else "")


def plan_table(done: Json) -> str:
    """Tabulate the planned and the measured CPU seconds of the stages of `medusa fit`."""
    plan = done["plan"]["plan"]
    planned = {"train": 60 * plan["training_minutes"], "calibrate": plan["calibration_seconds"]}
    rows = []
    for name, its in done.items():
        kind = name.split()[0]
        if kind == "text":
            speed = "" if its["resumed"] else f", {its['tokens'] / its['cpu_seconds']:.0f} tokens/s"
            told = f"{its['texts']:,} texts, {its['tokens']:,} tokens{speed}; planned {plan['text_tokens']:,} tokens"
            rows.append([name, f"{plan['text_seconds']:.0f}", f"{its['cpu_seconds']:.0f}", told])
        elif kind in planned:
            told = f"{its['steps']:,} steps, {its['tokens_read']:,} tokens" if kind == "train" else ""
            if found := its.get("found"):
                best = found["points"][found["chosen"]]
                told = f"{best['nodes']} nodes, {best['drafter']}, predicted tau {best['tau']:.2f}"
            rows.append([name, f"{planned[kind]:.0f}", f"{its['cpu_seconds']:.0f}", told])
    return markdown_table(["stage", "planned s", "CPU s", "result"], rows)


def speed_section(state: FitState, found: Json, title: str, picture: str, sampled: bool = False) -> str:
    """Tabulate the speed of each method, in all and by set of prompts, and draw it to the file `picture`."""
    methods = found["methods"]
    sets = list(methods["plain"].get("by_category", {}))
    rows = []
    for name, its in methods.items():
        parts = [its, *(its["by_category"][one] for one in sets)]
        cells = [value_of(part["speedup"], part["speedup_interval"]) for part in parts]
        middle = [f"{its['tokens_per_second']['median']:.1f}", f"{its['tau']:.2f}" if its["steps"] else ""]
        rows.append([NAMES.get(name, name), *middle, *cells, f"{its['equal_to_plain']:.0%}"])
    head = ["method", "tokens/s", "tau", "x plain, all", *(f"x plain, {one}" for one in sets), "same text"]
    bars = {name: (its["speedup"], its["speedup_interval"]) for name, its in methods.items() if name != "plain"}
    with replacing(state.folder / f"{picture}.png") as temporary:
        figure = plots.alone(plots.bars, bars, "times plain decoding", "{:.2f} x".format, bars=len(bars))
        figure.savefig(temporary, format="png", dpi=140)
    note = "\n\nSamples may differ between methods; their distribution does not." if sampled else ""
    return f"## {title}\n\n{markdown_table(head, rows)}{note}\n\n![{title}]({picture}.png)"


def tau_table(taus: Json) -> str:
    """Tabulate tau by kind, set of prompts and nodes."""
    nodes = list(next(iter(next(iter(taus.values())).values())))
    rows = [
        [kind, name, *(value_of(its[n][0], its[n][1:]) for n in nodes)]
        for kind, sets in taus.items()
        for name, its in sets.items()
    ]
    return markdown_table(["heads", "prompts", *(f"{n} nodes" for n in nodes)], rows)


def curve(done: Json) -> Iterator[tuple[int, Json]]:
    """Yield the points of the curve: the tokens read in training, and tau by set of prompts, with intervals."""
    points = [its for name, its in done.items() if name.startswith("curve ")]
    for its in points:
        yield its["tokens_read"], {name: found["16"] for name, found in its["tau"].items()}
    best = next((its["best"] for name, its in done.items() if name.startswith("speed ")), None)
    if points and best and "16" in next(iter(done.get(f"tau {best}", {"tau": {"": {}}})["tau"].values())):
        last = {name: found["16"] for name, found in done[f"tau {best}"]["tau"].items()}
        yield done[f"train {best}"]["tokens_read"], last


def curve_section(state: FitState, points: Sequence[tuple[int, Json]]) -> str:
    """Tabulate and draw tau by the tokens that training read."""
    sets = list(points[0][1])

    def draw(axes: Axes) -> None:
        for name, ink in zip(sets, ("medusa", "blue", "violet"), strict=False):
            read, values = [tokens for tokens, _ in points], [its[name] for _, its in points]
            axes.plot(read, [value for value, *_ in values], marker="o", ms=4, color=INK[ink], label=name)
            for at, (_, low, high) in zip(read, values, strict=True):
                axes.plot([at, at], [low, high], color=INK[ink], lw=1, alpha=0.6)
        axes.set(title="tau (16 nodes) by tokens read in training", xscale="log", xlabel="tokens")
        axes.legend(frameon=False)

    with replacing(state.folder / "curve.png") as temporary:
        plots.alone(draw, height=3.0).savefig(temporary, format="png", dpi=140)
    rows = [[f"{n:,}", *(value_of(its[s][0], its[s][1:]) for s in sets)] for n, its in points]
    text = state.stages["text"]["tokens"]
    told = f"The text has {text:,} tokens of answers, which longer runs read several times."
    return f"## tau by training\n\n{told}\n\n{markdown_table(['tokens read', *sets], rows)}\n\n![tau](curve.png)"


def engine_section(its: Json) -> str:
    """Compare the text engine with `model.generate`, in medians over the turns."""
    speeds = its["tokens_per_second"]
    ratio = median(a / b for a, b in zip(speeds["engine"], speeds["generate"], strict=True))
    rows = [
        ["`medusa distill`, as many rows as pay", f"{median(speeds['engine']):.1f}"],
        ["`model.generate`, 16 rows", f"{median(speeds['generate']):.1f}"],
    ]
    table = markdown_table(["text by", "tokens/s"], [*rows, ["ratio", f"{ratio:.2f}"]])
    return f"## Text\n\n{its['prompts']} mixed prompts, at most {its['tokens']} tokens each, in turns.\n\n{table}"
