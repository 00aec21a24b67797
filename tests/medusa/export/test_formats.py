"""medusa/export: published files are read, and exports have exactly the names, shapes and keys that servers load."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from medusa import MedusaConfig, MedusaHeads, RequestError
from medusa.__main__ import main
from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.folder import find_folder
from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, LEGACY_WEIGHTS, WEIGHTS, Stored, save_tensors
from medusa.export import MARK
from medusa.export.base import read_embeddings, read_lm_head
from medusa.export.belonging import require_own_backbone
from medusa.files import read_json
from medusa.fingerprint import fingerprint
from medusa.heads.inputs import HeadInputs
from medusa.loading import LoadOptions
from tests.helpers import HIDDEN, VOCAB, random_heads, tiny_model

H, V, K = HIDDEN, VOCAB, 3
MODEL = "model.safetensors"
ORIGINAL = ("original-v1", "tgi", "vllm")  # of independent heads
EAGLE = {"kind": "eagle", "block": "gated", "expansion": 1.5, "lm_head": "shared"}


def some_heads(**settings: Any) -> MedusaHeads:
    """Heads with different random numbers in every tensor."""
    heads = MedusaHeads.from_config(MedusaConfig(**{"hidden_size": H, "vocab_size": V, "num_heads": K} | settings))
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    if heads.vocabulary is not None:
        heads.vocabulary = torch.randperm(V, generator=generator)[: len(heads.vocabulary)]
    return heads.eval()


def gated_heads(**settings: Any) -> MedusaHeads:
    return some_heads(**EAGLE | settings)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk, with an LM head that is not its embedding."""
    folder = tmp_path_factory.mktemp("backbone")
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(folder)
    return folder


def refusal(folder: Path) -> str:
    """The error message, one line, for heads that cannot be loaded."""
    with pytest.raises(RequestError) as error:
        MedusaHeads.from_pretrained(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def write(folder: Path, tensors: dict[str, Tensor], config: Any, name: str = MODEL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def same(heads: MedusaHeads, again: MedusaHeads) -> bool:
    """Whether heads are of one kind and compute the same logits from the same inputs."""
    shape, generator = (8, heads.config.num_heads, heads.config.hidden_size), torch.Generator().manual_seed(0)
    hidden, following = (
        torch.randn(*shape, generator=generator).to(heads.dtype)[:, 0],
        torch.randn(*shape).to(heads.dtype),
    )
    rows = torch.randn(64, shape[-1], generator=generator).to(heads.dtype)
    first, second = (h(HeadInputs(hidden, following), lambda x: x @ rows.T) for h in (heads, again))
    return heads.checkpoint().is_same(again.checkpoint()) and torch.equal(first, second)


# What is written

PUBLISHED = {
    f"{head}.{name}": shape
    for head in range(K)
    for name, shape in (("0.linear.weight", [H, H]), ("0.linear.bias", [H]), ("1.weight", [V, H]))
}


@pytest.mark.parametrize(("to", "lm_head"), [("original-v1", "own"), ("tgi", "own"), ("tgi", "shared")])
def test_published_names_shapes_and_config(exported: Callable, backbone: Path, to: str, lm_head: str) -> None:
    heads, name = some_heads(lm_head=lm_head), LEGACY_WEIGHTS if to == "original-v1" else WEIGHTS
    folder = exported(heads, to)
    assert sorted(path.name for path in folder.iterdir()) == [MARK, CONFIG, name]
    tensors = load_file(folder / name) if to == "tgi" else torch.load(folder / name, weights_only=True)
    wanted = {key: shape for key, shape in PUBLISHED.items() if lm_head == "own" or ".linear." in key}
    assert shapes(tensors) == wanted
    # `architectures` would make TGI start without any draft, a `model_type` with another model.
    config = {"medusa_num_heads": K, "medusa_num_layers": 1, "base_model_name_or_path": str(backbone)}
    assert read_json(folder / CONFIG) == config | ({"version": "2"} if lm_head == "shared" else {})
    # A view would be saved with all heads' weights behind it.
    assert (folder / name).stat().st_size < 1.5 * sum(t.numel() * 4 for t in tensors.values()) + 9000
    assert same(MedusaHeads.from_pretrained(folder), heads)


def test_vllm_names_shapes_and_config(exported: Callable, backbone: Path) -> None:
    heads = some_heads(num_layers=2)
    folder = exported(heads, "vllm")
    assert sorted(path.name for path in folder.iterdir()) == [MARK, CONFIG, MODEL]
    expected: dict[str, list[int]] = {f"lm_heads.{head}.weight": [V, H] for head in range(K)}
    for head in range(K):
        for layer in range(2):
            expected |= {f"blocks.{head}.layers.{layer}.weight": [H, H], f"blocks.{head}.layers.{layer}.bias": [H]}
    assert shapes(load_file(folder / MODEL)) == expected
    config = read_json(folder / CONFIG)
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "truncated_vocab_size": V,
        "num_heads": K,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "torch_dtype": "float32",
        "base_model_name_or_path": str(backbone),
    }
    # Its config class renames whatever has these two in it, so that a second one would win.
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert same(MedusaHeads.from_pretrained(folder), heads)


GATED = {
    "layers.0.hidden_norm.weight": [H],
    "layers.0.input_layernorm.weight": [H],
    "layers.0.post_attention_layernorm.weight": [H],
    "layers.0.self_attn.q_proj.weight": [H, 2 * H],
    "layers.0.self_attn.k_proj.weight": [H, 2 * H],
    "layers.0.self_attn.v_proj.weight": [H, 2 * H],
    "layers.0.self_attn.o_proj.weight": [H, H],
    "layers.0.mlp.gate_proj.weight": [H * 3 // 2, H],
    "layers.0.mlp.up_proj.weight": [H * 3 // 2, H],
    "layers.0.mlp.down_proj.weight": [H, H * 3 // 2],
    "norm.weight": [H],
}


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_eagle3_names_shapes_and_config(exported: Callable, backbone: Path, to: str) -> None:
    heads = gated_heads()
    folder = exported(heads, to)
    assert sorted(path.name for path in folder.iterdir()) == [MARK, CONFIG, MODEL]
    assert shapes(load_file(folder / MODEL)) == GATED
    config = read_json(folder / CONFIG)
    assert config["max_position_embeddings"] == read_json(backbone / CONFIG)["max_position_embeddings"]
    assert {key: config[key] for key in config if key != "max_position_embeddings"} == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": H * 3 // 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": H,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "vocab_size": V,
        "draft_vocab_size": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "eagle_config": {"use_aux_hidden_state": False},
        "torch_dtype": "float32",
        "medusa_num_heads": K,
        "base_model_name_or_path": str(backbone),
    }
    again = MedusaHeads.from_pretrained(folder)
    assert set(again.state_dict()) == set(heads.state_dict())
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in heads.state_dict().items())


# What others' loaders make of it, by the rules read from them


def published_rules(tensors: dict[str, Tensor], layers: int, hidden: Tensor) -> Tensor:
    """An nn.Sequential of residual blocks and a Linear for each head: FasterDecoding, TGI, LoRAX, TensorRT-LLM."""
    out = []
    for head in range(K):
        x = hidden
        for layer in range(layers):
            x = x + F.silu(
                F.linear(x, tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"])
            )
        out.append(F.linear(x, tensors[f"{head}.{layers}.weight"]))
    return torch.stack(out)


def vllm_rules(folder: Path, hidden: Tensor) -> Tensor:
    """vLLM 0.32's handling of names, biases and LM heads (`models/medusa.py`, `configs/medusa.py`)."""
    config = read_json(folder / CONFIG)
    for key in list(config):
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    assert config["architectures"] == ["MedusaModel"]
    assert config["truncated_vocab_size"] == config["vocab_size"]
    heads, layers = config["num_heads"], config["num_hidden_layers"]
    shared = config.get("original_lm_head", False)
    wanted = {"lm_head.weight"} if shared else {f"lm_heads.{head}.weight" for head in range(heads)}
    parts = ("weight", "bias") if config.get("medusa_fc_bias", False) else ("weight",)
    wanted |= {f"blocks.{h}.layers.{n}.{part}" for h in range(heads) for n in range(layers) for part in parts}
    tensors = load_file(folder / MODEL)
    assert set(tensors) == wanted, "what it does not know it passes over, what it misses stays random"
    out = []
    for head in range(heads):
        x = hidden
        for layer in range(layers):
            name = f"blocks.{head}.layers.{layer}."
            x = x + F.silu(F.linear(x, tensors[name + "weight"], tensors.get(name + "bias")))
        out.append(F.linear(x, tensors["lm_head.weight" if shared else f"lm_heads.{head}.weight"]))
    return torch.stack(out)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("layers", [1, 2])
def test_exports_give_the_same_logits_by_each_servers_rules(
    exported: Callable, backbone: Path, lm_head: str, layers: int
) -> None:
    heads = some_heads(lm_head=lm_head, num_layers=layers)
    hidden = torch.randn(4, H)
    weight = load_file(backbone / MODEL)["lm_head.weight"]
    expected = heads(HeadInputs(hidden), lambda x: F.linear(x, weight)).detach()
    found = {"vllm": vllm_rules(exported(heads, "vllm"), hidden)}
    for to in ("original-v1", "tgi"):
        if to == "original-v1" and layers == 2:
            continue  # its own rules hold one block
        folder = exported(heads, to)
        path = folder / (LEGACY_WEIGHTS if to == "original-v1" else WEIGHTS)
        tensors = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
        if to == "tgi" and read_json(folder / CONFIG).get("version") == "2":
            assert layers == 1
            tensors |= {f"{head}.1.weight": weight for head in range(K)}  # it borrows the backbone's
        found[to] = published_rules(tensors, layers, hidden)
    for to, logits in found.items():
        # The same few hundred products in another order.
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3, msg=lambda text, to=to: f"{to}: {text}")


# Round trips


@pytest.mark.parametrize("to", ORIGINAL)
def test_reading_an_export_in_bfloat16_restores_the_heads_bit_for_bit(exported: Callable, to: str) -> None:
    heads = some_heads().to(torch.bfloat16)
    assert MedusaHeads.from_pretrained(exported(heads, to)).checkpoint().is_same(heads.checkpoint())


def test_export_to_another_dtype_only_rounds(exported: Callable) -> None:
    heads = some_heads()
    folder = exported(heads, "vllm", "--dtype", "float16")
    assert read_json(folder / CONFIG)["torch_dtype"] == "float16"
    assert torch.equal(
        load_file(folder / MODEL)["lm_heads.1.weight"], to_published(heads.checkpoint())["1.1.weight"].half()
    )


# What is read


def inside_a_model(prefix: str, heads: MedusaHeads, backbone: Path) -> dict[str, Tensor]:
    return load_file(backbone / MODEL) | {
        f"{prefix}{name}": tensor for name, tensor in to_published(heads.checkpoint()).items()
    }


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded", "sharded bin"])
def test_heads_are_read_out_of_whole_models(
    tmp_path: Path, backbone: Path, prefix: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files of FasterDecoding 1.0, MLC and modelopt, no tensor of the backbone is read."""
    heads = some_heads(num_layers=2)
    tensors = inside_a_model(prefix, heads, backbone)
    config = read_json(backbone / CONFIG) | {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "_name_or_path": "vicuna-7b",
    }
    shards = {"1": {}, "2": {}}
    for number, (name, tensor) in enumerate(tensors.items()):
        shards["2" if "sharded" in form and number % 2 else "1"][name] = tensor.contiguous().clone()
    suffix = "bin" if "bin" in form else "safetensors"
    stem = "pytorch_model" if suffix == "bin" else "model"
    for part, held in shards.items():
        if held:
            name = f"{stem}.{suffix}" if "sharded" not in form else f"{stem}-0000{part}-of-00002.{suffix}"
            torch.save(held, tmp_path / name) if suffix == "bin" else save_file(held, tmp_path / name)
    if "sharded" in form:
        places = {n: f"{stem}-0000{part}-of-00002.{suffix}" for part, held in shards.items() for n in held}
        (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / CONFIG).write_text(json.dumps(config))
    read: list[str] = []
    original = Stored.__getitem__
    monkeypatch.setattr(Stored, "__getitem__", lambda self, name: (read.append(name), original(self, name))[1])
    again = MedusaHeads.from_pretrained(tmp_path)
    assert read
    assert all(name.startswith(prefix) for name in read)
    assert (again.config.num_heads, again.config.num_layers) == (K, 2), "counted from the tensors"
    assert again.config.base_model_name_or_path == str(tmp_path)
    assert same(again, heads)


def test_other_files_of_a_trainer_are_no_weights(tmp_path: Path, backbone: Path) -> None:
    heads = some_heads()
    tensors = {name: tensor.clone() for name, tensor in inside_a_model("medusa_head.", heads, backbone).items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin"):
        torch.save(Path("no tensors"), tmp_path / name)
    assert same(MedusaHeads.from_pretrained(tmp_path), heads)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"medusa_head.0.0.linear.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / f"{MODEL}.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": 3}, {"weight_map": {"0.0.linear.weight": 3}}])
def test_an_invalid_shard_index_is_rejected(tmp_path: Path, content: Any) -> None:
    (tmp_path / f"{MODEL}.index.json").write_text(json.dumps(content))
    assert "has no weight_map of tensors and files" in refusal(tmp_path)


@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_names_no_file_outside_its_folder(tmp_path: Path, absolute: bool) -> None:
    """The file exists and holds all tensors, so that nothing but the check of its name refuses it."""
    tensors = to_published(some_heads().checkpoint())
    write(tmp_path, tensors, {})
    place = str(tmp_path / MODEL) if absolute else f"../{MODEL}"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"{MODEL}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, place)}))
    assert "which is not a file in the same folder" in refusal(folder)


def renamed(heads: MedusaHeads, form: str) -> dict[str, Tensor]:
    """Tensors by the names of vLLM and of TensorRT-LLM's converted checkpoints, repeated here."""
    out = {}
    layers = heads.config.num_layers
    for name, tensor in to_published(heads.checkpoint()).items():
        head, layer, *part = name.split(".")
        if int(layer) == layers and part == ["weight"]:
            new = {"vllm": f"lm_heads.{head}.weight", "tensorrt": f"medusa_heads.{head}.lm_head.weight"}[form]
        else:
            new = {
                "vllm": f"blocks.{head}.layers.{layer}.{part[-1]}",
                "tensorrt": f"medusa_heads.{head}.medusa_layers.{layer}.linear.{part[-1]}",
            }[form]
        out[new] = tensor
    return out


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_names_are_read(tmp_path: Path, prefix: str) -> None:
    heads = some_heads(num_layers=2)
    tensors = {prefix + name: tensor for name, tensor in renamed(heads, "vllm").items()}
    config = {"model_type": "medusa", "num_heads": 9, "num_hidden_layers": 7, "vocab_size": V, "medusa_fc_bias": True}
    assert same(MedusaHeads.from_pretrained(write(tmp_path, tensors, config)), heads)


def test_vllm_heads_without_biases_load_without_biases(tmp_path: Path) -> None:
    heads = some_heads()
    tensors = {name: tensor for name, tensor in renamed(heads, "vllm").items() if not name.endswith("bias")}
    for name, tensor in heads.state_dict().items():
        if name.endswith("bias"):
            tensor.zero_()
    config = {"model_type": "medusa", "medusa_fc_bias": False}
    assert same(MedusaHeads.from_pretrained(write(tmp_path, tensors, config)), heads)
    message = refusal(write(tmp_path, tensors, config | {"medusa_fc_bias": True}))
    assert "misses the tensor blocks.0.layers.0.bias" in message


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_lm_head_for_all_vllm_heads_is_read(tmp_path: Path, name: str) -> None:
    heads = some_heads()
    assert heads.lm_heads is not None
    heads.lm_heads.data[1:] = heads.lm_heads.data[0]
    tensors = {key: tensor for key, tensor in renamed(heads, "vllm").items() if not key.startswith("lm_heads")}
    tensors[name] = heads.lm_heads[0].T
    config = {"model_type": "medusa", "original_lm_head": True, "medusa_fc_bias": True}
    assert same(MedusaHeads.from_pretrained(write(tmp_path, tensors, config)), heads)


@pytest.mark.parametrize("rows", ["all", "some"])
def test_vllm_heads_with_a_draft_vocabulary(tmp_path: Path, rows: str) -> None:
    """`token_map` holds the tokens themselves; LM heads of all tokens are cut to those rows when they are loaded."""
    heads = some_heads()
    words = torch.randperm(V)[:33]
    tensors = renamed(heads, "vllm") | {"token_map": words.to(torch.int32)}
    if rows == "some":
        tensors |= {name: tensor[words] for name, tensor in tensors.items() if name.startswith("lm_heads")}
    config = {"model_type": "medusa", "vocab_size": V, "truncated_vocab_size": 33, "medusa_fc_bias": True}
    again = MedusaHeads.from_pretrained(write(tmp_path, tensors, config))
    assert (again.config.vocabulary, again.config.vocab_size) == (33, V)
    assert torch.equal(again.vocabulary, words)
    assert torch.equal(again.lm_heads[2].T, to_published(heads.checkpoint())["2.1.weight"][words])
    below = torch.cat([words[:-1], torch.tensor([-V - 1])])
    for wrong in (words.float(), torch.cat([words[:-1], words[:1]]), words + V, below, words[:0], words[0]):
        assert "token" in refusal(write(tmp_path, tensors | {"token_map": wrong}, config))


def test_tensorrt_llm_checkpoints_are_read(tmp_path: Path, backbone: Path) -> None:
    heads = some_heads(num_layers=2)
    tensors = renamed(heads, "tensorrt")
    around = {"transformer.vocab_embedding.weight": torch.zeros(V, H), "lm_head.weight": torch.zeros(V, H)}
    config = {"architecture": "MedusaForCausalLM", "num_medusa_heads": 1, "kind of": "anything"}
    assert same(MedusaHeads.from_pretrained(write(tmp_path, tensors | around, config, "rank0.safetensors")), heads)
    write(tmp_path, tensors | around, config, "rank1.safetensors")
    assert "several GPUs" in refusal(tmp_path)


@pytest.mark.parametrize("form", ["vllm", "tensorrt", "inside"])
def test_missing_wrong_or_extra_tensors_are_named_as_in_the_file(tmp_path: Path, backbone: Path, form: str) -> None:
    heads = some_heads()
    whole = inside_a_model("medusa_head.", heads, backbone) if form == "inside" else renamed(heads, form)
    config = {"model_type": "medusa", "medusa_fc_bias": True} if form == "vllm" else {}
    block, lm_head, odd = {
        "vllm": ("blocks.1.layers.0.bias", "lm_heads.2.weight", "blocks.0.layers.0.gate"),
        "tensorrt": (
            "medusa_heads.1.medusa_layers.0.linear.bias",
            "medusa_heads.2.lm_head.weight",
            "medusa_heads.0.medusa_layers.0.gate",
        ),
        "inside": ("medusa_head.1.0.linear.bias", "medusa_head.2.1.weight", "medusa_head.0.0.gate"),
    }[form]
    assert same(MedusaHeads.from_pretrained(write(tmp_path, whole, config)), heads)
    for name in (block, lm_head):
        message = refusal(write(tmp_path, {key: t for key, t in whole.items() if key != name}, config))
        assert f"misses the tensor {name};" in message
        message = refusal(write(tmp_path, whole | {name: torch.zeros(7)}, config))
        assert f"{name} has the shape [7]" in message or (name == lm_head and "[7]" in message)
    assert f"holds the tensor {odd};" in refusal(write(tmp_path, whole | {odd: torch.zeros(3)}, config))


def test_weights_that_are_not_plain_are_refused_with_the_reason(tmp_path: Path) -> None:
    tensors = {f"medusa_heads.{name}": tensor for name, tensor in to_published(some_heads().checkpoint()).items()}
    scaled = tensors | {"medusa_heads.0.0.linear.weight_scale": torch.ones(())}
    assert "quantised" in refusal(write(tmp_path / "quantised", scaled, {}))
    config = {"model_type": "medusa", "medusa_fc_bias": True, "logit_scale": 0.5}
    assert "logit_scale" in refusal(write(tmp_path / "scaled", renamed(some_heads(), "vllm"), config))


def test_a_backbone_without_heads_is_rejected(backbone: Path) -> None:
    assert "no heads in" in refusal(backbone)


# The Hub


@pytest.mark.parametrize(
    ("form", "fetched"),
    [
        ("heads", {CONFIG, WEIGHTS}),
        ("model", {CONFIG, f"{MODEL}.index.json", "model-00002-of-00002.safetensors"}),
        ("vllm", {CONFIG, MODEL}),
    ],
)
def test_only_files_with_heads_are_fetched_from_the_hub(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch, form: str, fetched: set[str]
) -> None:
    heads, repo, cache = some_heads(), tmp_path / "repo", tmp_path / "cache"
    if form == "model":
        first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
        inside = {f"medusa_head.{name}": tensor for name, tensor in to_published(heads.checkpoint()).items()}
        write(repo, load_file(backbone / MODEL), {}, first)
        write(repo, inside, {}, second)
        places = dict.fromkeys(load_file(backbone / MODEL), first) | dict.fromkeys(inside, second)
        (repo / f"{MODEL}.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        of_vllm = form == "vllm"
        tensors = renamed(heads, "vllm") if of_vllm else to_published(heads.checkpoint())
        write(repo, tensors, {"model_type": "medusa"} if of_vllm else {}, MODEL if of_vllm else WEIGHTS)
    cache.mkdir()

    def snapshot(repo_id: str, *, allow_patterns: list[str], **where: Any) -> str:
        for path in repo.iterdir():
            if any(
                re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), path.name) for pattern in allow_patterns
            ):
                (cache / path.name).write_bytes(path.read_bytes())
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    assert find_folder("org/heads") == cache
    assert {path.name for path in cache.iterdir()} == fetched
    again = MedusaHeads.from_pretrained("org/heads")
    assert same(again, heads)
    # Of the model itself only a part is there: who wants it as the backbone must ask the Hub.
    of_hub = "org/heads" if form == "model" else None
    assert again.config.base_model_name_or_path == of_hub
    assert main(["info", "org/heads", "--quiet", "--json", "info.json"]) == 0
    assert read_json(Path("info.json"))["backbone"] == (of_hub or "not recorded")
    named = [] if of_hub else ["--backbone", "org/model"]
    assert main(["export", "--heads", "org/heads", "--to", "original-v1", "--output", "out", *named]) == 0
    assert read_json(Path("out") / CONFIG)["base_model_name_or_path"] == (of_hub or "org/model")


# Refusals, and the command


NO_MEDUSA = "has no Medusa heads; train kind eagle with heads.kind=eagle heads.block=gated"
DEEP = {"block": "mlp", "expansion": 2.0}


@pytest.mark.parametrize(
    ("to", "settings", "said"),
    [
        ("original-v1", DEEP, "heads.block=square"),
        ("original-v1", {"kind": "hydra"}, "heads.kind=medusa"),
        ("original-v1", {"kind": "cascade"}, "heads.kind=medusa"),
        ("original-v1", {"prefix_layers": 1}, "heads.prefix_layers=0"),
        ("original-v1", {"vocabulary": 32}, "heads.vocabulary=0"),
        ("original-v1", {"num_layers": 2}, "heads.layers=1"),
        *(
            ("vllm", settings, "heads.kind=eagle heads.block=gated")
            for settings in (DEEP, {"kind": "hydra"}, {"kind": "cascade"}, {"prefix_layers": 1}, {"vocabulary": 32})
        ),
        ("sglang", {}, NO_MEDUSA),
        ("speculators", {"kind": "cascade"}, NO_MEDUSA),
        ("llama.cpp", {"kind": "markov"} | DEEP, NO_MEDUSA),
        *(("z-lab", settings, "heads.kind=dflash") for settings in ({}, EAGLE, {"kind": "cascade"})),
        *(
            (to, EAGLE | settings, said)
            for to in ("vllm", "sglang")
            for settings, said in (
                ({"kind": "recurrent", "block": "square"}, "heads.kind=eagle"),
                ({"block": "mlp"}, "heads.block=gated"),
                ({"lm_head": "own"}, "heads.lm_head=shared"),
                ({"prefix_layers": 1}, "heads.prefix_layers=0"),
                ({"window": 64}, "heads.window=null"),
            )
        ),
    ],
)
def test_heads_that_a_format_cannot_represent_are_rejected(
    not_exported: Callable, to: str, settings: dict, said: str
) -> None:
    message = not_exported(some_heads(**settings), to)
    assert to in message
    assert said in message


def test_equal_blocks_are_exported_for_the_originals_loader(exported: Callable) -> None:
    """It uses one block L times in a head, so the last block's weights would be used for all."""
    heads = some_heads(num_layers=2)
    heads.blocks[1].load_state_dict(heads.blocks[0].state_dict())
    assert same(MedusaHeads.from_pretrained(exported(heads, "original-v1")), heads)


@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_layers_of_a_model_that_projects_its_states_are_refused_for_that_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture, to: str
) -> None:
    """OPT-350m. Its name is right, so to name another model would not help."""
    model = tiny_model("opt", word_embed_proj_dim=16)
    model.save_pretrained(tmp_path / "opt")
    random_heads(model, 2, kind="eagle", block="gated", lm_head="shared").save_pretrained(tmp_path / "heads")
    words = ["export", str(tmp_path / "heads"), "--to", to, "--backbone", str(tmp_path / "opt")]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "projects its hidden states, which no server's layer reads" in capsys.readouterr().err


def test_overwrite_replaces_an_export(exported: Callable) -> None:
    exported(some_heads(), "tgi")
    folder = exported(some_heads(lm_head="shared"), "tgi", "--overwrite")
    assert read_json(folder / CONFIG)["version"] == "2"


def test_overwrite_replaces_nothing_but_exports(export_words: Callable, backbone: Path) -> None:
    """Every model has a config.json, too."""
    words = export_words(some_heads(), "tgi")
    place = Path(words[words.index("--output") + 1])
    shutil.copytree(backbone, place)
    (place / "notes").mkdir()
    (place / "notes" / "thesis.txt").write_text("mine")
    assert main([*words, "--overwrite"]) == 2
    assert (place / "notes" / "thesis.txt").read_text() == "mine"
    shutil.rmtree(place / "notes")
    assert main([*words, "--overwrite"]) == 2, "a generation config"
    (place / "generation_config.json").unlink()
    assert main([*words, "--overwrite"]) == 2, "the files of an export for vLLM, and of BERT"
    assert load_file(place / MODEL).keys() == load_file(backbone / MODEL).keys()
    shutil.rmtree(place)
    some_heads(num_heads=2).save_pretrained(place, provenance={"config": {}})
    assert main([*words, "--overwrite"]) == 2, "trained heads"
    assert MedusaHeads.from_pretrained(place).config.num_heads == 2


def test_a_failed_export_is_detected_and_leaves_no_files(
    export_words: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    original = save_tensors

    def transposed(tensors: dict[str, Tensor], path: Path) -> None:
        original({name: t.T if "linear.weight" in name else t for name, t in tensors.items()}, path)

    monkeypatch.setattr("medusa.export.published.save_tensors", transposed)
    assert main(export_words(some_heads(), "tgi")) == 1
    assert "weights differ" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_export_output_and_json(tmp_path: Path, backbone: Path, capsys: pytest.CaptureFixture) -> None:
    some_heads(base_model_name_or_path=str(backbone)).save_pretrained(tmp_path / "heads")
    place, result = tmp_path / "for vllm", tmp_path / "result.json"
    words = ["export", "--heads", f"{tmp_path}/heads", "--to", "vllm", "--output", str(place), "--json", str(result)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    about = read_json(result)
    assert about["serve"] in printed
    assert "chain" in about["lost"]
    assert set(about["files"]) == {CONFIG, MODEL}
    command = shlex.split(about["serve"])
    assert command[:3] == ["vllm", "serve", str(backbone)]
    asked = json.loads(command[command.index("--speculative-config") + 1])
    assert asked == {"method": "medusa", "model": str(place), "num_speculative_tokens": K}
    assert command[command.index("--dtype") + 1] == "float32"  # the backbone's


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_servers_command_works_in_every_folder(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    gated_heads(base_model_name_or_path=str(backbone)).save_pretrained(tmp_path / "heads")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--heads", "heads", "--to", server, "--output", "out", "--json", "result.json"]) == 0
    about = read_json(Path("result.json"))
    assert str(tmp_path / "out") in about["serve"]
    notes = " ".join(about["notes"])
    assert ("python -m vllm.entrypoints.openai.api_server --model" in notes) == (server == "vllm")
    assert ("temperature 0" in notes) == (server == "vllm")


# The backbone's LM head


def test_a_recorded_revision_is_exported_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's cache holds two versions of the backbone."""
    place, models = tmp_path / "hub" / "models--org--model", [tiny_model("llama", seed) for seed in (1, 2)]
    for name, model in zip(("main", "v1"), models, strict=True):
        commit = {"main": "a", "v1": "b"}[name] * 40
        model.save_pretrained(place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / name).write_text(commit)
    for library in ("huggingface_hub.constants", "huggingface_hub.file_download.constants"):
        monkeypatch.setattr(f"{library}.HF_HUB_CACHE", str(place.parent))
    known = fingerprint(models[1], "org/model", "v1")
    some_heads(base_model_name_or_path="org/model", backbone=known, lm_head="shared").save_pretrained(tmp_path / "h")
    monkeypatch.chdir(tmp_path)
    command = ["export", "--heads", "h", "--to", "vllm", "--output", "out", "--overwrite", "--json", "f.json"]
    for words in ([], ["--revision", "v1"]):
        assert main([*command, *words]) == 0
        assert "serve org/model --revision v1 " in read_json(Path("f.json"))["serve"]
        assert torch.equal(load_file(Path("out") / MODEL)["lm_head.weight"], models[1].lm_head.weight)
    assert main([*command, "--revision", "main"]) == 2, "other weights"


def test_a_backbone_that_has_changed_since_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (tiny_model("llama", seed) for seed in (1, 2))
    first.save_pretrained("model")
    known = fingerprint(first, "model")
    some_heads(base_model_name_or_path="model", backbone=known).save_pretrained("heads")
    command = ["export", "--heads", "heads", "--to", "tgi", "--output", "out", "--overwrite"]
    assert main(command) == 0
    second.save_pretrained("model")
    assert main(command) == 2
    assert "model has other weights than the backbone of these heads; add --backbone" in capsys.readouterr().err


def test_a_backbone_that_cannot_be_read_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These heads need nothing of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    some_heads(base_model_name_or_path="model").save_pretrained("heads")
    command = ["export", "--heads", "heads", "--to", "original-v1", "--output", "out"]
    assert main(command) == 0
    assert main([*command, "--overwrite", "--backbone", "model"]) == 2


def test_an_lm_head_with_an_adapter_is_exported_as_it_computes(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_config.json"
    file.write_text(json.dumps(read_json(file) | {"base_model_name_or_path": str(tmp_path / "model")}))
    rows, states = read_lm_head(str(tmp_path / "lora")), torch.randn(5, model.config.hidden_size)
    with torch.no_grad():
        torch.testing.assert_close(states @ rows.T, model.lm_head(states))
        assert (rows - model.lm_head.weight).abs().max() > 0.01


def test_a_whole_file_goes_before_an_old_index(tmp_path: Path) -> None:
    """As transformers and vLLM take them."""
    save_file({"a": torch.ones(2)}, tmp_path / MODEL)
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / f"{MODEL}.index.json").write_text(json.dumps(index))
    assert torch.equal(Stored.of_folder(tmp_path)["a"], torch.ones(2))


def test_the_backbone_is_loaded_with_the_users_options(
    exported: Callable, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary makes the export read both the backbone's config and its LM head."""
    real, asked = AutoConfig.from_pretrained, list[dict[str, Any]]()
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda path, **kwargs: (asked.append(kwargs), real(path))[1])
    exported(gated_heads(vocabulary=40), "vllm", "--trust-remote-code")  # a folder has no revisions
    assert len(asked) >= 2
    assert all(options["trust_remote_code"] is True for options in asked)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_lm_head_is_read_without_loading_the_backbone(
    tmp_path: Path, family: str, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the LM head's name, or the embedding's name if both are tied."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    monkeypatch.setattr("medusa.export.base.load_backbone", lambda *a: pytest.fail("the whole backbone was read"))
    assert torch.equal(read_lm_head(str(tmp_path)), model.get_output_embeddings().weight)
    if family != "gemma2":
        assert torch.equal(read_embeddings(str(tmp_path)), model.get_input_embeddings().weight)


def write_model(model: Any, folder: Path, left_out: str, layout: str) -> None:
    """Write a model whose config ties its embeddings, without the parameters whose names end with `left_out`."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = True
    model.config.save_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(left_out)}
    if layout == "one file":
        save_file(state, folder / MODEL, metadata={"format": "pt"})
        return
    shards = {"a.safetensors": dict(list(state.items())[::2]), "b.safetensors": dict(list(state.items())[1::2])}
    for name, part in shards.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    places = {key: name for name, part in shards.items() for key in part}
    (folder / f"{MODEL}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    ("family", "layout", "left_out"),
    [
        ("llama", "one file", "lm_head.weight"),
        ("llama", "shards", "lm_head.weight"),
        ("llama", "one file beside shards", "nothing"),
        ("qwen2_5_vl", "one file", "embed_tokens.weight"),
    ],
)
def test_weights_are_those_that_transformers_loads(tmp_path: Path, family: str, left_out: str, layout: str) -> None:
    """An LM head that is stored is used, also if the config ties it; one file comes before an index of shards."""
    model = tiny_model(family, tie_word_embeddings=False)
    if layout == "one file beside shards":
        write_model(tiny_model(family, seed=1, tie_word_embeddings=False), tmp_path, "nothing", "shards")
    write_model(model, tmp_path, left_out, layout.removesuffix(" beside shards"))
    loaded = (AutoModelForCausalLM if family == "llama" else AutoModelForImageTextToText).from_pretrained(tmp_path)
    place, load_options = str(tmp_path), LoadOptions(dtype="float32", device="cpu")
    assert torch.equal(read_lm_head(place), loaded.get_output_embeddings().weight)
    assert torch.equal(read_embeddings(place), loaded.get_input_embeddings().weight)
    assert torch.equal(read_lm_head(place), read_embeddings(place)) == (left_out != "nothing")
    heads = Checkpoint(MedusaConfig(HIDDEN, VOCAB, 2, backbone=fingerprint(loaded)), {})
    assert require_own_backbone(heads, place, load_options) is None
    with torch.no_grad():
        loaded.get_output_embeddings().weight.add_(1)
    heads = Checkpoint(MedusaConfig(HIDDEN, VOCAB, 2, backbone=fingerprint(loaded)), {})
    with pytest.raises(RequestError, match="has other weights"):
        require_own_backbone(heads, place, load_options)


def test_an_lm_head_of_8_bit_floats_is_read_as_transformers_loads_it(tmp_path: Path) -> None:
    """Such floats usually have a scale beside them, so that their values alone are wrong."""
    model = tiny_model("llama", tie_word_embeddings=False)
    model.config.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / MODEL, metadata={"format": "pt"})
    rows = read_lm_head(str(tmp_path))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, AutoModelForCausalLM.from_pretrained(tmp_path).get_output_embeddings().weight)


@torch.no_grad()
def test_embeddings_that_a_model_scales_are_read_scaled(tmp_path: Path) -> None:
    model = tiny_model("gemma2")
    model.save_pretrained(tmp_path)
    found = read_embeddings(str(tmp_path))
    assert torch.equal(found, model.get_input_embeddings()(torch.arange(len(found))))
    assert not torch.equal(found, model.get_input_embeddings().weight)


def test_an_lm_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    tiny_model("phi").save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="bias"):
        read_lm_head(str(tmp_path))
