"""The loss in chunks against the obvious one, and the labels that the backbone itself chooses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.backbone import Backbone
from medusa.heads import MedusaHeads
from tests.helpers import HIDDEN, VOCAB, random_heads, random_ids, tiny_model
from train import loss as loss_module
from train.labels import IGNORE
from train.loss import HeadLosses, backbone_choices, head_losses, head_losses_plain, head_weights, weighted

HEADS, ROWS = 3, 21
KINDS = [(block, lm_head) for block in ("square", "mlp") for lm_head in ("own", "shared")]
# Both versions add the same float32 numbers in another order: at most ROWS x VOCAB = 1281 terms of order 1, whose
# rounding errors (6e-8 each) add up like a random walk to some 2e-6. A wrong row or a missing chunk shows as 1e-2.
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture
def backbone() -> Backbone:
    """Frozen, as it is in training."""
    return Backbone(tiny_model("llama").requires_grad_(False))


def some_labels() -> Tensor:
    """[HEADS, ROWS], a third of them IGNORE."""
    labels = torch.randint(0, VOCAB, (HEADS, ROWS))
    return labels.masked_fill(torch.rand(HEADS, ROWS) < 1 / 3, IGNORE)


def outcome(losses: Any, heads: MedusaHeads, *args: Any) -> tuple[HeadLosses, dict[str, Tensor]]:
    """The figures, and every parameter's gradient of their weighted sum."""
    heads.zero_grad()
    figures = losses(heads, *args)
    weighted(figures.loss, head_weights(HEADS, 0.8)).backward()
    return figures, {name: p.grad.clone() for name, p in heads.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [1, 4, ROWS, 256])
@pytest.mark.parametrize(("block", "lm_head"), KINDS)
def test_chunks_change_neither_figures_nor_gradients(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, block: str, lm_head: str, chunk: int
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", chunk)
    heads = random_heads(backbone.model, HEADS, block=block, lm_head=lm_head, num_layers=2)
    args = (torch.randn(ROWS, HIDDEN), some_labels(), backbone.head)
    ours, our_gradients = outcome(head_losses, heads, *args)
    plain, plain_gradients = outcome(head_losses_plain, heads, *args)
    torch.testing.assert_close(ours.loss, plain.loss, **CLOSE)
    assert ours.correct.tolist() == plain.correct.tolist()
    assert ours.total.tolist() == plain.total.tolist()
    assert our_gradients.keys() == dict(heads.named_parameters()).keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(
            our_gradients[name], gradient, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_a_head_without_labels_costs_nothing_and_is_not_nan(backbone: Backbone, lm_head: str) -> None:
    heads = random_heads(backbone.model, HEADS, lm_head=lm_head)
    labels = some_labels()
    labels[1] = IGNORE
    for losses in (head_losses, head_losses_plain):
        figures, gradients = outcome(losses, heads, torch.randn(ROWS, HIDDEN), labels, backbone.head)
        assert figures.loss[1] == 0
        assert figures.total[1] == 0
        assert torch.isfinite(figures.loss).all()
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
        assert not any(gradient[1].any() for gradient in gradients.values()), "and teaches nothing"


@pytest.mark.parametrize("rows", [0, 5])
def test_a_batch_without_labels_gives_zero(backbone: Backbone, rows: int) -> None:
    heads = random_heads(backbone.model, HEADS, lm_head="own")
    labels = torch.full((HEADS, rows), IGNORE)
    figures, gradients = outcome(head_losses, heads, torch.randn(rows, HIDDEN), labels, backbone.head)
    assert figures.loss.tolist() == [0.0] * HEADS
    assert not any(gradient.any() for gradient in gradients.values())


def test_the_loss_is_the_mean_in_nats_over_the_labels(backbone: Backbone) -> None:
    """Own LM heads of zeros find every token equally likely."""
    heads = random_heads(backbone.model, 1)
    torch.nn.init.zeros_(heads.lm_heads)
    labels = torch.tensor([[7, IGNORE, 0, 0, IGNORE]])
    figures = head_losses(heads, torch.randn(5, HIDDEN), labels, None)
    assert figures.loss.item() == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert (figures.correct.item(), figures.total.item()) == (2, 3), "the best of equals is id 0"


def test_no_more_than_a_chunk_of_logits_is_held(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, linear = [], F.linear

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.append(len(x))
        return linear(x, weight, bias)

    monkeypatch.setattr(loss_module, "CHUNK", 4)
    monkeypatch.setattr(F, "linear", spy)
    heads = random_heads(backbone.model, 1, lm_head="shared")
    head_losses(heads, torch.randn(10, HIDDEN), torch.zeros(1, 10, dtype=torch.long), backbone.head)
    assert rows == [4, 4, 2]


def test_the_backbones_lm_head_gets_no_gradient(backbone: Backbone) -> None:
    heads = random_heads(backbone.model, HEADS, lm_head="shared")
    outcome(head_losses, heads, torch.randn(ROWS, HIDDEN), some_labels(), backbone.head)
    assert backbone.head.weight.grad is None


def test_an_lm_head_with_a_bias_is_applied_with_it(backbone: Backbone) -> None:
    lm_head = torch.nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    heads = random_heads(backbone.model, HEADS, lm_head="shared")
    args = (torch.randn(ROWS, HIDDEN), some_labels(), lm_head)
    torch.testing.assert_close(head_losses(heads, *args).loss, head_losses_plain(heads, *args).loss, **CLOSE)


def test_far_heads_count_less() -> None:
    weights = head_weights(4, 0.8)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.8, 0.64, 0.512]))
    assert weighted(torch.tensor([1.0, 2.0, 3.0, 4.0]), weights).item() == pytest.approx(1 + 1.6 + 1.92 + 2.048)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_backbones_choice_is_its_argmax_after_each_prefix(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", 4)
    model = tiny_model(family)
    backbone = Backbone(model)
    ids = torch.tensor([random_ids(9, seed=1), random_ids(9, seed=2)])
    with torch.no_grad():
        chosen = backbone_choices(backbone, backbone.hidden_states(ids, use_cache=False), ids)
        logits = model(input_ids=ids, use_cache=False).logits
    assert chosen[:, 0].equal(ids[:, 0]), "nothing stands before the first token"
    assert chosen[:, 1:].equal(logits.argmax(-1)[:, :-1])
