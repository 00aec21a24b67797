"""Room on the disk for what a run will leave there, counted before it starts."""

from __future__ import annotations

from pathlib import Path

from medusa.errors import RequestError
from medusa.files import free_bytes, readable
from medusa.heads.independent import MedusaHeads
from train.trainer import MedusaTrainingArguments

ADAM_STATES = 2  # the means of the gradients and of their squares: two numbers for every weight


def require_room(output: Path, heads: MedusaHeads, arguments: MedusaTrainingArguments) -> None:
    """Raises:
    RequestError: the disk cannot hold the checkpoints that the run keeps, and its heads."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in heads.parameters())
    checkpoint = weights if arguments.save_only_model else (1 + ADAM_STATES) * weights
    # A new checkpoint is whole before the oldest one goes. Without a limit the run decides how many; one is certain.
    kept = 0 if arguments.save_strategy == "no" else (arguments.save_total_limit or 0) + 1
    gone = sum(file.stat().st_size for file in output.glob("checkpoint-*/*"))  # of an earlier run, or of this one's
    needed, free = kept * checkpoint + weights, free_bytes(output) + gone
    if needed > free:
        raise RequestError(
            f"{output} is to hold heads of {readable(weights)} and {kept} checkpoints of {readable(checkpoint)}, but "
            f"its disk has {readable(free)} left; choose another output_dir, a smaller training.save_total_limit, "
            "training.save_only_model=true (no --resume) or training.save_strategy=no"
        )
