"""Stopping at any moment and going on: which checkpoints are whole, and what makes a resumed run the same run.

The Trainer writes `trainer_state.json` last, so a checkpoint with that file is whole. One that was cut off, by a kill
or a full disk, is passed over.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa.checkpoints.layout import WEIGHTS
from medusa.errors import RequestError
from medusa.files import require_absent
from train.progress import say


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Whole checkpoints in `output_dir`, oldest first: a run can resume from each of them."""
    return [path for path in all_checkpoints(output_dir) if is_whole(path)]


def all_checkpoints(output_dir: str | Path) -> list[Path]:
    """Every folder that is called a checkpoint, whole or not, oldest first."""
    found = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[-1]))


def is_whole(checkpoint: Path) -> bool:
    """Whether everything of a checkpoint was written: its last file is complete."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (checkpoint / WEIGHTS).is_file()


def checkpoint_to_resume(output: Path, resume: bool, overwrite: bool) -> Path | None:
    """The last whole checkpoint for --resume; otherwise `None`, and the output folder may be written to.

    Raises:
        RequestError: nothing to resume, or heads that would be replaced without --overwrite.
    """
    found = checkpoints(output)
    if resume and overwrite:
        raise RequestError("--resume goes on from a checkpoint and --overwrite deletes it; give one of them")
    if resume:
        if not found:
            raise RequestError(f"nothing to resume in {output}: it holds no checkpoint; leave --resume out")
        newest = all_checkpoints(output)[-1]
        if newest != found[-1]:
            say(f"{newest.name} was cut off while it was written; going on from {found[-1].name}")
        return found[-1]
    if found and not overwrite:
        raise RequestError(f"{output} holds a checkpoint; go on from it with --resume, or add --overwrite")
    require_absent(output / WEIGHTS, overwrite)
    return None


class LogBeforeSaving(TrainerCallback):
    """Writes a line of the log at every checkpoint.

    No checkpoint holds the sums since the last line. A run that resumed between two lines would log another mean than
    an uninterrupted one; with a line at each checkpoint nothing is lost.
    """

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        control.should_log = control.should_log or control.should_save

    on_epoch_end = on_step_end
