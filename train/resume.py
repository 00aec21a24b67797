"""Stopping at any moment and going on: which checkpoints are whole, and what makes a resumed run the same run.

The Trainer writes `trainer_state.json` last, so a checkpoint is whole when that file is; one that was cut off, by a
kill or a full disk, is passed over.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa.checkpoints.layout import WEIGHTS


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Checkpoints in `output_dir` that a run can resume from, oldest first; one that was cut off is none."""
    return [path for path in all_checkpoints(output_dir) if is_whole(path)]


def all_checkpoints(output_dir: str | Path) -> list[Path]:
    """Every folder that is called a checkpoint, whole or not, oldest first."""
    found = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[-1]))


def is_whole(checkpoint: Path) -> bool:
    """Whether everything of a checkpoint was written: its last file is there to its end."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (checkpoint / WEIGHTS).is_file()


class LogBeforeSaving(TrainerCallback):
    """A line of the log at every checkpoint.

    What was summed up since the last line is in no checkpoint, so a run that resumes between two lines would log
    another mean than one that went through. With a line at each checkpoint there is never anything to lose.
    """

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        control.should_log = control.should_log or control.should_save

    on_epoch_end = on_step_end
