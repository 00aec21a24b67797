"""The end of `medusa fit`: the fastest heads move to the output folder, and the result is printed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import ceil
from pathlib import Path
from shlex import quote

from decode.bench.calibration.stored import FILE as CALIBRATION
from decode.settings import Settings
from medusa.arguments import as_arguments
from medusa.checkpoints.stored import CONFIG, PROVENANCE, WEIGHTS
from medusa.commands.fit.options import PURPOSES, REPORT, RESULTS, FitOptions, HeadsChoice
from medusa.commands.fit.state import FitState
from medusa.commands.options import CommandOptions
from medusa.files import Json, replacing
from train.outcome import PICTURE

HEADS = (WEIGHTS, PROVENANCE, PICTURE, CALIBRATION, CONFIG)  # the config last: with it, the folder loads as heads
MADE = [*HEADS, REPORT, RESULTS, *PURPOSES[1:]]  # all that a run writes to its folder, except the state and its work


def fastest(choices: list[HeadsChoice], state: FitState) -> HeadsChoice:
    """Return the heads with the most tokens per second in calibration; the first, if a calibration was refused."""
    speeds = []
    for choice in choices:
        found = state.stages[f"calibrate {choice.name}"]
        speeds.append(found["tau"] / found["step_ms"] if "tau" in found else 0.0)
    return choices[speeds.index(max(speeds))]


def install(source: Path, folder: Path) -> None:
    """Copy trained heads, with their calibration, from `source` to `folder`; each file is replaced atomically.

    Files that `source` lacks stay as they are."""
    for name in HEADS:
        if (source / name).is_file():
            with replacing(folder / name) as temporary:
                shutil.copyfile(source / name, temporary)


def conclude(options: FitOptions, state: FitState) -> None:
    """Print the speedup, the tree and the next commands, and write the results of --json."""
    folder, results, kind = options.folder, state.results, state.content["kind"]
    lines = ["", results["headline"]["title"], f"Tree: {tree_of(state.stages[f'calibrate {kind}'])}"]
    lines.append(f"Heads: {folder} (kind {kind})    Report: {folder / REPORT}")
    if "export" in state.stages:
        lines.append(f"Serve: {state.stages['export']['serve']}")
    if results["headline"]["verdict"] != "faster":
        more = f"--minutes {ceil(3 * state.stages['plan']['plan']['minutes'])} --overwrite"
        lines.append(f"More text and training may help ({more}), or another kind of heads (--compare --overwrite).")
    ignores = options.ignore_generation_config
    settings = Settings(compile=state.is_compiled("benchmark"), ignore_generation_config=ignores)
    load = replace(options.load, revision=None)  # heads record the revision
    given = as_arguments(CommandOptions(load=load, settings=settings))
    lines.append(" ".join([f'Next: medusa generate {quote(str(folder))} "Once upon a time"', *given]))
    for line in lines:
        options.output.console.print(line, highlight=False, soft_wrap=True, markup=False)
    about: Json = {"heads": str(folder), "kind": kind, "headline": results["headline"]}
    about |= {"request": state.content["request"], "stages": state.stages, "benchmark": results}
    options.output.write(about)


def tree_of(calibration: Json) -> str:
    """Describe the tree that a calibration has chosen."""
    if "refused" in calibration:
        return "the default tree, because there was too little text to choose one"
    if calibration["nodes"] == 1:
        return "none: no tree was faster than plain decoding, so `auto` decodes plainly"
    kind = "dynamic" if calibration["dynamic"] else "static"
    drafter = calibration.get("drafter", "heads")
    if drafter != "heads":
        kind = f"--drafter {drafter}"
    return f"{kind}, {calibration['nodes']} nodes, predicted tau {calibration['tau']:.2f} (tokens per step)"
