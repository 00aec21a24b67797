"""Loaded checkpoints of the original Hydra compute the original's logits (its forward is repeated here)."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from decode import generate
from medusa.backbone import Backbone
from medusa.checkpoints.stored import CONFIG
from medusa.checkpoints.stored import HYDRA_WEIGHTS as WEIGHTS
from medusa.errors import RequestError
from medusa.fingerprint import differs
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from tests.helpers import left_padded, plain, random_ids, tiny_model
from train.config import HeadsConfig
from train.heads import startable

HEADS, LAYERS = 3, 3
EPS, THETA = 1e-3, 500.0


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with unusual norms and rotary positions, so that defaults would be noticed."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    return tiny_model("llama", rms_norm_eps=EPS, rope_parameters=rope, intermediate_size=40)


def checkpoint(model: Any, prefix: bool = False, dropout: bool = True, layers: int = LAYERS) -> dict[str, Tensor]:
    """A file as the original saves it: layers 2 to n are one block, and the backbone's embedding is included."""
    generator = torch.Generator().manual_seed(0)
    sizes, step = model.config, 2 if dropout else 1
    hidden, vocab = sizes.hidden_size, sizes.vocab_size

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.5 * shape[-1] ** -0.5

    tensors = {"input_embed_fn.weight": model.get_input_embeddings().weight.detach().clone()}
    for head in range(HEADS):
        wide, first = (head + 2) * hidden, f"hydra_mlp.{head}.{step - 1}"
        for part in ("linear", "res_connection"):
            tensors |= {f"{first}.{part}.weight": draw(hidden, wide), f"{first}.{part}.bias": draw(hidden)}
        weight, bias = draw(hidden, hidden), draw(hidden)
        for layer in range(1, layers):
            name = f"hydra_mlp.{head}.{step * layer + step - 1}.linear"
            tensors |= {f"{name}.weight": weight, f"{name}.bias": bias}
        name = f"hydra_lm_head.{head}" + (".1" if dropout else "")
        tensors |= {f"{name}.weight": draw(vocab, hidden), f"{name}.bias": draw(vocab)}
    if prefix:
        inner, of_keys = sizes.intermediate_size, sizes.num_key_value_heads * hidden // sizes.num_attention_heads
        layer = "prefix_embeding_layer.layers.0"
        for part, rows in (("q", hidden), ("k", of_keys), ("v", of_keys), ("o", hidden)):
            tensors[f"{layer}.self_attn.{part}_proj.weight"] = 3 * draw(rows, hidden)
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            tensors[f"{layer}.mlp.{part}_proj.weight"] = 3 * draw(*shape)
        norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "prefix_embeding_layer.norm")
        tensors |= {f"{name}.weight": 1 + draw(hidden) for name in norms}
        tensors["prefix_embeding_layer.embed_tokens.weight"] = draw(vocab, hidden)  # never used
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], base: str | None = None, **config: Any) -> Path:
    torch.save(tensors, folder / WEIGHTS)
    published = {
        "hydra_num_heads": HEADS,
        "hydra_num_layers": LAYERS,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": base,
    }
    (folder / CONFIG).write_text(json.dumps(published | config))
    return folder


def read(model: Any, folder: Path, tensors: dict[str, Tensor], prefix: bool) -> MedusaHeads:
    """The heads of a file, whose prefix layer has the sizes of a layer of `model`."""
    model.config.save_pretrained(folder / "base")
    arch = "prefix-mlp" if prefix else "mlp"
    return MedusaHeads.from_pretrained(write(folder, tensors, str(folder / "base"), hydra_head_arch=arch))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def prefix_forward(tensors: dict[str, Tensor], hidden: Tensor, sizes: Any) -> Tensor:
    """hidden [T, H] through the prefix layer and its norm: a Llama layer, one query at a time."""
    weights = {name.removeprefix("prefix_embeding_layer."): tensor for name, tensor in tensors.items()}
    layer = "layers.0"
    heads, size = sizes.num_attention_heads, sizes.hidden_size // sizes.num_attention_heads
    group = heads // sizes.num_key_value_heads
    x = rms(hidden, weights[f"{layer}.input_layernorm.weight"])
    q, k, v = (x @ weights[f"{layer}.self_attn.{part}_proj.weight"].T for part in "qkv")

    def apply_rope(vector: Tensor, position: int) -> Tensor:
        angles = position * THETA ** (-torch.arange(0, size, 2) / size)
        left, right = vector[: size // 2], vector[size // 2 :]
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()])

    out = torch.zeros_like(hidden)
    for head in range(heads):
        here, there = (slice(n * size, (n + 1) * size) for n in (head, head // group))
        for at in range(len(hidden)):
            query = apply_rope(q[at, here], at)
            keys = torch.stack([apply_rope(k[other, there], other) for other in range(at + 1)])
            out[at, here] = (keys @ query / size**0.5).softmax(0) @ v[: at + 1, there]
    hidden = hidden + out @ weights[f"{layer}.self_attn.o_proj.weight"].T
    x = rms(hidden, weights[f"{layer}.post_attention_layernorm.weight"])
    gate, up, down = (weights[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    hidden = hidden + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return rms(hidden, weights["norm.weight"])


def head_forward(tensors: dict[str, Tensor], head: int, z: Tensor) -> Tensor:
    """Head `head` on z [(head + 2) H] -> logits [V]."""
    names = sorted({int(n.split(".")[2]) for n in tensors if n.startswith(f"hydra_mlp.{head}.")})
    for number, place in enumerate(names):
        block = {n.split(".", 3)[3]: t for n, t in tensors.items() if n.startswith(f"hydra_mlp.{head}.{place}.")}
        kept = z if number else block["res_connection.weight"] @ z + block["res_connection.bias"]
        made = block["linear.weight"] @ z + block["linear.bias"]
        z = kept + made * made.sigmoid()
    between = ".1" if f"hydra_lm_head.{head}.1.weight" in tensors else ""
    return tensors[f"hydra_lm_head.{head}{between}.weight"] @ z + tensors[f"hydra_lm_head.{head}{between}.bias"]


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_logits_equal_the_originals(model: Any, tmp_path: Path, prefix: bool, dropout: bool, layers: int) -> None:
    """At every position of a text, every head gives the original's logits."""
    tensors = checkpoint(model, prefix, dropout, layers)
    heads = read(model, tmp_path, tensors, prefix)
    assert (heads.config.kind, heads.config.num_heads, heads.config.num_layers) == ("hydra", HEADS, layers)
    backbone, ids = Backbone(model), torch.tensor(random_ids(10, seed=1))
    hidden, embedding = backbone.hidden_states(ids[None], use_cache=False)[0], tensors["input_embed_fn.weight"]
    seen = heads.read(hidden[None], torch.arange(10)[None])[0]
    reads = prefix_forward(tensors, hidden, model.config) if prefix else hidden
    torch.testing.assert_close(seen, reads, rtol=1e-3, atol=1e-4)
    following = torch.stack([embedding[ids[at + 1 : at + 1 + HEADS]] for at in range(10 - HEADS)])
    found = heads(HeadInputs(seen[: 10 - HEADS], following))
    for at in range(10 - HEADS):
        for head in range(HEADS):
            z = torch.cat([reads[at], *(embedding[ids[at + 1 + n]] for n in range(head + 1))])
            torch.testing.assert_close(found[head, at], head_forward(tensors, head, z), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("prefix", [False, True])
def test_text_equals_plain_decoding_and_the_backbone_is_unchanged(model: Any, tmp_path: Path, prefix: bool) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = checkpoint(model, prefix)
    tensors["input_embed_fn.weight"] += 1  # what the original would write over the backbone's
    heads = read(model, tmp_path, tensors, prefix)
    prompts = [random_ids(n, seed=n) for n in (5, 9)]
    for tree in ("topk:3,2,2", "dynamic:9"):
        out = generate(model, heads, **left_padded(prompts), tree=tree, max_new_tokens=6)
        for row, prompt in enumerate(prompts):
            assert out[row, 9:].tolist() == plain(model, prompt, max_new_tokens=6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_heads_survive_saving_in_our_format(model: Any, tmp_path: Path, prefix: bool) -> None:
    heads = read(model, tmp_path, checkpoint(model, prefix), prefix)
    heads.save_pretrained(tmp_path / "ours")
    back = MedusaHeads.from_pretrained(tmp_path / "ours")
    assert back.config == heads.config
    assert back.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(tensor, heads.state_dict()[name]) for name, tensor in back.state_dict().items())


def test_the_copied_embedding_identifies_the_backbone(model: Any, tmp_path: Path) -> None:
    heads = MedusaHeads.from_pretrained(write(tmp_path, checkpoint(model)))
    assert not differs(model, heads.config.backbone)
    assert not differs(deepcopy(model).bfloat16(), heads.config.backbone), "in another dtype too"
    assert differs(tiny_model("llama", seed=5), heads.config.backbone)
    without = {name: tensor for name, tensor in checkpoint(model).items() if "embed" not in name}
    assert not differs(
        tiny_model("llama", seed=5), MedusaHeads.from_pretrained(write(tmp_path, without)).config.backbone
    )


def test_training_hydra_heads_is_rejected(model: Any, tmp_path: Path) -> None:
    write(tmp_path, checkpoint(model))
    with pytest.raises(RequestError, match="blocks of type hydra, which can decode but not be trained"):
        startable(str(tmp_path), HeadsConfig(num=HEADS, kind="hydra"), 64, 96)


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def added(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("hydra_mlp.1.1.res_connection.bias"), "misses the tensor hydra_mlp.1.1.res_connection.bias"),
        (without("hydra_mlp.2.5.linear.weight"), "misses the tensor hydra_mlp.2.5.linear.weight"),
        (without("hydra_lm_head.2.1.bias"), "misses the tensor hydra_lm_head.2.1.bias"),
        (added("hydra_mlp.1.3.linear.weight", 3, 3), r"hydra_mlp.1.3.linear.weight has the shape \[3, 3\], not"),
        (added("hydra_lm_head.1.1.weight", 7, 3), r"hydra_lm_head.1.1.weight has the shape \[7, 3\], not"),
        (added("hydra_lm_head.3.1.weight", 7, 3), "holds the tensor hydra_lm_head.3.1.weight, which belongs to no"),
        (added("hydra_lm_head.1.1.weight_scale", 1, 1), "its weights are quantised; use the unquantised ones"),
        (added("eagle.weight", 2), "holds the tensor eagle.weight, which belongs to no head"),
        (added("hydra_mlp.999999.1.linear.weight", 2, 2), "names head 999999 but holds"),
        (added("prefix_embeding_layer.norm.weight", 2), "holds the tensor prefix_embeding_layer.norm.weight"),
        (lambda tensors: tensors.clear() or tensors.update(a=torch.zeros(1)), "misses the first head's first block"),
    ],
)
def test_incomplete_files_are_rejected_with_the_tensor_name(
    model: Any, tmp_path: Path, change: Any, message: str
) -> None:
    tensors = checkpoint(model)
    change(tensors)
    with pytest.raises(RequestError, match=message) as error:
        MedusaHeads.from_pretrained(write(tmp_path, tensors))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch is 'eagle-attn'; only mlp and prefix-mlp"),
        ({"hidden_state_offset": 1}, "hidden_state_offset is 1; only 0, the last hidden state, can be loaded"),
        ({"hydra_head_arch": "prefix-mlp"}, "are in the backbone's config; name a folder or Hub id"),
        (
            {"hydra_head_arch": "prefix-mlp", "base_model_name_or_path": "/nowhere"},
            r"config \(no backbone at /nowhere.*; name a folder or Hub id that has it as base_model_name_or_path",
        ),
    ],
)
def test_unsupported_configs_are_rejected_with_the_reason(
    model: Any, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        MedusaHeads.from_pretrained(write(tmp_path, checkpoint(model), **config))


def test_heads_that_see_no_tokens_are_refused(model: Any, tmp_path: Path) -> None:
    hidden = model.config.hidden_size
    tensors = {"hydra_mlp.0.0.linear.weight": torch.zeros(hidden, hidden), "hydra_mlp.0.0.linear.bias": torch.zeros(9)}
    with pytest.raises(RequestError, match=r"its heads do not read tokens \(grounded_heads: false\)"):
        MedusaHeads.from_pretrained(write(tmp_path, tensors, grounded_heads=False))
