"""Published layers of EAGLE: each project's layout, written here from its documented tensors, gives the right logits.

The layouts follow the sources of the EAGLE repository (`cnets.py`, `cnets1.py`), SpecForge and SGLang
(`llama3_eagle.py`, `llama_eagle3.py`), AngelSlim, speculators (`eagle3/core.py`) and vLLM. `forward` writes the layer
down once more: it reads the whole text again in every step, without a cache, and shares no code with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from decode import generate
from medusa import MedusaConfig, MedusaHeads
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.vocabulary import lm_head_for
from tests.helpers import HIDDEN, VOCAB, plain, random_ids, shared_model

LAYERS, STEPS, N = 9, 3, 40
H, EPS = HIDDEN, 1e-5
Tensors = dict[str, Tensor]


@dataclass
class Layout:
    """How one project stores a layer: its config.json, its tensors, and what its own forward does with them."""

    config: dict[str, Any]
    read: list[int] | None  # the backbone's layers, counted as transformers' `hidden_states`; None: the LM head's input
    size: int = H  # the layer's hidden size
    heads: int = 4
    groups: int = 2
    head_size: int = 8
    width: int = 20
    prefixes: tuple[str, ...] = ("midlayer.",)  # of the layers
    later_norm: str = "input_layernorm"
    vocabulary: bool = True  # a reduced one
    own: tuple[str, ...] = ("lm_head",)  # what the file has besides the layers: `embed`, `lm_head`
    rules: frozenset[str] = frozenset()  # variants of the forward
    angle: Callable[[Tensor], Tensor] = field(default=lambda f: 10_000.0**-f)  # frequencies from 2 i / head size

    def tensors(self, seed: int = 0) -> Tensors:
        """Random tensors under the project's names."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        size, first = self.size, "eagle1" in self.rules
        out: Tensors = {}
        for index, prefix in enumerate(self.prefixes):
            inputs = 2 * size if not (first or index) else size
            for part, count in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
                out[f"{prefix}self_attn.{part}_proj.weight"] = random(count * self.head_size, inputs) * 2
                if "attention_bias" in self.rules:
                    out[f"{prefix}self_attn.{part}_proj.bias"] = random(count * self.head_size)
            for part in "qk" if "qk_norm" in self.rules else "":
                out[f"{prefix}self_attn.{part}_norm.weight"] = 1 + random(self.head_size)
            out[f"{prefix}self_attn.o_proj.weight"] = random(size, self.heads * self.head_size)
            for part in ("gate", "up"):
                out[f"{prefix}mlp.{part}_proj.weight"] = random(self.width, size)
            out[f"{prefix}mlp.down_proj.weight"] = random(size, self.width)
            out[f"{prefix}post_attention_layernorm.weight"] = 1 + random(size)
            if index:
                out[f"{prefix}{self.later_norm}.weight"] = 1 + random(size)
            elif not first:
                out[f"{prefix}hidden_norm.weight"] = 1 + random(size)
                out[f"{prefix}input_layernorm.weight"] = 1 + random(size)
        if first:
            out["fc.weight"], out["fc.bias"] = random(size, 2 * size), random(size)
        else:
            out["norm.weight"] = 1 + random(size)
        if self.read is not None and not first:
            out["fc.weight"] = random(size, len(self.read) * H)
        if "norm_before_fc" in self.rules:
            out["input_norm.weight"] = 1 + random(3 * H)
        if "fc_norm" in self.rules:
            out |= {f"fc_norm.{index}.weight": 1 + random(H) for index in range(3)}
        if "embed" in self.own:
            out["embed_tokens.weight"] = random(VOCAB, size)
        if "lm_head" in self.own:
            out["lm_head.weight"] = random(N if self.vocabulary else VOCAB, size)
        if self.vocabulary:
            ids = torch.randperm(VOCAB, generator=generator)[:N].sort().values
            out["d2t"] = ids - torch.arange(N)
            out["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        return out


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def attention(layout: Layout, tensors: Tensors, prefix: str, x: Tensor) -> Tensor:
    """Causal attention over the whole text x [T, inputs]; each query head is computed alone."""
    states = {}
    for part in "qkv":
        name = f"{prefix}self_attn.{part}_proj"
        states[part] = x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(()))
    positions, size = torch.arange(len(x)), layout.head_size
    angle = positions[:, None] * layout.angle(torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(y: Tensor) -> Tensor:
        turned = torch.complex(y[:, : size // 2], y[:, size // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    out = []
    for head in range(layout.heads):
        group = head // (layout.heads // layout.groups)
        q = states["q"][:, head * size : (head + 1) * size]
        k, v = (states[part][:, group * size : (group + 1) * size] for part in "kv")
        if "qk_norm" in layout.rules:
            q, k = (norm(y, tensors[f"{prefix}self_attn.{part}_norm.weight"]) for y, part in ((q, "q"), (k, "k")))
        scores = rotated(q) @ rotated(k).T / size**0.5
        out.append(scores.masked_fill(positions[:, None] < positions, -torch.inf).softmax(-1) @ v)
    return torch.cat(out, dim=-1) @ tensors[f"{prefix}self_attn.o_proj.weight"].T


def forward(layout: Layout, tensors: Tensors, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Features [T, H] and the embeddings [T, H] of the tokens after them -> input of the LM head, next feature."""
    x = features
    for index, prefix in enumerate(layout.prefixes):
        residual = x
        if "eagle1" in layout.rules:
            residual = entering = torch.cat([embedded, x], dim=-1) @ tensors["fc.weight"].T + tensors["fc.bias"]
        elif index:
            entering = norm(x, tensors[f"{prefix}{layout.later_norm}.weight"])
        else:
            seen = norm(x, tensors[f"{prefix}hidden_norm.weight"])
            entering = torch.cat([norm(embedded, tensors[f"{prefix}input_layernorm.weight"]), seen], dim=-1)
            residual = seen if "norm_before_residual" in layout.rules else x
        x = residual + attention(layout, tensors, prefix, entering)
        inner = norm(x, tensors[f"{prefix}post_attention_layernorm.weight"])
        gate, up, down = (tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
    if "eagle1" in layout.rules:
        return x, x
    read = norm(x, tensors["norm.weight"])
    return read, read if "norm_output" in layout.rules else x


def joined(layout: Layout, tensors: Tensors, model: Any, ids: Tensor) -> Tensor:
    """The features [T, H] of a text, from transformers' own hidden states of the layers."""
    if layout.read is None:
        seen: list[Tensor] = []
        hook = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(input_ids=ids, use_cache=False)
        hook.remove()
        return seen[0][0]
    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    parts = [states[layer][0] for layer in layout.read]
    if "norm_before_fc" in layout.rules:
        parts = list(norm(torch.cat(parts, dim=-1), tensors["input_norm.weight"]).split(H, dim=-1))
    if "fc_norm" in layout.rules:
        parts = [norm(part, tensors[f"fc_norm.{index}.weight"]) for index, part in enumerate(parts)]
    return torch.cat(parts, dim=-1) @ tensors["fc.weight"].T


LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "draft_vocab_size": N,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
SPECULATORS = {  # the layer is saved as a difference from the defaults of transformers' LlamaConfig
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": N,
    "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
    "target_hidden_size": None,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/verifier"},
    },
}


def nested(model_type: str, **changes: Any) -> dict[str, Any]:
    wanted = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    layer = {key: LLAMA[key] for key in (*wanted, "num_hidden_layers", "rms_norm_eps")}
    return {"model_type": model_type} | layer | changes


def llama3_angle(fraction: Tensor) -> Tensor:
    """Llama 3.1's frequencies: long waves are stretched by 8, short ones kept, and those between are blended."""
    plain_ones = 5e5**-fraction
    waves = 2 * torch.pi / plain_ones
    blend = ((64 / waves - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    return (1 - blend) * plain_ones / 8 + blend * plain_ones


LAYOUTS = {
    "EAGLE-3's authors": Layout(LLAMA | {"rope_theta": 500.0}, [2, 4, 6], angle=lambda f: 500.0**-f),
    "EAGLE-3's authors, another size": Layout(
        LLAMA | {"hidden_size": 24, "head_dim": 8, "target_hidden_size": H},
        [2, 4, 6],
        size=24,
        own=("embed", "lm_head"),
    ),
    "SpecForge": Layout(
        LLAMA
        | {"rope_theta": 5e5, "rope_scaling": LLAMA3}
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}},
        [1, 4, 7],
        angle=llama3_angle,
    ),
    "SGLang": Layout(
        LLAMA
        | {"num_hidden_layers": 2, "fc_norm": True, "norm_output": True, "rope_scaling": {"mrope_section": [2, 1, 1]}},
        [2, 4, 6],
        prefixes=("layers.0.", "layers.1."),
        later_norm="hidden_norm",
        rules=frozenset({"fc_norm", "norm_output"}),
    ),
    "SGLang, scaled axes": Layout(
        LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        [2, 4, 6],
        angle=llama3_angle,
    ),
    "AngelSlim": Layout(
        LLAMA | {"architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 12, "rope_theta": 1000000},
        [2, 4, 6],
        head_size=12,
        angle=lambda f: 1e6**-f,
    ),
    "speculators": Layout(
        SPECULATORS
        | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        | {"transformer_layer_config": nested("llama", num_hidden_layers=2)},
        [1, 5, 8],
        prefixes=("layers.0.", "layers.1."),
        own=("embed", "lm_head"),
        rules=frozenset({"norm_before_residual", "norm_before_fc", "norm_output"}),
    ),
    "speculators, Qwen3": Layout(
        SPECULATORS | {"norm_before_residual": False, "transformer_layer_config": nested("qwen3", head_dim=8)},
        [1, 5, 8],
        prefixes=("layers.0.",),
        own=("embed", "lm_head"),
        rules=frozenset({"qk_norm"}),
    ),
    "vLLM, all tokens and one state": Layout(
        LLAMA | {"draft_vocab_size": VOCAB, "eagle_config": {"use_aux_hidden_state": False}},
        None,
        prefixes=("layers.0.",),
        vocabulary=False,
    ),
    "EAGLE-1 and EAGLE-2": Layout(
        {key: LLAMA[key] for key in LLAMA if key != "draft_vocab_size"} | {"bias": True, "qkv_bias": True},
        None,
        prefixes=("layers.0.",),
        vocabulary=False,
        own=("embed",),
        rules=frozenset({"eagle1", "attention_bias"}),
    ),
}


def backbone_model() -> Any:
    return shared_model(num_hidden_layers=LAYERS)


def write(folder: Path, layout: Layout, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(layout.config))
    if "eagle1" in layout.rules or "midlayer." in layout.prefixes:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_each_layout_gives_its_projects_logits(name: str, tmp_path: Path) -> None:
    """At the end of a text, and for two further drafted tokens; a wrong rule is off by the size of the logits, 1."""
    layout, model = LAYOUTS[name], backbone_model()
    tensors = layout.tensors()
    heads = MedusaHeads.from_pretrained(write(tmp_path, layout, tensors))
    backbone = Backbone(model, heads.config.feature_layers)
    assert backbone.feature_layers == (None if layout.read is None else tuple(layout.read))
    ids = torch.tensor([random_ids(12 + STEPS, seed=3)])
    hidden = backbone.hidden_states(ids[:, :11], use_cache=False)
    inputs = heads.inputs(hidden, ids, backbone.embed, num_heads=STEPS)
    found = heads.logits(heads.features(inputs, STEPS), backbone.lm_head)[:, 0, -1]
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    features = joined(layout, tensors, model, ids[:, :11])
    for step in range(STEPS):
        read, after = forward(layout, tensors, features, table[ids[0, 1 : 12 + step]])
        expected = read[-1] @ tensors.get("lm_head.weight", model.lm_head.weight).T
        torch.testing.assert_close(found[step], expected, rtol=1e-4, atol=1e-4)
        features = torch.cat([features, after[-1:]])
    if layout.vocabulary:
        assert heads.vocabulary is not None
        assert torch.equal(heads.vocabulary, tensors["d2t"] + torch.arange(N))


IN_OURS = ("EAGLE-3's authors", "speculators, Qwen3", "EAGLE-1 and EAGLE-2")  # the others add rules of the same forms


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in IN_OURS)) for name in LAYOUTS]
)
def test_texts_with_each_layout_saved_in_our_format_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    heads = MedusaHeads.from_pretrained(write(tmp_path / "theirs", LAYOUTS[name], LAYOUTS[name].tensors()))
    heads.save_pretrained(tmp_path / "ours")
    again = MedusaHeads.from_pretrained(tmp_path / "ours")
    assert again.config == heads.config
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in heads.state_dict().items())
    model, prompt = backbone_model(), random_ids(6)
    tree = ("topk:3,2,1", "dynamic:9")[list(LAYOUTS).index(name) % 2]
    out = generate(model, again, torch.tensor([prompt]), tree=tree, max_new_tokens=4, do_sample=False)
    assert out[0, 6:].tolist() == plain(model, prompt, max_new_tokens=4)


AUTHORS = LAYOUTS["EAGLE-3's authors"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu, not silu"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "layer_types is sliding_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"num_attention_heads": 3}, "describes no layer"),
        ({"num_hidden_layers": 2}, "its config.json names 2 layers, and there are tensors of 1"),
        ({"num_hidden_layers": 10**12}, "names 1000000000000 layers"),
        ({"eagle_config": [1]}, "its eagle_config is [1]; it must be an object"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"]}, "is ['2']; it must be a list of whole numbers"),
        ({"target_hidden_size": "32"}, "its target_hidden_size is '32'; it must be a whole number"),
        ({"rope_scaling": 8}, "its rope_scaling is 8; it must be an object"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta is 'x'; it must be a number"),
        ({"hidden_size": 0}, "its hidden_size is 0; it must be from 1 to"),
        ({"intermediate_size": 10**400}, "00; it must be from 1 to"),
        ({"num_key_value_heads": 4}, "k_proj.weight has the shape"),
        ({"norm_before_fc": True}, "misses the tensor input_norm.weight"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "holds the tensor fc.weight, which belongs to no head"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"joins 96 numbers of [1, 2] layers of 32"),
        ({"target_hidden_size": 48}, "joins 96 numbers of unnamed layers of 48"),
        ({"vocab_size": 30}, "vocabulary"),
    ],
)
def test_layers_of_other_forms_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write(tmp_path, AUTHORS, AUTHORS.tensors())
    (folder / "config.json").write_text(json.dumps(AUTHORS.config | change))
    with pytest.raises(RequestError) as refusal:
        MedusaHeads.from_pretrained(folder)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "name", ["fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "mask_hidden"]
)
def test_tensors_that_are_missing_or_too_many(tmp_path: Path, name: str) -> None:
    tensors = AUTHORS.tensors()
    if name == "mask_hidden":
        broken = tensors | {name: torch.zeros(1, 96)}
    elif name == "lm_head.weight":
        broken = tensors | {name: torch.zeros(N + 1, H)}
    else:
        broken = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(RequestError, match=r"misses the tensor|has the shape|drafts in parallel"):
        MedusaHeads.from_pretrained(write(tmp_path, AUTHORS, broken))


def test_quantised_layers_are_refused(tmp_path: Path) -> None:
    tensors = AUTHORS.tensors()
    codes = {"midlayer.mlp.up_proj.weight": tensors["midlayer.mlp.up_proj.weight"].to(torch.float8_e4m3fn)}
    for number, added in enumerate((codes, {"midlayer.mlp.up_proj.weight_scale": torch.ones(1)})):
        with pytest.raises(RequestError, match="its weights are quantised; use the unquantised ones"):
            MedusaHeads.from_pretrained(write(tmp_path / str(number), AUTHORS, tensors | added))


# Exports, by the same rules


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    backbone_model().save_pretrained(folder)
    return folder


def trained(**settings: Any) -> MedusaHeads:
    """Random heads of the form that this package trains for servers."""
    form = {"kind": "eagle", "block": "gated", "expansion": 1.5, "lm_head": "shared", "feature_layers": [2, 4, 6]}
    heads = MedusaHeads.from_config(MedusaConfig(H, VOCAB, STEPS, **(form | settings)))
    generator = torch.Generator().manual_seed(5)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    if heads.vocabulary is not None:
        heads.vocabulary = torch.randperm(VOCAB, generator=generator)[: len(heads.vocabulary)].sort().values
    return heads.eval()


def read_as(to: str, folder: Path) -> tuple[Layout, Tensors]:
    """What consumer `to` makes of an export, by the keys that it reads."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layer = config["transformer_layer_config"] if to == "speculators" else config
    assert config["norm_before_residual"] is False
    if to == "sglang":  # the output of layer i
        read = [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    elif to == "llama.cpp":
        read = config["eagle_aux_hidden_state_layer_ids"]
        assert "draft_vocab_size" in config
        assert config["num_hidden_layers"] == 1
    else:
        read = config["eagle_aux_hidden_state_layer_ids"]
    layout = Layout(
        config,
        read,
        size=layer["hidden_size"],
        heads=layer["num_attention_heads"],
        groups=layer["num_key_value_heads"],
        head_size=layer["head_dim"],
        prefixes=tuple(f"layers.{index}." for index in range(layer["num_hidden_layers"])),
        later_norm="hidden_norm" if to == "sglang" else "input_layernorm",
        angle=lambda f: layer["rope_parameters"]["rope_theta"] ** -f,
    )
    return layout, tensors


@pytest.mark.parametrize(
    ("to", "vocabulary", "lm_head"),
    [
        *(("vllm", None, "shared"), ("llama.cpp", N, "one"), ("sglang", None, "one"), ("speculators", N, "shared")),
        pytest.param("vllm", N, "one", marks=pytest.mark.full),
        pytest.param("llama.cpp", None, "shared", marks=pytest.mark.full),
        pytest.param("sglang", N, "shared", marks=pytest.mark.full),
        pytest.param("speculators", None, "one", marks=pytest.mark.full),
    ],
)
@torch.no_grad()
def test_exports_give_the_heads_logits_by_each_consumers_rules(
    to: str, vocabulary: int | None, lm_head: str, exported: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.medusa.checkpoints.test_eagle_layouts.EPS", 1e-6)
    model, heads = backbone_model(), trained(vocabulary=vocabulary, lm_head=lm_head)
    folder = exported(heads, to)
    layout, tensors = read_as(to, folder)
    wrapped = Backbone(model, heads.config.feature_layers)
    ids = torch.tensor([random_ids(12 + STEPS, seed=4)])
    hidden = wrapped.hidden_states(ids[:, :11], use_cache=False)
    inputs = heads.inputs(hidden, ids, wrapped.embed, num_heads=STEPS)
    found = heads.logits(heads.features(inputs, STEPS), lm_head_for(heads, wrapped))[:, 0, -1]
    features = joined(layout, tensors, model, ids[:, :11])
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    for step in range(STEPS):
        read, after = forward(layout, tensors, features, table[ids[0, 1 : 12 + step]])
        expected = read[-1] @ tensors.get("lm_head.weight", model.lm_head.weight).T
        torch.testing.assert_close(found[step], expected, rtol=1e-4, atol=1e-4)
        features = torch.cat([features, after[-1:]])
    again = MedusaHeads.from_pretrained(folder)
    assert again.config.feature_layers == [2, 4, 6]
    assert again.config.num_heads == STEPS
    assert (layout.config["draft_vocab_size"] or VOCAB) == (vocabulary or VOCAB)
    if vocabulary is not None:
        assert torch.equal(tensors["d2t"] + torch.arange(N), heads.vocabulary)
        assert tensors["t2d"].nonzero().flatten().tolist() == heads.vocabulary.tolist()
    if to in ("speculators", "llama.cpp"):
        assert "lm_head.weight" in tensors, "these consumers do not take the backbone's"
    assert ("embed_tokens.weight" in tensors) == (to == "speculators"), "its own loader does not take the backbone's"
    assert ("model_type" in layout.config) == (to != "speculators"), "with one, vLLM sees another model"


@pytest.mark.parametrize("name", ["EAGLE-3's authors, another size", "SGLang", "SpecForge"])
def test_published_layers_are_written_for_sglang_and_read_again(name: str, exported: Callable, tmp_path: Path) -> None:
    heads = MedusaHeads.from_pretrained(write(tmp_path / "theirs", LAYOUTS[name], LAYOUTS[name].tensors()))
    again = MedusaHeads.from_pretrained(exported(heads, "sglang"))
    layers = again.config.feature_layers
    assert layers == LAYOUTS[name].read
    assert (
        replace(again.config, feature_layers=heads.config.feature_layers, base_model_name_or_path=None) == heads.config
    )
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in heads.state_dict().items())


@pytest.mark.parametrize(
    ("to", "settings", "words"),
    [
        ("speculators", {"feature_layers": None}, "speculators needs the hidden states of three layers"),
        ("llama.cpp", {"feature_layers": None}, "heads.feature_layers=usual, or export to vllm"),
        ("llama.cpp", {"feature_layers": [1, 4]}, r"reads three layers of the backbone, not \[1, 4\]"),
        ("vllm", {"feature_layers": [1, 4, 9]}, r"read the layers \[1, 4, 9\], and .* has 9"),
        ("vllm", {"lm_head": "own"}, "heads.lm_head=shared"),
        ("sglang", "speculators", "sglang does not read layers with norm_before_fc; vllm or speculators does"),
        ("vllm", "speculators, Qwen3", "vllm does not read layers with qk_norm; no format does"),
        ("llama.cpp", "EAGLE-1 and EAGLE-2", "only as the layer of EAGLE-3"),
    ],
)
def test_layers_that_a_consumer_does_not_read_are_refused(
    to: str, settings: Any, words: str, not_exported: Callable, tmp_path: Path
) -> None:
    if isinstance(settings, str):
        heads = MedusaHeads.from_pretrained(write(tmp_path / "theirs", LAYOUTS[settings], LAYOUTS[settings].tensors()))
    else:
        heads = trained(**settings)
    assert re.search(words, not_exported(heads, to))
