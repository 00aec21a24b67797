"""The state of a `medusa fit` run: its request and the results of finished stages. Only this module reads them."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

from medusa.commands.fit.options import RESULTS, STATE, HeadsChoice
from medusa.commands.fit.plan import Plan
from medusa.commands.fit.probe import Probe
from medusa.errors import RequestError
from medusa.files import Json, read_json, write_json

WORK = "stages"  # the folder for prompts, text and training runs, inside the output folder
Planned = tuple[Probe, Plan, list[HeadsChoice]]


class FitState:
    """The request of a run and the figures of its finished stages, kept in `fit.json` after every change."""

    def __init__(self, folder: Path, request: Json, overwrite: bool = False, command: str = "") -> None:
        """Open the state of the run in `folder`, or begin a new one if there is none, or with `overwrite`.

        Nothing is written yet. `command` is the command line that continues a new run. Raise RequestError if the folder
        holds a run with another request; the message names the command that continues that run."""
        self.folder, self.path = folder, folder / STATE
        self.work = folder / WORK
        self.content: Json = {"request": request, "command": command, "stages": {}}
        self.results: Json = {}  # all results of the finished benchmark
        if overwrite or not self.path.exists():
            return
        found = read_json(self.path)
        held = found.get("request") if isinstance(found, dict) else None
        if not isinstance(held, dict) or not isinstance(found.get("stages"), dict):
            raise RequestError(f"{self.path} was not written by medusa fit; choose another --output")
        self.content = found
        for name in {**request, **held}:
            if name == "server_model" and name not in held:
                continue  # earlier versions did not keep it
            if held.get(name) != (value := request.get(name)):
                own = {"model": "MODEL", "purpose": "--for", "tokens": "--max-new-tokens"}
                option = own.get(name, f"--{name.replace('_', '-')}")
                what = "other prompts" if name == "prompts" else f"{option} {held.get(name)!r}, not {value!r}"
                # Runs of earlier versions have none. The folder may have been moved.
                same = with_output(found.get("command") or "", folder) or "type the same command"
                raise RequestError(
                    f"{folder} holds a run with {what}; to continue it: {same}; or choose another --output, or add "
                    "--overwrite to start again"
                )
        if "benchmark" in self.stages:
            self.results = read_json(folder / RESULTS)

    @property
    def stages(self) -> Json:
        """The figures of each finished stage, by its name."""
        return self.content["stages"]

    @property
    def planned(self) -> Planned | None:
        """The probe of the model, the plan and the heads of a planned run; `None` before."""
        if (held := self.stages.get("plan")) is None:
            return None
        return Probe(**held["probe"]), Plan(**held["plan"]), [HeadsChoice(**choice) for choice in held["choices"]]

    def keep_plan(self, probe: Probe, plan: Plan, choices: list[HeadsChoice]) -> None:
        """Keep what `planned` returns; it is written to disk when a stage is finished."""
        listed = [choice._asdict() for choice in choices]
        self.stages["plan"] = {"plan": asdict(plan), "probe": asdict(probe), "choices": listed}

    @property
    def finished(self) -> bool:
        """Whether all stages of the run are finished."""
        return bool(self.content.get("finished"))

    def is_compiled(self, stage: str) -> bool:
        """Whether a finished stage ran compiled steps; stages of earlier versions do not say it."""
        return bool(self.stages[stage].get("compiled"))

    def require_calibrated(self, compiled: bool) -> None:
        """Raise a RequestError if heads were calibrated already, with eager steps if `compiled`, else with compiled."""
        if (not compiled) in [self.is_compiled(stage) for stage in self.stages if stage.startswith("calibrate ")]:
            steps, option = ("eager", "--compile") if compiled else ("compiled", "--no-compile")
            way = f"leave out {option}, or add --overwrite to start again"
            raise RequestError(f"{self.folder} was calibrated with {steps} steps; {way}")

    def finish_run(self) -> None:
        """Note on disk that all stages are finished."""
        self.content["finished"] = True
        self.write()

    def finish(self, stage: str, figures: object) -> None:
        """Keep the figures of a finished stage on disk."""
        self.stages[stage] = figures
        self.write()

    def write(self) -> None:
        """Write the state to the folder of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content)


def with_output(command: str, folder: Path) -> str:
    """Return a stored command line with `folder` as its --output."""
    words = shlex.split(command)
    if "--output" in words[:-1]:
        words[words.index("--output") + 1] = str(folder)
    return shlex.join(words)


def remove_earlier(folder: Path, made: list[str]) -> None:
    """Delete what an earlier run has written to `folder`: its work folder and the files `made`, and nothing else."""
    shutil.rmtree(folder / WORK, ignore_errors=True)
    for name in [*made, STATE]:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
