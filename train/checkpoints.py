"""The checkpoints of a training run: which are complete, from which to resume, and whether the disk can hold them.

The Trainer writes `trainer_state.json` last. A checkpoint without this file is incomplete: the process was killed while
it wrote the checkpoint, or the disk was full."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa.checkpoints.stored import WEIGHTS
from medusa.errors import RequestError
from medusa.files import free_bytes, readable, require_absent
from train.callbacks import say

ADAM_STATES = 2  # numbers for every weight: the running means of its gradient and of the gradient's square


def whole_checkpoints(output: Path, weights: str = WEIGHTS) -> list[Path]:
    """The complete checkpoints (`is_whole`) in a run's output folder, oldest first."""
    return [path for path in all_checkpoints(output) if is_whole(path, weights)]


def all_checkpoints(output: Path) -> list[Path]:
    """All checkpoint folders in a run's output folder, complete or not; oldest first."""
    found = [path for path in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[-1]))


def remove_checkpoints(output: Path) -> None:
    """Delete all checkpoints in a run's output folder."""
    for checkpoint in all_checkpoints(output):
        shutil.rmtree(checkpoint)


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
    """The advice in error messages how to go on from a checkpoint. An adapter's heads need `--resume`."""
    if is_resumable(checkpoint):
        return "continue from it with --resume"
    start = "start again" if (checkpoint / "adapter").is_dir() else f"take heads.start={checkpoint}"
    return f"{start} with another output_dir"


def checkpoint_to_resume(output: Path, resume: bool, overwrite: bool) -> Path | None:
    """Return the last complete checkpoint in a run's output folder with --resume, or `None` without --resume.

    Raise RequestError if there is no checkpoint to resume from, or it lacks the optimiser's state; if a new run would
    replace heads without --overwrite; or if both options are given."""
    found = whole_checkpoints(output)
    if resume and overwrite:
        raise RequestError("--resume continues from a checkpoint and --overwrite deletes it; give one of them")
    if resume:
        if not found:
            raise RequestError(f"nothing to resume in {output}: it holds no checkpoint; leave --resume out")
        newest = all_checkpoints(output)[-1]
        if newest != found[-1]:
            say(f"{newest.name} was cut off while it was written; continuing from {found[-1].name}")
        if not is_resumable(found[-1]):
            lacking = f"{found[-1]} lacks the optimiser's state (training.save_only_model)"
            raise RequestError(f"--resume: {lacking}; {way_on(found[-1])}")
        return found[-1]
    if found and not overwrite:
        raise RequestError(f"{output} holds a checkpoint; {way_on(found[-1])}, or add --overwrite")
    require_absent(output / WEIGHTS, overwrite)
    return None


def require_room(output: Path, weights: int, arguments: TrainingArguments) -> None:
    """Raise RequestError if the disk of `output` has no room for heads of `weights` bytes and the run's checkpoints."""
    checkpoint = weights if arguments.save_only_model else (1 + ADAM_STATES) * weights
    # A new checkpoint is complete before the oldest one is deleted. Without a limit, room for one is required.
    kept = 0 if arguments.save_strategy == "no" else (arguments.save_total_limit or 0) + 1
    replaced = sum(size_on_disk(path) for path in all_checkpoints(output))  # of an earlier run or the resumed one
    needed, free = kept * checkpoint + weights, free_bytes(output) + replaced
    if needed > free:
        room = f"{output} is to hold heads of {readable(weights)} and {kept} checkpoints of {readable(checkpoint)}"
        way = "another output_dir, a smaller training.save_total_limit, training.save_only_model=true (no --resume)"
        raise RequestError(f"{room}, but its disk has {readable(free)} left; choose {way} or training.save_strategy=no")


def way_out_of_full_disk(output: Path) -> str:
    """The advice in the error message after the disk has filled up during training."""
    if found := whole_checkpoints(output):
        return f"{found[-1].name} is whole: make room and {way_on(found[-1])}"
    return "nothing was saved yet: make room and start again"


def size_on_disk(folder: Path) -> int:
    """Total size in bytes of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
