"""medusa/heads/independent.py: new heads are the identity, training updates every weight, stacking changes nothing."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from medusa import MedusaConfig, MedusaHeads, RequestError
from medusa.checkpoints.published import to_published
from medusa.config import PrefixSizes
from medusa.heads.inputs import HeadInputs

K, H, V = 3, 8, 11
KINDS = [
    pytest.param(
        {"block": block, "expansion": expansion, "num_layers": layers, "lm_head": lm_head},
        id=f"{block}{expansion}-{layers}-{lm_head}",
    )
    for block, expansion in (("square", 1.0), ("mlp", 0.5), ("mlp", 2.0))
    for layers in (1, 2)
    for lm_head in ("own", "shared")
]


def fresh(**settings: Any) -> MedusaHeads:
    return MedusaHeads(MedusaConfig(hidden_size=H, vocab_size=V, num_heads=K, **settings))


def randomised(**settings: Any) -> MedusaHeads:
    heads = fresh(**settings)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.5)
    return heads


def slow_features(heads: MedusaHeads, hidden: Tensor) -> Tensor:
    """The paper's formula with nn.Linear, one head at a time, from the published [out, in] tensors."""
    tensors, config = to_published(heads.checkpoint()), heads.config
    outputs = []
    for head in range(config.num_heads):
        x = hidden
        for layer in range(config.num_layers):

            def linear(name: str, x: Tensor, at: str = f"{head}.{layer}") -> Tensor:
                return nn.functional.linear(x, tensors[f"{at}.{name}.weight"], tensors[f"{at}.{name}.bias"])

            if config.block == "square":
                x = x + nn.functional.silu(linear("linear", x))
            else:
                x = x + linear("down", nn.functional.silu(linear("up", x)))
        outputs.append(x)
    return torch.stack(outputs)


def test_mlp_weights_start_like_nn_linear() -> None:
    """`up` is uniform within 1 / sqrt(H), and its bias is zero; no entry is uninitialised memory."""
    hidden = 64
    block = MedusaHeads(MedusaConfig(hidden_size=hidden, vocab_size=V, num_heads=K, block="mlp")).blocks[0]
    assert block.up.abs().max() <= hidden**-0.5
    # Standard deviation of a uniform draw; 12288 draws estimate it to about 0.4 %.
    assert block.up.std().item() == pytest.approx(hidden**-0.5 / 3**0.5, rel=0.03)
    assert not any(part.any() for part in (block.up_bias, block.down, block.down_bias))


@pytest.mark.parametrize("block", ["square", "mlp"])
def test_new_own_lm_heads_give_the_backbones_logits(block: str) -> None:
    lm_head = nn.Linear(H, V, bias=False)
    heads = fresh(block=block, lm_head="own")
    heads.start_from(lm_head.weight)
    hidden = torch.randn(4, H)
    # Another matrix product sums in another order: a few float32 roundings (6e-8) of values around 1.
    torch.testing.assert_close(heads(HeadInputs(hidden)), lm_head(hidden).expand(K, -1, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_every_weight_is_updated_by_training(settings: dict, optimiser: type) -> None:
    """Three steps, since an MLP's `up` has no gradient while `down` is zero; every entry must change."""
    heads, lm_head = fresh(**settings), nn.Linear(H, V)
    heads.start_from(lm_head.weight)
    before = {name: parameter.detach().clone() for name, parameter in heads.named_parameters()}
    training = optimiser(heads.parameters(), lr=0.05)
    hidden, labels = torch.randn(64, H), torch.randint(0, V, (K, 64))
    for _ in range(3):
        logits = heads(HeadInputs(hidden), lm_head)
        training.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        training.step()
    for name, parameter in heads.named_parameters():
        moved = (parameter != before[name]).flatten(1).any(1)  # per head
        assert moved.all(), f"{name} of the heads {(~moved).nonzero()[:, 0].tolist()} never moved"


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("shape", [(H,), (5, H), (2, 3, H)])
def test_stacked_heads_equal_a_loop_over_linears(settings: dict, shape: tuple) -> None:
    heads, lm_head = randomised(**settings), nn.Linear(H, V, bias=False)
    hidden = torch.randn(shape)
    features = slow_features(heads, hidden)
    # Sums of 8 to 16 products of order 1 in another order: some ten roundings of 6e-8; a wrong index errs by order 1.
    torch.testing.assert_close(heads.features(HeadInputs(hidden)), features, rtol=1e-5, atol=1e-5)
    if heads.lm_heads is None:
        expected = lm_head(features)
    else:
        published = to_published(heads.checkpoint())
        expected = torch.stack([features[k] @ published[f"{k}.{heads.config.num_layers}.weight"].T for k in range(K)])
    assert expected.shape == (K, *shape[:-1], V)
    torch.testing.assert_close(heads(HeadInputs(hidden), lm_head), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("settings", KINDS)
def test_the_first_heads_give_the_same_output_without_the_others(settings: dict) -> None:
    heads, lm_head, hidden = randomised(**settings), nn.Linear(H, V), torch.randn(4, H)
    everything = heads(HeadInputs(hidden), lm_head)
    for count in (1, 2, K):
        some = heads(HeadInputs(hidden), lm_head, count)
        assert some.shape[0] == count
        torch.testing.assert_close(some, everything[:count], rtol=1e-5, atol=1e-5)


def test_shared_heads_need_the_lm_head() -> None:
    with pytest.raises(RequestError, match="lm_head"):
        fresh(lm_head="shared")(HeadInputs(torch.randn(1, H)))


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "oak"},
        {"block": "round"},
        {"lm_head": "none"},
        {"num_heads": 0},
        {"num_layers": -1},
        {"hidden_size": 0},
        {"hidden_size": True},
        {"hidden_size": "8"},
        {"vocab_size": 0},
        {"expansion": 0},
        {"expansion": float("nan")},
        {"expansion": math.inf},
        {"expansion": "4"},
    ],
)
def test_bad_settings_are_rejected_by_name(settings: dict) -> None:
    with pytest.raises(RequestError) as error:
        MedusaConfig(**({"hidden_size": H} | settings))
    assert f"heads.{next(iter(settings))}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changed", [{"heads": 0}, {"heads": True}, {"width": "64"}, {"width": 64.5}, {"eps": math.nan}, {"base": math.inf}]
)
def test_sizes_of_prefix_layers_are_checked(changed: dict[str, Any]) -> None:
    sizes = PrefixSizes(heads=2, key_value_heads=2, width=64, eps=1e-6, base=1e4, norm=True)
    MedusaConfig(hidden_size=H, vocab_size=V, prefix_layers=1, prefix=sizes)
    wrong = cast(PrefixSizes, {**sizes, **changed})  # as it may stand in a file
    with pytest.raises(
        RequestError, match=f"prefix has {next(iter(changed))} .*; it must be a (whole )?number above 0"
    ):
        MedusaConfig(hidden_size=H, vocab_size=V, prefix_layers=1, prefix=wrong)


def test_own_lm_heads_need_a_vocabulary() -> None:
    with pytest.raises(RequestError, match="vocab_size"):
        MedusaHeads(MedusaConfig(hidden_size=H, lm_head="own"))
