"""Stages of a chat model, which decoding is for: its prompts, and `medusa fit` as a user runs it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from medusa.commands.fit.options import STATE
from medusa.commands.fit.state import FitState
from medusa.commands.prompting import prompt_form
from medusa.errors import RequestError
from medusa.files import read_json
from medusa.loading import load_tokenizer
from medusa.records.sources import read_records
from script_tools import write_jsonl
from scripts.gpu_battery.run import Run


def chat_model(run: Run, model: str = "", prompts: str = "", questions: str = "") -> None:
    """Take the chat model, and write the ids of prompts that it answers, and of those that methods are timed on.

    Without a `model` and `prompts`, those of the stages `backbone` and `text` are taken. Without `questions`, a few of
    the prompts are set aside. No prompt is on both sides."""
    source = Path(model or run.output / "backbone").resolve()
    if not source.is_dir():
        raise RequestError(f"there is no model {source}; give --model its folder")
    run.backbone.parent.mkdir(exist_ok=True)
    run.backbone.unlink(missing_ok=True)
    run.backbone.symlink_to(source)
    tokenizer = load_tokenizer(str(source))
    form = prompt_form(None, tokenizer, str(source))

    def fitting(name: str) -> list[list[int]]:
        found = form.ids(list(read_records(name)), tokenizer)
        return [ids for ids in found if len(ids) <= run.scale.prompt_tokens]

    answered = fitting(prompts or str(run.output / "openings.jsonl"))
    timed = fitting(questions) if questions else answered
    step = max(len(timed) // run.scale.prompts, 1)  # of every category, where the file is sorted by them
    chosen = sorted(timed[::step][: run.scale.prompts], key=len, reverse=True)  # for caches that need not grow
    aside = timed if questions else chosen
    own = [ids for ids in answered if ids not in aside]
    write_jsonl(run.openings, "input_ids", own)
    write_jsonl(run.prompts, "input_ids", chosen)
    run.keep(chat_model=source.name, prompts=len(own), questions=len(chosen))


def fit(run: Run) -> None:
    """Let `medusa fit` make heads for the chat model. It goes on where an earlier call ended, unless that finished."""
    out, finish = run.output / "fit", FitState.finish
    held = read_json(out / STATE) if (out / STATE).is_file() else {"stages": {}}

    def keep(stage: str, figures: dict[str, object]) -> None:
        if stage != "plan" and not run.has_kept(made=stage):
            run.keep(made=stage, **{key: value for key, value in figures.items() if not isinstance(value, dict | list)})

    def finish_and_keep(state: FitState, stage: str, figures: dict[str, object]) -> None:
        finish(state, stage, figures)
        keep(stage, figures)

    argv = [run.backbone, "--prompts", run.openings, "--output", out, *run.scale.fit.split()]
    argv += ["--overwrite"] if held.get("finished") else []
    for stage, figures in (held["stages"] if not held.get("finished") else {}).items():
        keep(stage, figures)
    with patch.object(FitState, "finish", finish_and_keep):  # at once, because the call may end in the next stage
        run.medusa("fit", *argv, "--device", run.device, "--dtype", run.dtype_name, "--quiet")
