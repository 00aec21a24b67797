"""Heads-only training neither changes nor copies the backbone, and reports its memory and disk space."""

from __future__ import annotations

import gc
import mmap
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa.config import MedusaConfig
from medusa.loading import LoadOptions, load_backbone
from medusa.memory import peak_memory
from medusa.shipped import shipped_configs
from tests.helpers import HIDDEN, VOCAB, random_ids, tiny_model
from tests.train.processes import forked
from tests.train.recipes import recipes, run
from train.checkpoints import size_on_disk
from train.hardware import CARDS, HeadsSize, fits, heads_size, training_bytes
from train.recipe import load_recipe


def tensors_like(shape: tuple[int, ...]) -> list[int]:
    """Addresses of all living tensors of this shape, gradients and optimiser state included."""
    gc.collect()
    living = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return [tensor.data_ptr() for tensor in living if tuple(tensor.shape) == shape]


def test_the_backbone_is_neither_changed_nor_copied_and_the_footprint_is_reported(tmp_path: Path, monkeypatch) -> None:
    inner = 53  # a width that nothing but the backbone's MLPs has
    rows = [{"input_ids": random_ids(40, seed=seed)} for seed in range(8)]
    content = recipes(tmp_path, rows, 40, max_steps=4, save_steps=2, weight_decay=0.1, use_cpu=True)("out")
    content["heads"] |= {"block": "square", "lm_head": "own"}
    tiny_model("llama", intermediate_size=inner).save_pretrained(tmp_path / "backbone")
    loaded = load_backbone(str(tmp_path / "backbone"), LoadOptions(device="cpu"))
    monkeypatch.setattr("train.build.load_backbone", lambda *args, **kwargs: loaded)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in loaded.model.state_dict().items()}
    held = tensors_like((HIDDEN, inner))
    figures = run(content)
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


def paper_heads(hidden_size: int, vocab_size: int) -> HeadsSize:
    config = MedusaConfig(hidden_size, vocab_size, num_heads=5, block="square", num_layers=1, lm_head="own")
    return heads_size(config, vocab_size)


def test_the_memory_of_the_papers_heads_on_7b() -> None:
    """By hand: 13.5 GB of backbone; 5 (4096^2 + 4096 + 32000 x 4096) weights, of which 655,360,000 in LM heads."""
    heads = paper_heads(4096, 32000)
    assert heads == HeadsSize(5, 5 * (4096**2 + 4096 + 32000 * 4096), 655_360_000, 32000)
    needed = training_bytes(heads, 13_476_831_232, 4096, tokens=8192, device="cuda")
    weights = 13_476_831_232 + 16 * heads.trained
    assert 25.2e9 < weights < 25.4e9
    assert 1.2 < needed / weights < 1.35  # copies in bfloat16, logits and activations
    assert [fits(needed, card) for card in CARDS] == [False, True, True]


def test_the_memory_of_shared_heads_on_1b() -> None:
    """TinyLlama 1.1 B in bfloat16 with four heads of two blocks of width 4: every card holds it."""
    config = MedusaConfig(2048, 32000, num_heads=4, block="mlp", num_layers=2, expansion=4.0, lm_head="shared")
    heads = heads_size(config, 32000)
    assert heads.own == 0
    needed = training_bytes(heads, 2 * 1_100_048_384, 2048, tokens=4096, device="cuda")
    assert 2.2e9 + 16 * heads.trained < needed < 10e9
    assert all(fits(needed, card) for card in CARDS)
    # On a CPU nothing is copied to bfloat16, and a chunk of logits is small.
    assert training_bytes(heads, 0, 2048, 1, "cpu") == pytest.approx(16 * heads.trained, rel=1e-3)


def test_the_papers_recipe_names_a_gpu_that_is_large_enough() -> None:
    path = shipped_configs() / "paper_medusa1_7b.yaml"
    named = re.search(r"one GPU with (\d+) GB or more \(computed: (\d+) GB\)", path.read_text(encoding="utf-8"))
    assert named is not None
    recipe = load_recipe(path, [])
    shape = {name: getattr(recipe.heads, name) for name in ("block", "lm_head")}
    config = MedusaConfig(4096, 32000, num_heads=recipe.heads.num, num_layers=recipe.heads.layers, **shape)
    tokens = recipe.training["per_device_train_batch_size"] * recipe.data.sequence_length
    needed = training_bytes(heads_size(config, 32000), 2 * 6_738_415_616, 4096, tokens, "cuda")
    assert int(named[2]) == round(needed / 1e9)
    assert int(named[1]) == min(card for card in CARDS if fits(needed, card))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_peak_memory_is_in_bytes_and_a_peak(tmp_path: Path) -> None:
    """In a copy of the test process, whose peak is what it holds: earlier tests may have held much more."""

    def work() -> None:
        before, size = peak_memory()["process"], 100_000_000
        assert before > 50e6, "torch alone takes more"
        # Pages straight from the system: a new tensor may reuse memory that earlier tests freed and malloc still holds.
        block = mmap.mmap(-1, size)
        torch.frombuffer(block, dtype=torch.uint8).fill_(1)
        with_block = peak_memory()["process"]
        grown = with_block - before
        assert 0.9 * size < grown < 1.5 * size, f"the peak grew by {grown:,} bytes for a block of {size:,}"
        block.close()
        assert peak_memory()["process"] >= with_block

    assert os.waitpid(forked(work, tmp_path / "error"), 0)[1] == 0, (tmp_path / "error").read_text()
