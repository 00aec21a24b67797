"""Make heads for a model in one command: generate text, train, find the fastest tree, and measure the speedup.

  medusa fit org/model --prompts questions.jsonl
  medusa fit org/model --prompts questions.jsonl --plan
  medusa fit ./model --prompts chats.jsonl --minutes 60 --for vllm
  medusa fit ./lora --prompts chats.jsonl --start model-heads

No prompts? A chat model writes some: medusa distill --backbone org/model --questions 1000 --temperature 1. A fifth of
the prompts is set aside for the measurement. Every stage keeps its result, and the same command continues an
interrupted run. At the end, the output folder holds the heads, a report (report.html) and all figures (fit.json)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.commands.fit.options import FitOptions, choose_heads
from medusa.commands.options import Output
from medusa.errors import Interrupted
from medusa.files import locked
from medusa.interruptions import interruptible

if TYPE_CHECKING:
    from medusa.commands.fit.prompts import Split
    from medusa.commands.fit.state import FitState, Planned


def run(options: FitOptions) -> None:
    from medusa.commands.fit.conclusion import conclude

    state = fit(options)
    if state is not None:
        conclude(options, state)


def fit(options: FitOptions) -> FitState | None:
    """Run all stages that are not finished, and return the state of the finished run; with --plan, return `None`."""
    from medusa.commands.distill.tasks import digest
    from medusa.commands.fit.conclusion import MADE
    from medusa.commands.fit.prompts import answerable, split
    from medusa.commands.fit.stages import Run, make
    from medusa.commands.fit.state import FitState, remove_earlier
    from train.hardware import require_own_device

    require_own_device(options.load.device)
    records = options.prompts.read()
    request, command = options.request(digest(records)), options.output.continuing
    state = FitState(options.folder, request, options.overwrite, command)
    if state.finished and not options.plan:
        options.output.note(f"{options.folder} is finished; --overwrite starts again")
        return state
    sides = split(answerable(options, records), options.runtime.seed)
    probe, plan, choices = planned(options, state, sides)
    if options.plan:
        options.output.write({"plan": plan.to_json(), "probe": asdict(probe)})
        return None
    # Not before: so far, the folder holds at most an earlier run.
    with locked(options.folder, wait=False), continued_by(options.folder, options.output):
        if options.overwrite:
            remove_earlier(options.folder, MADE)  # not before: the plan fails if the model is missing or unsuitable
        is_new = state.planned is None
        state.keep_plan(probe, plan, choices)
        if is_new:  # otherwise a change is written with the next stage
            state.write()
        if options.load.dtype == "auto" or probe.bfloat16:  # stages neither choose nor advise again
            options = replace(options, load=replace(options.load, dtype=probe.dtype))
        make(Run(options, state.work, plan, probe), state, sides, choices)
    return state


def planned(options: FitOptions, state: FitState, sides: Split) -> Planned:
    """Check the model and plan the run, or take both from the `state`; print the plan."""
    from decode.settings import Settings
    from medusa.backbone import Backbone
    from medusa.commands.cpu import load_tuned
    from medusa.commands.distill.client import Server
    from medusa.commands.distill.tasks import tasks_of
    from medusa.commands.fit.plan import (
        compiled_steps,
        costs_of,
        describe,
        lacking_disk,
        lacking_memory,
        make_plan,
        text_settings,
    )
    from medusa.commands.fit.probe import probe, why_not_decoded
    from medusa.commands.models import require_compilable_files
    from medusa.commands.options import warn
    from medusa.commands.prompting import prompt_form
    from medusa.loading import BackboneFiles, head_sizes
    from medusa.memory import devices_of

    settings = Settings(compile=bool(options.compile), ignore_generation_config=options.ignore_generation_config)
    files = BackboneFiles(options.model, options.load)
    require_compilable_files(files, settings)
    if state.planned is not None:
        found, plan, choices = state.planned
        if options.compile is not None:
            state.require_calibrated(options.compile)
            plan = replace(plan, compiled=compiled_steps(options, found))
    else:
        if options.server:  # it must answer, and serve the model, before the weights are loaded
            Server(options.server, options.server_model, options=("--server", "--server-model"))
        choices = choose_heads(options, head_sizes(files.config))  # before the weights are loaded
        options.runtime.prepare()
        with options.output.stage("loading and timing the model"):
            tuned = load_tuned(files, options.runtime.threads, options.output, trains=True)
            loaded = tuned.loaded
            form = prompt_form(options.raw, files.tokenizer, options.model, options=options.template_option)
            tasks = tasks_of(sides.train, files.tokenizer, form, None, None)
            found = probe(tuned, tasks, text_settings(options, Backbone(loaded.model).context))
            if compiled_steps(options, found):  # the plan must know, not a stage after text and training
                found = replace(found, not_compiled=why_not_decoded(loaded, settings))
            costs = [costs_of(choice, loaded, found) for choice in choices]
            plan = make_plan(options, found, costs, len(sides.train), len(sides.test))
        if warning := lacking_memory(plan, devices_of(loaded.model)):
            warn(warning)
        del loaded, tuned
    for line in describe(plan, found, choices, options):
        options.output.console.print(line, highlight=False, soft_wrap=True, markup=False)
    if warning := lacking_disk(plan, options.folder):
        warn(warning)
    return found, plan, choices


@contextmanager
def continued_by(folder: Path, output: Output) -> Iterator[None]:
    """Name the command that continues a run after Ctrl-C and SIGTERM, without --overwrite, which would delete it."""
    advice = f"the finished work is in {folder}, and this command continues: {output.continuing}"
    try:
        with interruptible(lambda: advice):
            yield
    except Interrupted as stopped:  # possibly with the advice of a stage's command, which is not what the user typed
        raise Interrupted(stopped.number, advice) from None
