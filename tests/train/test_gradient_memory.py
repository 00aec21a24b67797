"""The gradient of the heads' LM heads, the largest tensor of training, is in memory once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from tests.helpers import HIDDEN, VOCAB, random_ids, tiny_model
from train import MedusaTrainer, MedusaTrainingArguments
from train.config import HeadsConfig
from train.data.datasets import PackedDataset
from train.data.packing import Example
from train.heads import new_heads

HEADS, LENGTH = 3, 24
OWN = HeadsConfig(num=HEADS, lm_head="own")
ONE = HeadsConfig(num=HEADS, kind="eagle", block="gated", feature_layers=[0, 1], lm_head="one")
ONE_BYTES = 4 * HIDDEN * VOCAB  # of the gradient of one LM head
LABELLED = (LENGTH, 5, 11)  # tokens of each row from which heads learn: micro-batches have different numbers of labels


class Gradients(TrainerCallback):
    """Copies the gradients that the optimiser is about to use."""

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four positions: each batch has several, and their logits are smaller than an LM head."""
    monkeypatch.setattr("train.loss.chunked.chunk_rows", lambda *_: 4)


def trainer(
    output: Path, rows: int, asked: HeadsConfig = OWN, dtype: torch.dtype = torch.float32, **settings: Any
) -> MedusaTrainer:
    """A run of one step of SGD on so many rows, by default one in a batch, with gradient accumulation."""
    examples = [
        Example(random_ids(LENGTH, seed=row), [place < count for place in range(LENGTH)])
        for row, count in enumerate(LABELLED[:rows])
    ]
    given: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": rows}
    given |= {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "no", "disable_tqdm": True}
    arguments = MedusaTrainingArguments(output_dir=str(output), use_cpu=True, **given | settings)
    model = tiny_model("llama")
    torch.manual_seed(0)
    heads = new_heads(model, asked, "tiny").to(dtype)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return MedusaTrainer(model, heads, arguments, train_dataset=PackedDataset(examples, LENGTH))


def gradients(run: MedusaTrainer) -> dict[str, Tensor]:
    seen = Gradients()
    run.add_callback(seen)
    run.train()
    return seen.found


def blocks(run: Callable[[], object]) -> list[int]:
    """Sizes in bytes of the blocks of memory that `run` allocates (positive) and frees (negative), in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def most_at_once(sizes: list[int], size: int) -> int:
    """The greatest number of blocks of exactly `size` bytes that were allocated at the same time."""
    now = most = 0
    for found in sizes:
        now += (found == size) - (found == -size)
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("asked", "rows"), [pytest.param(OWN, 1, marks=pytest.mark.full), (ONE, 3)], ids=["own-1", "one-3"]
)
def test_gradients_added_in_place_equal_those_of_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: HeadsConfig, rows: int
) -> None:
    """The judge is the plain loss: one batch, all logits at once, and autograd.

    In float32 the entries, all below 1, are sums of at most 24 products per head, each rounded to 6e-8 of itself. In
    float64 only the order of the additions differs between the two ways to accumulate."""
    in_place = gradients(trainer(tmp_path, rows, asked))
    whole = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "loss_backend": "plain"}
    plain = gradients(trainer(tmp_path, rows, asked, **whole))
    assert in_place.keys() == plain.keys() >= {"heads.lm_heads"}
    for name, gradient in plain.items():
        assert gradient.any()
        torch.testing.assert_close(in_place[name], gradient, atol=1e-6, rtol=0, msg=lambda text, of=name: of + text)
    precise = gradients(trainer(tmp_path, rows, asked, torch.float64))
    monkeypatch.setattr(MedusaTrainer, "adds_in_place", False)
    for name, gradient in gradients(trainer(tmp_path, rows, asked, torch.float64)).items():
        torch.testing.assert_close(precise[name], gradient, atol=1e-12, rtol=0)


def test_accumulation_holds_one_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = HEADS * ONE_BYTES
    assert most_at_once(blocks(trainer(tmp_path, 3).train), of_all) == 1
    monkeypatch.setattr(MedusaTrainer, "adds_in_place", False)
    assert most_at_once(blocks(trainer(tmp_path, 3).train), of_all) == 2, "the meter sees a second one"


def test_a_scaled_loss_scales_every_gradient(tmp_path: Path) -> None:
    """The factor of a float16 scaler is known in the backward only. Compiled graphs do not touch gradients, either."""
    run, scaled = trainer(tmp_path, 2), trainer(tmp_path, 2)
    scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain = gradients(run)
    for name, gradient in gradients(scaled).items():
        torch.testing.assert_close(gradient, 8 * plain[name])
    run.args.torch_compile = True
    assert not run.adds_in_place


class Sizes(TorchDispatchMode):
    """Notes the bytes of every tensor with a dimension of V that an operation returns; views count as the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.seen |= {tensor.untyped_storage().nbytes() for tensor in made if VOCAB in tensor.shape}
        return out


@pytest.mark.parametrize("bf16", [False, True])
def test_one_lm_head_takes_the_memory_of_one(tmp_path: Path, bf16: bool) -> None:
    run = trainer(tmp_path, 2, ONE, bf16=bf16)
    with Sizes() as sizes:
        run.train()
    assert max(sizes.seen) == ONE_BYTES, "nothing is as large as an LM head for each head"


def test_one_lm_head_has_one_gradient(tmp_path: Path) -> None:
    assert most_at_once(blocks(trainer(tmp_path, 3, ONE).train), ONE_BYTES) == 1


def test_an_evaluation_holds_no_gradient(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1)
    with torch.no_grad():
        assert most_at_once(blocks(lambda: run.compute_loss(run.trained, collated(run))), HEADS * ONE_BYTES) == 0
    assert run.heads.lm_heads is not None
    assert run.heads.lm_heads.grad is None


def collated(run: MedusaTrainer) -> dict[str, Tensor]:
    """The batch of the first row of a run's data."""
    return {name: tensor[None] for name, tensor in run.train_dataset[0].items()}
