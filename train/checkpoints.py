"""The checkpoints of a training run: which are complete, from which to resume, and whether the disk can hold them.

The Trainer writes `trainer_state.json` last. A checkpoint without this file is incomplete: the process was killed while
it wrote the checkpoint, or the disk was full."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Literal

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa.checkpoints.stored import WEIGHTS
from medusa.errors import RequestError
from medusa.files import free_bytes, readable, require_absent
from train.arguments import MedusaTrainingArguments
from train.callbacks import say

RESCUE = "rescue"  # folder of the checkpoints that are saved by the clock and on signals
ADAM_STATES = 2  # numbers for every weight: the running means of its gradient and of the gradient's square


def whole_checkpoints(output: Path, weights: str = WEIGHTS) -> list[Path]:
    """The complete checkpoints in a run's output folder, oldest first."""
    return [path for path in all_checkpoints(output) if is_whole(path, weights)]


def all_checkpoints(output: Path) -> list[Path]:
    """All checkpoint folders in a run's output folder, rescue checkpoints too, complete or not; oldest first."""
    patterns = (f"{PREFIX_CHECKPOINT_DIR}-*", f"{RESCUE}/{PREFIX_CHECKPOINT_DIR}-*")
    found = [path for pattern in patterns for path in output.glob(pattern) if path.name.split("-")[-1].isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[-1]))


def remove_checkpoints(output: Path) -> None:
    for checkpoint in all_checkpoints(output):
        shutil.rmtree(checkpoint)
    remove_rescues(output)


def remove_rescues(output: Path, kept: Path | None = None) -> None:
    """Delete the rescue checkpoints in a run's output folder, except the checkpoint `kept`."""
    for checkpoint in all_checkpoints(output):
        if checkpoint.parent.name == RESCUE and checkpoint != kept:
            shutil.rmtree(checkpoint)
    with contextlib.suppress(OSError):  # it is missing, or holds the kept checkpoint
        (output / RESCUE).rmdir()


def is_whole(checkpoint: Path, weights: str = WEIGHTS) -> bool:
    """Whether a checkpoint is complete: a readable `trainer_state.json` (written last) and the file `weights`."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (checkpoint / weights).is_file()


def is_resumable(checkpoint: Path) -> bool:
    """Whether a complete checkpoint has the optimiser's state, too (not with `training.save_only_model`)."""
    return all((checkpoint / name).is_file() for name in (OPTIMIZER_NAME, SCHEDULER_NAME))


def way_on(checkpoint: Path) -> str:
    """How to go on from a checkpoint, in words. An adapter's heads need `--resume`."""
    if is_resumable(checkpoint):
        return "continue from it with --resume"
    start = "start again" if (checkpoint / "adapter").is_dir() else f"take heads.start={checkpoint}"
    return f"{start} with another output_dir"


def kept(output: Path) -> str:
    """What an interruption leaves in a run's output folder, in words."""
    found = whole_checkpoints(output)
    return f"{found[-1]} is whole" if found else ""


def checkpoint_to_resume(output: Path, resume: bool | Literal["auto"], overwrite: bool) -> Path | None:
    """Return the last complete checkpoint in a run's output folder with --resume, or `None` without --resume.

    With `resume="auto"`, return `None` if there is no checkpoint. Raise RequestError if there is otherwise none to
    resume from, or it lacks the optimiser's state; if a new run would replace heads without --overwrite; or if both
    options are given."""
    found = whole_checkpoints(output)
    last = next((path for path in reversed(found) if is_resumable(path)), found[-1] if found else None)
    if resume and overwrite:
        raise RequestError("--resume continues from a checkpoint and --overwrite deletes it; give one of them")
    if resume and last is not None:
        newest = all_checkpoints(output)[-1]
        if newest not in found:
            say(f"{newest.name} was cut off while it was written; continuing from {last.name}")
        if not is_resumable(last):
            lacking = f"{last} lacks the optimiser's state (training.save_only_model)"
            raise RequestError(f"--resume: {lacking}; {way_on(last)}")
        return last
    if resume is True:
        raise RequestError(f"nothing to resume in {output}: it holds no checkpoint; leave --resume out")
    if last is not None and not overwrite:
        raise RequestError(f"{output} holds a checkpoint; {way_on(last)}, or add --overwrite")
    require_absent(output / WEIGHTS, overwrite)
    return None


def require_room(output: Path, weights: int, arguments: MedusaTrainingArguments) -> None:
    """Raise RequestError if the disk of `output` has no room for heads of `weights` bytes and the run's checkpoints."""
    rescued = arguments.save_minutes > 0
    checkpoint = weights if arguments.save_only_model and not rescued else (1 + ADAM_STATES) * weights
    # A new checkpoint is complete before the oldest one is deleted. Without a limit, room for one is required.
    kept = 0 if arguments.save_strategy == "no" else (arguments.save_total_limit or 0)
    kept += rescued + (arguments.save_strategy != "no" or rescued)
    replaced = sum(size_on_disk(path) for path in all_checkpoints(output))  # of an earlier run or the resumed one
    needed, free = kept * checkpoint + weights, free_bytes(output) + replaced
    if needed > free:
        room = f"{output} is to hold heads of {readable(weights)} and {kept} checkpoints of {readable(checkpoint)}"
        ways = ["another output_dir", "a smaller training.save_total_limit", "training.save_strategy=no"]
        ways += ["training.save_minutes=0"] if rescued else ["training.save_only_model=true (no --resume)"]
        raise RequestError(f"{room}, but its disk has {readable(free)} left; choose {', or '.join(ways)}")


def way_out_of_full_disk(output: Path) -> str:
    """How to go on after the disk has filled up, in words."""
    if found := whole_checkpoints(output):
        return f"{found[-1].name} is whole: make room and {way_on(found[-1])}"
    return "nothing was saved yet: make room and start again"


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
