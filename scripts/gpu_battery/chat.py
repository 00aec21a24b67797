"""The stage that makes heads for a chat model by `medusa fit`, as a user does, and measures them."""

from __future__ import annotations

from typing import Any

from medusa.files import read_json
from scripts.gpu_battery.run import Run

KEPT = ("tau", "tau_interval", "speedup", "speedup_interval", "speedup_vs_generate", "equal_to_plain")


def chat(run: Run, model: str = "", prompts: str = "") -> None:
    """Let `medusa fit` make heads for a chat model, and measure them on prompts set aside, greedily and sampled.

    Without a `model` and `prompts`, those of the stages `backbone` and `text` are taken."""
    out, where = run.output / "fit", ["--device", run.device, "--dtype", run.dtype_name, "--quiet"]
    source = [model or run.backbone, "--prompts", prompts or run.output / "openings.jsonl"]
    run.medusa("fit", *source, "--output", out, "--overwrite", *run.scale.fit.split(), *where)
    for name, stage in read_json(out / "fit.json")["stages"].items():
        if found := {key: value for key, value in stage.items() if not isinstance(value, dict | list)}:
            run.keep(made=name, **found)
    argv = ["--backbone", source[0], "--prompts", out / "stages" / "test.jsonl", "--tree", "auto", *where]
    argv += ["--max-new-tokens", run.scale.new_tokens, "--temperatures", run.scale.temperatures]
    argv += ["--compile"] * run.on_gpu  # a fit calibrates compiled steps on a GPU only
    found: Any = run.medusa("benchmark", out, *argv, result="chat")
    for name, its in found["methods"].items():
        figures = {key: its.get(key) for key in KEPT} | {"tokens_per_second": its["tokens_per_second"]["median"]}
        run.keep(method=name, **figures)
    for its in found["temperatures"]:
        run.keep(**{key: value for key, value in its.items() if not isinstance(value, dict | list)})
