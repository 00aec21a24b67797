"""Heads-only training neither changes nor copies the backbone, and reports its memory and disk space."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from medusa.loading import LoadOptions, load_backbone
from medusa.memory import peak_memory
from tests.helpers import HIDDEN, VOCAB, random_ids, tiny_model
from train.checkpoints import size_on_disk
from train.recipe import parse_recipe
from train.run import train


def tensors_like(shape: tuple[int, ...]) -> list[int]:
    """Addresses of all living tensors of this shape, gradients and optimiser state included."""
    gc.collect()
    living = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return [tensor.data_ptr() for tensor in living if tuple(tensor.shape) == shape]


def test_the_backbone_is_neither_changed_nor_copied_and_the_footprint_is_reported(tmp_path: Path, monkeypatch) -> None:
    inner = 53  # a width that nothing but the backbone's MLPs has
    tiny_model("llama", intermediate_size=inner).save_pretrained(tmp_path / "backbone")
    rows = [json.dumps({"input_ids": random_ids(40, seed=seed)}) for seed in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows), encoding="utf-8")
    loaded = load_backbone(str(tmp_path / "backbone"), LoadOptions(device="cpu"))
    monkeypatch.setattr("train.build.load_backbone", lambda *args, **kwargs: loaded)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in loaded.model.state_dict().items()}
    held = tensors_like((HIDDEN, inner))
    content = {
        "backbone": str(tmp_path / "backbone"),
        "data": {"path": str(tmp_path / "data.jsonl"), "sequence_length": 40},
        "output_dir": str(tmp_path / "out"),
        "heads": {"num": 2, "block": "square", "lm_head": "own"},
        "training": {"max_steps": 4, "save_steps": 2, "weight_decay": 0.1, "use_cpu": True},
    }
    figures = train(parse_recipe(content, "test"), quiet=True)
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert tensors_like((HIDDEN, inner)) == held, "no copy, no gradient, no moments of a backbone's matrix"
    assert figures.heads_bytes == 4 * 2 * (HIDDEN * HIDDEN + HIDDEN + VOCAB * HIDDEN)
    saved = tmp_path / "out" / "checkpoint-4"
    stored = sum(tensor.nbytes for tensor in load_file(saved / "medusa_lm_head.safetensors").values())
    assert stored == figures.heads_bytes
    assert figures.checkpoint_bytes == size_on_disk(saved)
    # Weights and AdamW's two moments; the rest (random states, the log, file headers) is some 30 kB whatever the size.
    assert 3 * stored < figures.checkpoint_bytes < 3 * stored + 60_000
    assert str(figures).startswith("peak memory: process ")


def test_peak_memory_is_in_bytes_and_a_peak() -> None:
    before = peak_memory()["process"]
    assert before > 50e6, "torch alone takes more"
    block = torch.ones(before // 4)  # float32: as many bytes as all that was held at once so far
    with_block = peak_memory()["process"]
    assert with_block > before
    del block
    assert peak_memory()["process"] >= with_block
