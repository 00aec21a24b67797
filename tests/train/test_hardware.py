"""What a run uses of its device: chosen on a machine that seems to have a GPU, because none is needed to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa.errors import RequestError
from tests.helpers import random_heads, random_ids, tiny_model
from train.arguments import MedusaTrainingArguments
from train.config import TrainConfig
from train.data.datasets import PackedDataset
from train.data.packing import Example
from train.hardware import READERS, describe_precision, device_defaults, precision_restored, require_own_device
from train.trainer import MedusaTrainer


def config(training: dict[str, Any] | None = None, **keys: Any) -> TrainConfig:
    return TrainConfig.model_validate({"backbone": "demo", "data": "x", "output_dir": "y", "training": training} | keys)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch say that there is a GPU of the Ampere generation."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


def test_a_gpu_trains_in_bfloat16_from_pinned_memory_and_a_cpu_in_float32(gpu: None) -> None:
    wanted = {"use_cpu": False, "bf16": True, "tf32": True, "dataloader_pin_memory": True}
    for device in (None, "cuda", "auto"):
        assert device_defaults(config(device=device), from_disk=False) == wanted
    for found in (config(device="cpu"), config({"use_cpu": True})):
        assert device_defaults(found, from_disk=True) == {"use_cpu": True, "dataloader_pin_memory": False}
    for given in ({"bf16": False}, {"bf16": True}, {"fp16": True}):  # the recipe chooses before the device
        assert "bf16" not in device_defaults(config(given), from_disk=False)


def test_a_run_on_the_cpu_loads_its_backbone_there() -> None:
    """Also if only the Trainer's own key says so; the recipe's key counts more."""
    assert config(training={"use_cpu": True}).load_options.device == "cpu"
    assert config(training={"use_cpu": False}).load_options.device is None
    assert config(training={"use_cpu": True}, device="auto").load_options.device == "auto"


def test_a_machine_without_a_gpu_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_defaults(config(), from_disk=True) == {"use_cpu": False, "dataloader_pin_memory": False}


def test_an_older_gpu_has_neither_bfloat16_nor_tf32(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    found = device_defaults(config(), from_disk=False)
    assert found == {"use_cpu": False, "bf16": False, "dataloader_pin_memory": True}


def test_features_on_disk_are_read_by_processes(gpu: None) -> None:
    found = device_defaults(config(), from_disk=True)
    assert (found["dataloader_num_workers"], found["dataloader_persistent_workers"]) == (READERS, True)
    chosen = device_defaults(config({"dataloader_num_workers": 0}), from_disk=True)
    assert not {"dataloader_num_workers", "dataloader_persistent_workers"} & chosen.keys()


def test_a_gpu_of_another_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for device in (None, "cpu", "cuda", "auto", "cuda:0"):
        require_own_device(device)
    with pytest.raises(RequestError, match=r"device is cuda:1, but this process trains on cuda:0; .*VISIBLE_DEVICES"):
        require_own_device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    require_own_device("cuda:1")


def test_the_precision_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.hardware.has_fast_bfloat16", lambda: True)
    arguments = MedusaTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert describe_precision(arguments, torch.float32) == (
        "precision: the backbone computes in float32, the heads in float32"
    )
    arguments.bf16 = arguments.tf32 = True
    assert describe_precision(arguments, torch.float16) == (
        "precision: the backbone computes in float16, the heads in bfloat16, their weights in float32; "
        "TF32 for float32 products"
    )
    monkeypatch.setattr("train.hardware.has_fast_bfloat16", lambda: False)
    assert describe_precision(arguments, torch.float16).endswith("training.bf16=false is many times as fast")
    arguments.use_cpu = False
    assert describe_precision(arguments, torch.float16).endswith("TF32 for float32 products")


def test_tf32_ends_with_the_training() -> None:
    """`medusa fit` measures in the process that has trained, and its text must be that of any other process."""
    before = torch.backends.fp32_precision
    with precision_restored():
        torch.backends.fp32_precision = "tf32"
        assert torch.backends.fp32_precision != before
    assert torch.backends.fp32_precision == before


def test_the_time_of_a_step_ends_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that needs a second for each step, which it takes only when somebody waits for it."""
    model = tiny_model("llama")
    rows = PackedDataset([Example(random_ids(12, seed=seed), [True] * 12) for seed in range(8)], 12)
    arguments = MedusaTrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=1)
    trainer = MedusaTrainer(model, random_heads(model), arguments, train_dataset=rows)
    now, ordered = [0.0], [0]

    def order(*args: object, **keywords: object) -> torch.Tensor:
        ordered[0] += 1
        return torch.zeros((), requires_grad=True)

    def wait(device: torch.device) -> None:
        now[0] += ordered[0]
        ordered[0] = 0

    monkeypatch.setattr(trainer, "compute_loss", order)
    monkeypatch.setattr("train.trainer.synchronize", wait)
    monkeypatch.setattr("train.trainer.time.perf_counter", lambda: now[0])
    assert trainer.seconds_per_step() == 1.0
    before = now[0]
    monkeypatch.setattr("train.trainer.PROBE_SECONDS", 1.5)
    assert trainer.seconds_per_step() == 1.0
    assert now[0] - before == 2, "slow steps are timed twice, not four times"
