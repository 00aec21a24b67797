"""Quantised backbones: fingerprints that do not depend on storage, and every command with torchao's int8 and int4."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, T5Config

from medusa import MedusaHeads, RequestError
from medusa.__main__ import main
from medusa.fingerprint import differs, fingerprint
from medusa.loading import LoadOptions, load_backbone
from medusa.memory import bytes_of
from medusa.quantization import PROBE, quantization_of, quantized_layers
from tests.helpers import VOCAB, plain, random_ids, tiny_model
from tiny_models import letter_tokenizer

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])


class PackedLinear(nn.Module):
    """A linear layer as GPTQ stores it: integers, two in a byte, in a buffer; no parameter of the name `weight`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        whole = (linear.weight.detach() / scale).round().to(torch.int8) + 8
        self.register_buffer("packed", (whole[:, ::2] | (whole[:, 1::2] << 4)).to(torch.uint8))
        self.register_buffer("scale", scale)

    def unpacked(self) -> Tensor:
        pairs = torch.stack([self.packed & 15, self.packed >> 4], dim=-1)
        return (pairs.flatten(1).to(self.scale.dtype) - 8) * self.scale

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.unpacked(), self.bias)


class Int8Linear(nn.Module):
    """A linear layer as bitsandbytes stores it: `weight` is a parameter of integers."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale, whole = linear.scale, (linear.unpacked() / linear.scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.to(self.scale.dtype) * self.scale, self.bias)


def with_layers(model: Any, kind: type, make: Callable[[Any], nn.Module]) -> Any:
    """Replace the layers of a class in the decoder of `model`, in place."""
    for name, layer in list(model.model.named_modules()):
        if type(layer) is kind:
            model.model.set_submodule(name, make(layer))
    return model


def as_plain(layer: PackedLinear) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    linear.weight.data, linear.bias = layer.unpacked(), layer.bias
    return linear


def test_the_fingerprint_of_a_plain_model_is_that_of_earlier_versions() -> None:
    """The shipped heads recorded theirs before fingerprints knew of quantisation."""
    known = MedusaHeads.from_pretrained("demo").config.backbone
    found = fingerprint(load_backbone("demo", LoadOptions(dtype=known["dtype"], device="cpu")).model, known["name"])
    assert found == {key: known.get(key) for key in found}
    assert "quantization" not in found


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2, window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fingerprint_is_that_of_the_weights_that_layers_compute_with(family: str, dtype: torch.dtype) -> None:
    """Packed in a buffer, as integers or unpacked into a plain layer: the same weights, so the same fingerprint.

    qwen2 has biases; here they are a thousand times as large as the weights."""

    def model() -> Any:
        made = tiny_model(family, dtype=dtype)
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(20.0)
        return made

    packed = with_layers(model(), nn.Linear, PackedLinear)
    weights = fingerprint(packed)["weights"]
    assert fingerprint(with_layers(packed, PackedLinear, Int8Linear))["weights"] == weights
    same = fingerprint(with_layers(model(), nn.Linear, lambda layer: as_plain(PackedLinear(layer))))["weights"]
    # A layer rounds the sum of 256 times the weight and the bias; a fingerprint rounds to six digits.
    eps = torch.finfo(dtype).eps
    assert weights == pytest.approx(same, rel=eps, abs=20 * eps / PROBE + 1e-6)
    changed = [one - other for one, other in zip(weights, fingerprint(model())["weights"], strict=True)]
    assert max(map(abs, changed)) > 3e-3  # four bits are not the original


def test_bytes_of_packed_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    assert bytes_of(model) == 4 * 64 * 32
    assert bytes_of(nn.Sequential(PackedLinear(model[0]))) == 64 * 32 // 2 + 4 * 32


@pytest.mark.parametrize(("kind", "package"), [("int8", "torchao"), ("int4", "torchao"), ("8bit", "bitsandbytes")])
def test_a_missing_package_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=f"quantization: {kind} needs {package}, which is not installed"):
        LoadOptions(quantization=kind)


# With torchao


@needs_torchao
@KINDS
def test_a_backbone_is_loaded_with_quantised_layers(kind: str) -> None:
    whole, model = load_backbone("demo").model, load_backbone("demo", LoadOptions(quantization=kind)).model
    layers = quantized_layers(model)
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert quantization_of(model) == kind
    assert model.num_parameters() == whole.num_parameters()
    linear = sum(layer.in_features * layer.out_features for layer in layers.values())  # type: ignore[operator]
    rest = 4 * (model.num_parameters() - linear)
    assert linear < bytes_of(model) - rest < 1.3 * linear  # a byte for each weight, and the scales
    ids = torch.tensor([random_ids(40, vocab=4096)])
    with torch.no_grad():
        cosine = F.cosine_similarity(model(ids).logits, whole(ids).logits, dim=-1)
    assert 0.9 < float(cosine.mean()) < 1 - 1e-5
    known = fingerprint(model)
    assert json.loads(json.dumps(known)) == known
    assert known["quantization"] == kind
    assert not differs(model, known)
    assert differs(whole, known)


@needs_torchao
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_experts_that_stay_unquantised_are_told(tmp_path: Path, family: str, capfd: pytest.CaptureFixture) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    load_backbone(str(tmp_path), LoadOptions(quantization="int8"))
    told = capfd.readouterr().err
    share = re.search(r"int8 quantises only (\d+) % of .*, such as model.layers.0.mlp.experts.gate_up_proj, stay", told)
    assert "quantises only" not in told if family == "llama" else share
    if share:
        attention, experts = 2 * (32 * 32 + 16 * 32), 4 * 3 * 32 * 48
        assert int(share[1]) == pytest.approx(100 * attention / (attention + experts), abs=1)  # and a few norms


@needs_torchao
def test_a_quantised_checkpoint_needs_no_option(tmp_path: Path) -> None:
    model = load_backbone("demo", LoadOptions(quantization="int8")).model
    model.save_pretrained(tmp_path)
    again = load_backbone(str(tmp_path)).model
    assert fingerprint(again)["weights"] == fingerprint(model)["weights"]
    assert quantization_of(again) is None  # loading the folder is enough
    with pytest.raises(RequestError, match="quantised already; leave out --quantization"):
        load_backbone(str(tmp_path), LoadOptions(quantization="int8"))


@needs_torchao
def test_global_settings_of_torch_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's default settings allow TF32 and change inductor, in the whole process."""
    before = torch.get_float32_matmul_precision(), torch._inductor.config.coordinate_descent_tuning
    load_backbone("demo", LoadOptions(quantization="int8"))
    assert (torch.get_float32_matmul_precision(), torch._inductor.config.coordinate_descent_tuning) == before


@needs_torchao
def test_int4_refuses_layers_that_do_not_divide_into_groups(tmp_path: Path) -> None:
    tiny_model("llama", intermediate_size=48).save_pretrained(tmp_path)
    odd = r"--quantization int4 of .*mlp.down_proj has 48 inputs, which is no multiple of 32; choose int8"
    with pytest.raises(RequestError, match=odd):
        load_backbone(str(tmp_path), LoadOptions(quantization="int4"))


@needs_torchao
@KINDS
def test_a_model_that_writes_no_text_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "_model_mapping", {})  # all of which transformers imports to name them
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"no backbone at .*: Unrecognized configuration class"):
        load_backbone(str(tmp_path), LoadOptions(quantization=kind))


@needs_torchao
def test_every_command_runs_on_a_quantised_backbone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write text, train, and decode: the text is that of the quantised model's own `generate`.

    The backbone's name and its quantisation come from the heads."""
    monkeypatch.setattr("train.run.draw_curves", lambda log, path: path.touch())  # imported here first
    kind, place = "int4", str(tmp_path / "backbone")
    tiny_model("llama", intermediate_size=64).save_pretrained(place)  # int4 groups 32 inputs
    letter_tokenizer(VOCAB - 2, VOCAB - 1).save_pretrained(place)
    text, heads, prompts = tmp_path / "text.jsonl", tmp_path / "heads", tmp_path / "prompts.jsonl"
    words = ("abcd", "hgf")
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words), encoding="utf-8")
    decode = ("--prompts", prompts, "--max-new-tokens", "6")
    recipe = (f"backbone={place}", f"data={text}", f"output_dir={heads}", f"quantization={kind}")
    short = ("data.sequence_length=16", "heads.num=4", "training.max_steps=1", "cache_features=true")
    for argv in (
        ("distill", "--backbone", place, *decode, "--output", text, "--quantization", kind),
        ("train", "medusa1", *recipe, *short),
        ("generate", heads, "--tree", "eight", *decode, "--json", tmp_path / "out.json"),
    ):
        assert main([str(word) for word in argv]) == 0, capsys.readouterr().err
    assert "quantization" not in capsys.readouterr().err  # no warning
    recorded = json.loads((heads / "config.json").read_text(encoding="utf-8"))["backbone"]
    assert recorded["quantization"] == kind
    loaded = load_backbone(place, LoadOptions(quantization=kind))
    assert loaded.tokenizer is not None
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    for result, word in zip(results, words, strict=True):
        prompt = loaded.tokenizer(word)["input_ids"]
        assert result["input_ids"][-len(prompt) :] == prompt
        assert result["new_ids"] == plain(loaded.model, result["input_ids"], max_new_tokens=6)
    assert main(["generate", str(heads), "--backbone", place, "--tree", "eight", "--max-new-tokens", "1", "A"]) == 0
    warning = f"trained for {place} with quantization {kind}, and {place} is loaded with none"
    assert warning in capsys.readouterr().err
