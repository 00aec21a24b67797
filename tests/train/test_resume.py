"""What a run may resume from, also after a real SIGKILL while it saved (any other time: test_interruptions.py)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState

from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from tests.helpers import random_ids, tiny_model
from tests.train.processes import forked
from tests.train.recipes import recipes, run
from train.checkpoints import is_whole, whole_checkpoints

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
STEPS, SAVE_STEPS, LOGGING_STEPS = 9, 2, 3  # a line of the log and a checkpoint seldom fall on one step


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Recipes with 3 batches an epoch, so that kills fall into the second one."""
    rows = [{"input_ids": random_ids(20, seed=seed)} for seed in range(6)]
    usual = {"max_steps": STEPS, "save_steps": SAVE_STEPS, "logging_steps": LOGGING_STEPS, "seed": 3}
    return recipes(tmp_path, rows, 20, **usual, per_device_train_batch_size=2)


def test_other_heads_are_refused_and_recipes_of_older_versions_are_resumed(recipe: Any, tmp_path: Path) -> None:
    once = recipe("out", max_steps=SAVE_STEPS)
    once["heads"] |= {"lm_head": "shared"}
    run(once)
    for heads, said in (
        ({"num": 3}, "num_heads 2, not 3"),
        ({"kind": "hydra"}, "kind 'medusa', not 'hydra'"),
        ({"lm_head": "own"}, "lm_head 'shared', not 'own'"),
    ):
        other = once | {"heads": once["heads"] | heads}
        with pytest.raises(RequestError, match=rf"--resume: .*checkpoint-2 has {said}; ask for the same heads again"):
            run(other, resume=True)
    for folder in (tmp_path / "out", tmp_path / "out" / f"checkpoint-{SAVE_STEPS}"):
        stored = json.loads((folder / "provenance.json").read_text())
        stored["config"]["heads"]["vocabulary_anyway"] = stored["config"]["heads"].pop("force_vocabulary")
        stored["config"]["training"] |= {"own_guesses": 0.0, "label_share": 0.0}
        (folder / "provenance.json").write_text(json.dumps(stored))
        assert MedusaHeads.from_pretrained(folder).provenance == stored
    once["training"] |= {"max_steps": SAVE_STEPS + 1}
    assert run(once, resume=True).steps == SAVE_STEPS + 1


def test_another_backbone_is_refused(recipe: Any, tmp_path: Path) -> None:
    """Its heads would be recorded as those of the new backbone, although they have learned nothing of it."""
    once = recipe("out", max_steps=SAVE_STEPS)
    run(once)
    tiny_model("llama", seed=5).save_pretrained(tmp_path / "other")
    once["training"] |= {"max_steps": SAVE_STEPS + 1}
    with pytest.raises(RequestError, match=r"checkpoint-2 has heads for another backbone, .*; resume with that"):
        run(once | {"backbone": str(tmp_path / "other")}, resume=True)
    assert run(once, resume=True).steps == SAVE_STEPS + 1


def test_a_resumed_run_learns_with_its_own_settings(recipe: Any, tmp_path: Path) -> None:
    """transformers takes those of the checkpoint."""
    once = recipe("out", max_steps=4, learning_rate=1e-3, logging_steps=1, weight_decay=0.0)
    run(once)
    once["training"] |= {"max_steps": 6, "learning_rate": 1e-5, "weight_decay": 0.5, "adam_beta2": 0.5}
    run(once, resume=True)
    saved = whole_checkpoints(tmp_path / "out")[-1]
    history = json.loads((saved / "trainer_state.json").read_text())["log_history"]
    rates = {line["step"]: line["learning_rate"] for line in history if "learning_rate" in line}
    assert max(rates[step] for step in (5, 6)) <= 1e-5 < rates[2]
    (group, *_) = torch.load(saved / "optimizer.pt", weights_only=True)["param_groups"]
    assert (group["weight_decay"], group["betas"][1]) == (0.5, 0.5)


def test_the_state_of_an_optimiser_in_its_groups_is_resumed(recipe: Any, tmp_path: Path) -> None:
    """As of optimisers without a schedule: only what a recipe sets is taken from the recipe."""
    once = recipe("out", max_steps=2, save_steps=2)
    run(once)
    saved = tmp_path / "out" / "checkpoint-2" / "optimizer.pt"
    state = torch.load(saved, weights_only=True)
    for group in state["param_groups"]:
        group["weight_sum"] = 7.0
    torch.save(state, saved)
    once["training"] |= {"max_steps": 4, "weight_decay": 0.25}
    run(once, resume=True)
    groups = torch.load(whole_checkpoints(tmp_path / "out")[-1] / "optimizer.pt", weights_only=True)["param_groups"]
    assert {(group["weight_sum"], group["weight_decay"]) for group in groups} <= {(7.0, 0.25), (7.0, 0.0)}


def test_more_patience_continues_a_run(recipe: Any, tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 6, "learning_rate": 0.5}
    once = recipe("out", **settings, lr_scheduler_type="constant", early_stopping_patience=1)
    once["eval_data"] = once["data"]
    ended = run(once).steps
    assert ended < 6
    once["training"] |= {"early_stopping_patience": 6}
    assert run(once, resume=True).steps == 6


def test_a_run_that_has_ended_says_so(recipe: Any, capsys: pytest.CaptureFixture) -> None:
    """A larger batch has fewer steps."""
    once = recipe("out", max_steps=-1, num_train_epochs=1, save_steps=1)
    run(once)
    capsys.readouterr()
    once["training"] |= {"per_device_train_batch_size": 6}
    run(once, resume=True)
    assert "nothing is left to train: the run has ended at step 3 of 1" in capsys.readouterr().err


def test_a_checkpoint_without_the_optimisers_state_is_not_resumed(recipe: Any, tmp_path: Path) -> None:
    """`heads.start` would leave an adapter behind, to which the heads belong."""
    once = recipe("out", max_steps=SAVE_STEPS)
    run(once)
    checkpoint = tmp_path / "out" / f"checkpoint-{SAVE_STEPS}"
    (checkpoint / "scheduler.pt").unlink()
    once["training"] |= {"max_steps": SAVE_STEPS + 1}
    for way in (r"take heads\.start=.*checkpoint-2 with another output_dir", "start again with another output_dir"):
        message = rf"--resume: .*checkpoint-2 lacks the optimiser's state \(.*save_only_model\); {way}$"
        with pytest.raises(RequestError, match=message):
            run(once, resume=True)
        with pytest.raises(RequestError, match=f"holds a checkpoint; {way}, or add --overwrite"):
            run(once)
        (checkpoint / "adapter").mkdir(exist_ok=True)


def cut_off(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the process (SIGKILL) in the middle of `stage` of writing the second checkpoint."""
    calls = {"weights": 0, "optimizer": 0, "state": 0}

    def half(name: str, path: Path, write: Callable[[], Any]) -> Any:
        calls[name] += 1
        result = write()
        if name == stage and calls[name] == 2:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    save, state_save, file_save = torch.save, TrainerState.save_to_json, __import__("safetensors.torch").torch.save_file
    monkeypatch.setattr(
        "medusa.checkpoints.stored.save_file",
        lambda tensors, path, **kwargs: half("weights", Path(path), lambda: file_save(tensors, path, **kwargs)),
    )

    def torch_save(what: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if "optimizer" not in str(path):
            return save(what, path, *args, **kwargs)
        return half("optimizer", Path(path), lambda: save(what, path, *args, **kwargs))

    monkeypatch.setattr(torch, "save", torch_save)
    monkeypatch.setattr(
        TrainerState, "save_to_json", lambda self, path: half("state", Path(path), lambda: state_save(self, path))
    )


@pytest.mark.parametrize("stage", ["weights", pytest.param("optimizer", marks=pytest.mark.full), "state"])
def test_a_kill_while_saving_leaves_the_last_good_checkpoint(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, stage: str
) -> None:
    out = tmp_path / "out"

    def cut_run() -> None:
        cut_off(stage, monkeypatch)
        run(recipe("out"))

    process = forked(cut_run)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    assert (out / "checkpoint-4").is_dir()
    assert not is_whole(out / "checkpoint-4")
    assert whole_checkpoints(out) == [out / "checkpoint-2"]
    assert MedusaHeads.from_pretrained(out / "checkpoint-2").config.num_heads == 2
    figures = run(recipe("out", max_steps=5), resume=True)
    assert figures.steps == 5
    assert "checkpoint-4 was cut off while it was written; continuing from checkpoint-2" in capsys.readouterr().err
    assert [path.name for path in whole_checkpoints(out)] == ["checkpoint-4", "checkpoint-5"]
