"""train/checkpoints.py: which folders are whole checkpoints, and from which of them a run continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa.errors import RequestError
from train.checkpoints import (
    all_checkpoints,
    checkpoint_to_resume,
    remove_checkpoints,
    remove_rescues,
    whole_checkpoints,
)

STATE, WEIGHTS, OPTIMIZER = "trainer_state.json", "medusa_lm_head.safetensors", ("optimizer.pt", "scheduler.pt")


def checkpoint(output: Path, name: str, *files: str, state: str = '{"global_step": 1}') -> Path:
    """A checkpoint folder with `files`, and with the Trainer's state unless it is empty."""
    folder = output / name
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).touch()
    if state:
        (folder / STATE).write_text(state)
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run's folder: checkpoints that are whole, and later ones that lack something."""
    for name in ("checkpoint-9", "rescue/checkpoint-10", "checkpoint-11"):
        checkpoint(tmp_path, name, WEIGHTS, *OPTIMIZER)
    checkpoint(tmp_path, "checkpoint-100", WEIGHTS, *OPTIMIZER, state="")
    checkpoint(tmp_path, "checkpoint-101", WEIGHTS, *OPTIMIZER, state='{"global')
    checkpoint(tmp_path, "checkpoint-102", *OPTIMIZER)
    return tmp_path


def names(checkpoints: list[Path]) -> list[str]:
    return [path.name.removeprefix("checkpoint-") for path in checkpoints]


def test_a_whole_checkpoint_has_a_readable_state_and_its_weights(output: Path) -> None:
    assert names(whole_checkpoints(output)) == ["9", "10", "11"]
    assert names(all_checkpoints(output)) == ["9", "10", "11", "100", "101", "102"]


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_run_continues_from_the_last_checkpoint_that_can_be_resumed(output: Path, resume: bool) -> None:
    checkpoint(output, "checkpoint-103", WEIGHTS)  # as with save_only_model
    assert checkpoint_to_resume(output, resume, overwrite=False) == output / "checkpoint-11"
    with pytest.raises(RequestError, match="checkpoint"):
        checkpoint_to_resume(output, False, overwrite=False)


def test_only_rescues_are_removed_when_a_run_is_done(output: Path) -> None:
    checkpoint(output, "rescue/checkpoint-12", WEIGHTS, *OPTIMIZER)
    remove_rescues(output, output / "rescue" / "checkpoint-12")
    assert names(all_checkpoints(output)) == ["9", "11", "12", "100", "101", "102"]
    remove_rescues(output)
    assert names(all_checkpoints(output)) == ["9", "11", "100", "101", "102"]
    assert not (output / "rescue").exists()
    remove_checkpoints(output)
    assert not all_checkpoints(output)
