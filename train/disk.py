"""What a run takes on the disk: checked before it starts, and measured when it is over."""

from __future__ import annotations

from pathlib import Path

from medusa.errors import RequestError
from medusa.files import free_bytes, readable
from medusa.heads.independent import MedusaHeads
from train.arguments import MedusaTrainingArguments
from train.resume import checkpoints

ADAM_STATES = 2  # for every weight, the means of its gradient and of the gradient's square


def require_room(output: Path, heads: MedusaHeads, arguments: MedusaTrainingArguments) -> None:
    """Check that the disk can hold the heads and the checkpoints that a run keeps.

    Raises:
        RequestError: it cannot.
    """
    weights = weight_bytes(heads)
    checkpoint = weights if arguments.save_only_model else (1 + ADAM_STATES) * weights
    # A new checkpoint is whole before the oldest one is deleted. Without a limit at least one is certain.
    kept = 0 if arguments.save_strategy == "no" else (arguments.save_total_limit or 0) + 1
    replaced = sum(file.stat().st_size for file in output.glob("checkpoint-*/*"))  # of earlier runs, or of this one
    needed, free = kept * checkpoint + weights, free_bytes(output) + replaced
    if needed > free:
        raise RequestError(
            f"{output} is to hold heads of {readable(weights)} and {kept} checkpoints of {readable(checkpoint)}, but "
            f"its disk has {readable(free)} left; choose another output_dir, a smaller training.save_total_limit, "
            "training.save_only_model=true (no --resume) or training.save_strategy=no"
        )


def way_out_of_full_disk(output: Path) -> str:
    """What to do where the disk has filled up during a run."""
    if found := checkpoints(output):
        return f"{found[-1].name} is whole: make room and go on with --resume"
    return "nothing was saved yet: make room and start again"


def weight_bytes(heads: MedusaHeads) -> int:
    """Bytes of the heads' weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in heads.parameters())


def checkpoint_bytes(output: Path) -> int | None:
    """Bytes of the last checkpoint with its optimiser state; `None` where there is none.

    A checkpoint is about three times the heads: their weights and AdamW's two means. It never holds the backbone.
    """
    saved = checkpoints(output)
    return size_on_disk(saved[-1]) if saved else None


def size_on_disk(folder: Path) -> int:
    """Bytes of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
