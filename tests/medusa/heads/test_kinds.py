"""medusa/heads: every kind computes its definition, survives saving and loading, and rejects wrong settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from medusa import MedusaHeads
from medusa.checkpoints.stored import CONFIG
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.inputs import HeadInputs
from medusa.heads.markov import MarkovHeads
from medusa.heads.sequential import SequentialHeads
from tests.helpers import RESIDUAL

H, V, K = 6, 11, 3


def fresh(kind: str, seed: int | None = None, **settings: Any) -> MedusaHeads:
    """New heads: with a seed all weights are random, without they have their values before training."""
    heads = MedusaHeads.from_config(
        MedusaConfig(**{"hidden_size": H, "vocab_size": V, "num_heads": K, "kind": kind} | settings)
    )
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return heads


def inputs(seed: int = 0) -> HeadInputs:
    generator = torch.Generator().manual_seed(seed)
    return HeadInputs(torch.randn(5, H, generator=generator), torch.randn(5, K, H, generator=generator))


@pytest.mark.parametrize("block", ["square", "mlp"])
@pytest.mark.parametrize("kind", RESIDUAL)
def test_fresh_heads_are_the_identity(kind: str, block: str) -> None:
    """Training starts from the backbone's guess."""
    features = fresh(kind, block=block, num_layers=2, lm_head="shared").features(inputs())
    assert torch.equal(features, inputs().hidden.expand(K, -1, -1))


@pytest.mark.parametrize("kind", RESIDUAL)
def test_products_in_bfloat16_do_not_round_the_hidden_state(kind: str) -> None:
    """Training with bf16 rounds what heads add to the hidden state, and fresh heads add nothing."""
    heads = fresh(kind, block="mlp", lm_head="shared")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(heads.features(inputs()), inputs().hidden.expand(K, -1, -1))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("block", ["square", "mlp"])
@pytest.mark.parametrize("kind", ["cascade", "hydra", "recurrent"])
def test_features_follow_the_formula_of_the_kind(kind: str, block: str, layers: int) -> None:
    """Each kind's formula is repeated here, one head at a time."""
    heads = fresh(kind, 1, block=block, num_layers=layers, expansion=2.0, lm_head="shared")
    assert isinstance(heads, SequentialHeads)
    hidden, following, _ = inputs()
    assert following is not None
    state, seen, expected = hidden, hidden, []
    for head in range(K):
        token = following[:, head] / following[:, head].pow(2).mean(-1, keepdim=True).sqrt()
        seen = torch.cat([seen, token], dim=-1)
        x, z = {
            "cascade": (state, state),
            "hydra": (hidden, seen),
            "recurrent": (state, torch.cat([state, token], dim=-1)),
        }[kind]
        for layer in heads.stacks[head].layers:
            weights = dict(layer.named_parameters())
            if block == "square":
                x = x + F.silu(z @ weights["linear.weight"].T + weights["linear.bias"])
            else:
                inner = F.silu(z @ weights["up.weight"].T + weights["up.bias"])
                x = x + inner @ weights["down.weight"].T + weights["down.bias"]
            z = x
        state = x
        expected.append(x)
    torch.testing.assert_close(heads.features(inputs()), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", ["square", "mlp"])
def test_markov_features_are_independent_features_and_a_gated_term_of_the_token_before(block: str) -> None:
    heads = fresh("markov", 1, block=block, num_layers=2, expansion=2.0, lm_head="shared", rank=4)
    weights, (hidden, following, _) = dict(heads.named_parameters()), inputs()
    assert following is not None
    independent = MedusaHeads.from_config(replace(heads.config, kind="medusa", rank=None))
    independent.load_state_dict({name: tensor for name, tensor in weights.items() if name.startswith("blocks.")})
    root, *tokens = (token / token.pow(2).mean(-1, keepdim=True).sqrt() for token in following.unbind(1))
    knows_root = [hidden + root @ weights["root"][head] for head in range(K)]
    expected = [independent.features(HeadInputs(x))[head] for head, x in enumerate(knows_root)]
    for head in range(1, K):
        gate = 1 / (1 + (-(hidden @ weights["gate"][head - 1] + weights["gate_bias"][head - 1])).exp())
        expected[head] += (gate * (tokens[head - 1] @ weights["token"][head - 1])) @ weights["out"][head - 1]
    torch.testing.assert_close(heads.features(inputs()), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_path_dropout_leaves_out_the_path_term_of_a_share_of_the_positions_in_training() -> None:
    heads, positions = fresh("markov", 1, lm_head="shared"), 2000
    assert isinstance(heads, MarkovHeads)
    heads.path_dropout = 0.4
    alike = HeadInputs(inputs().hidden[:1].expand(positions, -1), inputs().following[:1].expand(positions, -1, -1))
    whole = heads.eval().features(alike)
    without = heads.alone(alike.hidden, alike.following[:, 0], slice(None))
    torch.manual_seed(0)
    trained = heads.train().features(alike)
    assert torch.equal(trained[0], whole[0]), "the first head has no path term"
    trained, whole, without = trained[1:], whole[1:], without[1:]
    dropped = (trained == without).all(-1)
    assert torch.equal(trained, torch.where(dropped[..., None], without, whole))
    assert (dropped.float().mean(1) - 0.4).abs().max() < 5 * (0.24 / positions) ** 0.5
    assert len(dropped.unique(dim=0)) == K - 1, "the heads drop the same positions"


def apply_rope(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [D] with coordinates i and i + D / 2 rotated by an angle of position 10000^(-2 i / D) (Su et al. 2021)."""
    half = len(x) // 2
    plane = torch.complex(x[:half].double(), x[half:].double())
    plane = plane * torch.exp(1j * position * 10_000.0 ** (-torch.arange(half) / half))
    return torch.cat([plane.real, plane.imag]).to(x.dtype)


@torch.no_grad()
def eagle_by_hand(heads: Any, features: list[torch.Tensor], tokens: list[torch.Tensor], start: int) -> torch.Tensor:
    """The layer over a whole text of pairs (features[i], tokens[i]), [H] each -> its output at the last one [H].

    It uses no cache and no tree: every query attends to all pairs from `start`, the document's first position.
    """
    weights = dict(heads.named_parameters())
    count, size = heads.count, H // heads.count

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x / x.pow(2).mean().sqrt()

    pairs = [torch.cat([scaled(f), scaled(e)]) for f, e in zip(features[start:], tokens[start:], strict=True)]
    of_query, of_key, of_value = weights["pair.weight"].split(H)
    query, mixed = of_query @ pairs[-1], []
    for head in range(count):
        part = slice(head * size, (head + 1) * size)
        q = apply_rope(query[part], len(pairs) - 1)
        keys = [apply_rope((of_key @ pair)[part], at) for at, pair in enumerate(pairs)]
        values = [(of_value @ pair)[part] for pair in pairs]
        share = torch.stack([q @ key for key in keys]).div(size**0.5).softmax(0)
        mixed.append(sum(s * value for s, value in zip(share, values, strict=True)))
    x = features[-1] + weights["out.weight"] @ torch.cat(mixed)
    x_and_token = torch.cat([x, scaled(tokens[-1])])
    return x + (
        weights["stack.layers.0.down.weight"]
        @ F.silu(weights["stack.layers.0.up.weight"] @ x_and_token + weights["stack.layers.0.up.bias"])
        + weights["stack.layers.0.down.bias"]
    )


@pytest.mark.parametrize("window", [None, 3, 4])
def test_eagle_equals_one_layer_over_text_and_predicted_features(window: int | None) -> None:
    """Each step at each position of a row equals the layer applied to that path alone, or to its last pairs."""
    heads = fresh("eagle", 6, block="mlp", lm_head="shared", window=window)
    generator = torch.Generator().manual_seed(7)
    rows, length, vocab = 2, 7, 5
    hidden, table = (torch.randn(*shape, H, generator=generator) for shape in ((rows, length), (vocab,)))
    ids = torch.randint(vocab, (rows, length + K), generator=generator)
    documents = torch.tensor([[0] * length, [0, 0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([list(range(length)), [0, 1, 2, 0, 1, 2, 3]])
    place = torch.tensor([0, 2, 6, 7, 9, 10, 13])
    texts = (hidden, ids, lambda i: table[i], positions, documents)
    found, everywhere = heads.features(heads.inputs(*texts, place)), heads.features(heads.inputs(*texts))
    torch.testing.assert_close(everywhere.flatten(1, 2)[:, place], found)
    for column, (row, at) in enumerate((int(p) // length, int(p) % length) for p in place):
        start = 3 if row == 1 and at >= 3 else 0
        features, tokens = list(hidden[row, : at + 1]), list(table[ids[row, 1 : at + 2]])
        for step in range(K):
            out = eagle_by_hand(heads, features, tokens, max(start, len(features) - (window or len(features))))
            torch.testing.assert_close(found[step, column], out, rtol=1e-4, atol=1e-5)
            features.append(out)  # not the backbone's: training-time test
            tokens.append(table[ids[row, (at + step + 2) % (length + K)]])  # after the last step nobody looks


def test_eagle_without_a_text_attends_to_its_path_alone() -> None:
    heads, given = fresh("eagle", 6, block="mlp", lm_head="shared"), inputs()
    assert given.following is not None
    assert given.context_kv is None
    found = heads.features(given)
    for place, hidden in enumerate(given.hidden):
        features = [hidden]
        for step in range(K):
            out = eagle_by_hand(heads, features, list(given.following[place, : step + 1]), 0)
            torch.testing.assert_close(found[step, place], out, rtol=1e-4, atol=1e-5)
            features.append(out)


@pytest.mark.parametrize("kind", RESIDUAL)
def test_a_head_depends_only_on_earlier_tokens(kind: str) -> None:
    heads = fresh(kind, 2, lm_head="shared")
    features = heads.features(inputs())
    for changed in range(K):
        other = inputs()
        assert other.following is not None
        other.following[:, changed] += torch.linspace(-1, 2, H)
        differs = [not torch.equal(a, b) for a, b in zip(features, heads.features(other), strict=True)]
        reads = range(changed, changed + 1 if kind == "markov" and changed else K) if heads.follows_path else ()
        assert differs == [head in reads for head in range(K)]


@pytest.mark.parametrize("kind", ["hydra", "recurrent", "markov", "eagle"])
def test_sequential_heads_need_the_path(kind: str) -> None:
    with pytest.raises(RequestError, match=kind):
        fresh(kind).features(HeadInputs(inputs().hidden))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("kind", RESIDUAL)
def test_every_kind_survives_saving_and_loading(kind: str, lm_head: str, tmp_path: Path) -> None:
    heads = fresh(kind, 3, lm_head=lm_head, block="mlp", num_layers=2, expansion=1.5)
    heads.save_pretrained(tmp_path)
    again = MedusaHeads.from_pretrained(tmp_path)
    assert type(again) is type(heads)
    assert again.config == heads.config
    lm_head_module = torch.nn.Linear(H, V, bias=False)
    assert torch.equal(heads(inputs(), lm_head_module), again(inputs(), lm_head_module))


@pytest.mark.parametrize("kind", RESIDUAL)
def test_prefix_attention_works_with_every_kind(kind: str, tmp_path: Path) -> None:
    """Prefix layers start as the identity, attend only to earlier positions of the document, and survive saving."""
    hidden, positions = torch.randn(2, 7, H, generator=torch.Generator().manual_seed(0)), torch.arange(7).expand(2, -1)
    documents = torch.tensor([[0] * 7, [0, 0, 0, 1, 1, 1, 1]])
    assert torch.equal(fresh(kind, prefix_layers=2).read(hidden, positions), hidden)
    heads = fresh(kind, 5, prefix_layers=2)
    before = heads.read(hidden, positions, documents)
    for changed in range(7):
        other = hidden.clone()
        other[:, changed] += 1
        differs = (heads.read(other, positions, documents) != before).any(-1)
        assert differs[0].tolist() == [at >= changed for at in range(7)]
        assert differs[1].tolist() == [at >= changed and (at >= 3) == (changed >= 3) for at in range(7)]
    heads.save_pretrained(tmp_path)
    again = MedusaHeads.from_pretrained(tmp_path)
    assert torch.equal(again.read(hidden, positions, documents), before)


def test_configs_that_name_no_shape_or_kind_are_rejected(tmp_path: Path) -> None:
    fresh("hydra", 4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    for settings, match in ((config | {"kind": "oak"}, "oak"), ({"kind": "hydra"}, "has no hidden_size")):
        (tmp_path / CONFIG).write_text(json.dumps(settings))
        with pytest.raises(RequestError, match=match):
            MedusaHeads.from_pretrained(tmp_path)


def test_new_gated_eagle_heads_give_the_backbones_logits_rescaled() -> None:
    features = fresh("eagle", block="gated", lm_head="shared").features(inputs())
    direction = F.normalize(inputs().hidden, dim=-1).expand(K, -1, -1)
    torch.testing.assert_close(F.normalize(features, dim=-1), direction)


LAYER: dict[str, Any] = {
    "hidden_size": 4,
    "width": 5,
    "layers": 2,
    "heads": 4,
    "key_value_heads": 2,
    "head_size": 2,
    "eps": 1e-5,
    "rope": {"rope_type": "default", "rope_theta": 100.0},
    "variants": ["norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "qk_norm", "attention_bias"],
}
WIDE: dict[str, Any] = {"block": "gated", "feature_layers": [0, 2], "embeddings": "own", "lm_head": "one"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "recurrent", "block": "gated"}, "gated"),
        ({"block": "gated", "num_layers": 2}, "gated needs heads.layers 1"),
        ({"kind": "medusa", "feature_layers": [1]}, "feature_layers belongs to kind eagle or dflash, not medusa"),
        ({"block": "gated", "feature_layers": [1], "prefix_layers": 1}, "without heads.prefix_layers"),
        ({"block": "gated", "feature_layers": []}, r"feature_layers is \[\]; give numbers"),
        ({"block": "gated", "feature_layers": [True]}, "give numbers"),
        ({"block": "gated", "feature_layers": "last"}, "or usual"),
        ({"block": "eagle1", "kind": "medusa"}, "eagle1 belongs to kind eagle"),
        ({"block": "mlp", "embeddings": "own"}, "embeddings needs kind eagle with block gated, not mlp"),
        ({"block": "mlp", "lm_head": "one"}, "lm_head one needs heads.kind eagle"),
        (WIDE | {"layer": LAYER | {"heads": 3}}, "no multiple of its key_value_heads"),
        (WIDE | {"layer": LAYER | {"eps": 0}}, "layer has eps 0; it must be a number above 0"),
        (WIDE | {"layer": LAYER | {"width": 1.5}}, "layer has width 1.5; it must be a whole number"),
        (WIDE | {"layer": LAYER | {"variants": ["fc_nrom"]}}, "fc_nrom.*did you mean fc_norm"),
        (WIDE | {"layer": {"heads": 2}}, "its keys must be eps, head_size"),
        (
            WIDE | {"layer": LAYER | {"rope": {"rope_type": "dynamic"}}},
            "rope_type is 'dynamic'; heads can have default",
        ),
        (WIDE | {"layer": LAYER, "lm_head": "shared"}, "another hidden size than the backbone's need feature_layers"),
    ],
)
def test_wrong_settings_of_eagles_published_layers_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        fresh(**({"kind": "eagle"} | settings))


def test_confidences_that_published_drafters_do_not_have_are_refused() -> None:
    with pytest.raises(RequestError, match=r"needs heads.edges=markov, not pairwise; change the edges"):
        fresh("dflash", edges="pairwise", confidence=True)
    with pytest.raises(RequestError, match=r"heads.confidence is 1; it must be true or false"):
        fresh("dflash", confidence=1)


def test_config_files_without_the_newer_keys_are_read_as_before(tmp_path: Path) -> None:
    heads = fresh("eagle", 3, block="gated", lm_head="shared")
    heads.save_pretrained(tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    for key in ("feature_layers", "layer", "embeddings"):
        del content[key]
    (tmp_path / CONFIG).write_text(json.dumps(content))
    assert MedusaHeads.from_pretrained(tmp_path).config == heads.config
