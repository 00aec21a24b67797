"""Accumulation, two processes, a sharded backbone and mixed precision give the loss of one process with one batch.

NCCL, the memory of two GPUs and speed need GPUs and are not tested here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.tensor import DTensor

from medusa.__main__ import main
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.loading import LoadOptions, load_backbone
from tests.helpers import random_ids, tiny_model
from tests.train.processes import as_two_ranks
from tests.train.recipes import assert_close, recipes, run
from train import MedusaTrainer
from train.build import placement
from train.checkpoints import whole_checkpoints

ROOT = Path(__file__).parents[2]
STEPS = 2
# One process adds the same float32 gradients in another order than two: after two steps of AdamW, which divides by
# their size, weights part by at most a few 1e-5, losses by less. Means of means, on rows of 3 or of 30 taught tokens,
# part by 1e-2.
MOST = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scale")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Callable[..., dict[str, Any]]:
    """Recipes whose rows have very different numbers of labels."""
    rows = [
        {"input_ids": random_ids(32, seed=seed), "prompt_tokens": (2 if seed % 4 < 2 else 29)}
        for seed in range(STEPS * 4)
    ]
    return recipes(folder, rows, 32, max_steps=STEPS, logging_steps=1, save_steps=2, seed=1)


@pytest.fixture(scope="module")
def one(recipe: Any, folder: Path) -> Path:
    """The folder of a run of one process with batches of four rows."""
    run(recipe("one", per_device_train_batch_size=4))
    return folder / "one"


def losses(folder: Path) -> list[dict[str, float]]:
    """For each line of the log: the loss, and every head's loss."""
    history = json.loads((whole_checkpoints(folder)[-1] / "trainer_state.json").read_text())["log_history"]
    return [{key: line[key] for key in line if "loss" in key and "train" not in key} for line in history]


def same_losses(left: list[dict[str, float]], right: list[dict[str, float]]) -> None:
    assert len(left) == len(right) == STEPS
    for ours, theirs in zip(left, right, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4), "heads' losses are logged with four digits"


def test_accumulated_micro_batches_equal_one_batch(recipe: Any, one: Path, folder: Path) -> None:
    """Rows 0 and 1 of every four have ten times the labels of rows 2 and 3."""
    accumulated = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    run(recipe("four", **accumulated))
    same_losses(losses(folder / "four"), losses(one))
    assert_close(folder / "four", one, MOST)


def test_two_processes_equal_one_with_the_same_global_batch(
    recipe: Any, one: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch` with our settings, up to torchrun: its processes are copies of this one."""
    content = recipe("two", per_device_train_batch_size=2) | {"cache_features": True}
    (tmp_path / "recipe.json").write_text(json.dumps(content), encoding="utf-8")

    def launched(args: Any) -> None:
        assert (args.nproc_per_node, args.module, args.training_script) == ("2", True, "medusa")
        as_two_ranks(lambda: sys.exit(main(args.training_script_args)), tmp_path)

    monkeypatch.setattr("torch.distributed.run.run", launched)
    settings = str(ROOT / "configs" / "accelerate" / "two_processes_cpu.yaml")
    command = ["--config_file", settings, "-m", "medusa", "train", str(tmp_path / "recipe.json"), "--threads", "1"]
    launch_command(launch_command_parser().parse_args([*command, "--json", str(tmp_path / "figures.json")]))
    two = folder / "two"
    same_losses(losses(two), losses(one))
    assert_close(two, one, MOST)
    assert json.loads((tmp_path / "figures.json").read_text())["steps"] == STEPS
    saved = whole_checkpoints(two)[-1]
    assert {path.name for path in saved.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}, "there were two"
    assert len(list(saved.glob("*.safetensors"))) == len(list(two.glob("*.safetensors"))) == 1


def test_a_sharded_backbone_gives_the_same_loss_and_the_same_heads(
    recipe: Any, one: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FSDP2 and gloo, each process holds a share of the blocks, and hidden states are the same."""
    content = recipe("sharded", per_device_train_batch_size=2) | {"shard_backbone": True}
    start = MedusaTrainer.train

    def look_and_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.backbone.model
        blocks = [parameter for layer in model.model.layers for parameter in layer.parameters()]
        assert all(isinstance(parameter, DTensor) for parameter in blocks)
        held = sum(parameter.to_local().numel() for parameter in blocks)
        assert held == sum(parameter.numel() for parameter in blocks) / 2, "every process holds its share"
        assert not isinstance(model.lm_head.weight, DTensor)
        assert not any(isinstance(parameter, DTensor) for parameter in self.heads.parameters())
        ids = torch.arange(10)[None]
        with torch.no_grad():
            ours = Backbone(model).hidden_states(ids, use_cache=False)
            theirs = Backbone(load_backbone(content["backbone"]).model).hidden_states(ids, use_cache=False)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        outcome = start(self, *args, **kwargs)
        assert all(isinstance(parameter, DTensor) for layer in model.model.layers for parameter in layer.parameters())
        return outcome

    monkeypatch.setattr(MedusaTrainer, "train", look_and_train)
    as_two_ranks(lambda: run(content), tmp_path)
    sharded = folder / "sharded"
    same_losses(losses(sharded), losses(one))
    assert_close(sharded, one, MOST)
    known, whole = (MedusaHeads.from_pretrained(place).config.backbone for place in (sharded, one))
    assert known == whole, "the fingerprint is that of the whole backbone"


def test_two_processes_evaluate_each_row_once(recipe: Any, folder: Path, tmp_path: Path) -> None:
    """Of 8 rows in batches of 3 they read 6 and 2, and fill up the last two batches with rows that are read already."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    lines = []
    for processes, rows in ((1, 6), (2, 3)):
        content = recipe(f"evaluated-{processes}", per_device_eval_batch_size=rows, learning_rate=1e-9, **settings)
        content["eval_data"] = content["data"]
        if processes == 1:
            run(content)
        else:
            as_two_ranks(lambda content=content: run(content), tmp_path)
        saved = whole_checkpoints(folder / f"evaluated-{processes}")[-1] / "trainer_state.json"
        history = json.loads(saved.read_text())["log_history"]
        found = next(line for line in history if "eval_loss" in line)
        lines.append({key: value for key, value in found.items() if "head" in key or "tau" in key})
    assert len(lines[0]) > 8
    assert lines[1] == pytest.approx(lines[0], abs=2e-4), "losses are logged with four digits"


def test_a_launcher_that_started_one_process_of_several_gives_a_warning(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    run(recipe("out", max_steps=1))
    assert "accelerate launch --cpu starts one process" in capsys.readouterr().err


def test_sharding_needs_processes(recipe: Any) -> None:
    with pytest.raises(RequestError, match=r"shard_backbone: true needs several processes; start with torchrun"):
        run(recipe("refused") | {"shard_backbone": True})


def test_every_process_has_its_gpu_and_a_sharded_backbone_starts_in_main_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = tiny_model("llama", dtype=torch.bfloat16).config
    assert placement(LoadOptions(), False, sizes) == LoadOptions()
    assert placement(LoadOptions("float32", "cpu"), True, sizes) == LoadOptions("float32", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert placement(LoadOptions(), False, sizes) == LoadOptions(device="cuda:1")
    assert placement(LoadOptions(device="cuda:0"), False, sizes) == LoadOptions(device="cuda:0")
    assert placement(LoadOptions(device="cuda"), True, sizes) == LoadOptions("bfloat16", "cpu")


def test_mixed_precision_trains_about_as_well(recipe: Any, folder: Path) -> None:
    finals = {}
    for bf16 in (False, True):
        content = recipe(str(bf16), bf16=bf16, save_strategy="no") | {"heads": {"num": 2, "lm_head": "own"}}
        finals[bf16] = run(content).heads["head1_loss"]
    assert finals[True] != finals[False], "autocast was on"
    # bfloat16 keeps 8 bits: logits of some units are off by some 1e-2, and the loss by less than that on average.
    assert finals[True] == pytest.approx(finals[False], abs=0.1)
    heads = MedusaHeads.from_pretrained(folder / "True")
    assert all(parameter.dtype == torch.float32 for parameter in heads.parameters())


def test_a_backbone_spread_over_devices_can_be_trained_on(
    recipe: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`device: auto` with the second layer on disk, as when memory is short."""
    plain = run(recipe("plain"))
    loaded = load_backbone(str(folder / "backbone"), LoadOptions(device="cpu"))
    here = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(here, "cpu")
    loaded.model = dispatch_model(
        loaded.model, places | {"model.layers.1": "disk"}, main_device="cpu", offload_dir=tmp_path / "offload"
    )
    monkeypatch.setattr("train.build.load_backbone", lambda *args, **kwargs: loaded)
    spread = run(recipe("spread"))
    assert spread.heads == plain.heads
