"""train/checkpoints.py: which folders are whole checkpoints, and from which of them a run continues."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import Trainer, TrainerState

from medusa.errors import RequestError
from train.checkpoints import (
    all_checkpoints,
    checkpoint_to_resume,
    is_whole,
    remove_checkpoints,
    remove_rescues,
    whole_checkpoints,
)
from train.rescue import InterruptibleTrainer, RescueClock

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


@pytest.mark.parametrize("fails", [False, True])
def test_a_rescue_leaves_the_other_checkpoints_as_the_recipe_says(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the optimiser's state whatever the recipe says, and other checkpoints do not, even if saving failed."""
    trainer, seen = object.__new__(InterruptibleTrainer), list[bool]()
    vars(trainer)["args"] = SimpleNamespace(save_only_model=True)
    trainer.state, trainer.model_wrapped, trainer._saved_step = TrainerState(global_step=3), nn.Module(), -1

    def save(model: nn.Module, trial: None) -> None:
        seen.append(trainer.args.save_only_model)
        if fails:
            raise OSError("the disk is full")

    monkeypatch.setattr(trainer, "_save_checkpoint", save)
    with pytest.raises(OSError, match="full") if fails else nullcontext():
        trainer.save_rescue()
    assert seen == [False]
    assert trainer.args.save_only_model
    assert not trainer._rescuing


def test_a_checkpoint_that_is_written_again_is_not_whole_meanwhile(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, folder, seen = object.__new__(InterruptibleTrainer), output / "checkpoint-11", list[bool]()
    vars(trainer)["args"] = SimpleNamespace(should_save=True, save_only_model=False, output_dir=str(output))
    trainer.state, trainer.clock, trainer._rescuing = TrainerState(global_step=11), RescueClock(1.0), False
    trainer.hp_search_backend = None

    def save(self: Trainer, model: nn.Module, trial: None) -> None:
        seen.append(is_whole(folder))
        (folder / STATE).write_text("{}")

    monkeypatch.setattr(Trainer, "_save_checkpoint", save)
    trainer._save_checkpoint(nn.Module(), None)
    assert seen == [False]
    assert names(whole_checkpoints(output)) == ["9", "11"], "the older rescue checkpoint is removed"


def test_only_rescues_are_removed_when_a_run_is_done(output: Path) -> None:
    checkpoint(output, "rescue/checkpoint-12", WEIGHTS, *OPTIMIZER)
    remove_rescues(output, output / "rescue" / "checkpoint-12")
    assert names(all_checkpoints(output)) == ["9", "11", "12", "100", "101", "102"]
    remove_rescues(output)
    assert names(all_checkpoints(output)) == ["9", "11", "100", "101", "102"]
    assert not (output / "rescue").exists()
    remove_checkpoints(output)
    assert not all_checkpoints(output)
