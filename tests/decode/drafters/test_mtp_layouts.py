"""`--drafter mtp` on models whose MTP layer transformers drops: Qwen3-Next, Qwen3.5, their mixtures, and MiMo."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from decode import generate
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.mtp import new_layers
from medusa.native_layers import native_config, native_heads
from tests.helpers import left_padded, plain, random_ids, tiny_model, weekly
from tests.native_models import add_tensors, save_native
from tests.published_mtp import PublishedLayer, save_published

CASES = {
    "qwen3_next": {},  # a mixture, whose experts are stored one by one
    "qwen3_5_text": {"sharded": True},
    "qwen3_5_moe": {"fused": True},  # multimodal: the names of the text's tensors begin with model.language_model
    "mimo_v2_flash": {},  # a window, and attention sinks
}


class Found(NamedTuple):
    """A model that was loaded from files, and the MTP layer that these files hold."""

    model: Any
    layer: PublishedLayer


@pytest.fixture(scope="module", params=["qwen3_5_moe", "mimo_v2_flash", *weekly("qwen3_next", "qwen3_5_text")])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp(request.param)
    layer = save_published(request.param, folder, **CASES[request.param])
    return Found(AutoModelForCausalLM.from_pretrained(folder).eval(), layer)


@torch.no_grad()
def test_the_layer_computes_the_published_formula(found: Found) -> None:
    """Later steps read the layer's output as one more feature."""
    model, layer = found
    ids, steps, length = torch.tensor([random_ids(14)]), 3, 11
    hidden = model.model(ids).last_hidden_state[:, :length]
    read, wanted = hidden, []
    for step in range(steps):
        feature = layer.features(read, model.get_input_embeddings()(ids[:, 1 : length + 1 + step]))
        wanted.append(model.lm_head(feature))
        read = torch.cat([read, feature[:, -1:]], dim=1)
    heads, backbone = native_heads(model, steps), Backbone(model)
    logits = heads(heads.inputs(hidden, ids, backbone.embed), backbone.lm_head)
    torch.testing.assert_close(logits[0], wanted[0], rtol=1e-4, atol=1e-5)
    last = torch.stack([of_step[:, -1] for of_step in wanted])
    torch.testing.assert_close(logits[:, :, -1], last, rtol=1e-4, atol=1e-5)


def test_texts_are_the_models_own(found: Found) -> None:
    """Alone on a tree, and two prompts of different length in one batch."""
    prompts = [random_ids(9, seed=1), random_ids(4, seed=2)]
    wanted = [plain(found.model, prompt, max_new_tokens=8) for prompt in prompts]
    for drafter, tree, rows in (("mtp", None, 1), ("mtp:4", "chain", 2)):
        out = generate(found.model, **left_padded(prompts[:rows]), drafter=drafter, tree=tree, max_new_tokens=8)
        assert isinstance(out, Tensor)
        assert out[:, 9:].tolist() == wanted[:rows]


def test_a_whole_multimodal_model_has_the_layer_too(tmp_path: Path) -> None:
    """Its conversions hold for the text decoder's prefix only; here experts are stored one by one."""
    layer = save_published("qwen3_5_moe", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    before = dict(vars(model))
    read = native_heads(model, 2).state_dict()
    assert vars(model) == before
    for key, tensor in layer.block.state_dict().items():
        assert torch.equal(read[f"layer.mtp_block.{key}"], tensor), key


def without(name: str) -> Any:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"mtp.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1)}


def below(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of MLX, whose norms are not centred at 0."""
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("mtp.fc.weight"), r"hold no MTP layer \(.*missing from .*: \['layers.0.eh_proj.weight'\]\); choose"),
        (quantised, r"\(its tensors are quantised, as mtp.layers.0.self_attn.q_proj.weight_scale_inv shows; load"),
        (below, r"hold no MTP layer \(the name of no tensor begins with mtp\.\); choose"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_files_without_a_complete_plain_layer_are_refused(
    tmp_path: Path, change: Any, said: str, sharded: bool
) -> None:
    model = tiny_model("qwen3_5_text")
    model.save_pretrained(tmp_path)
    add_tensors(tmp_path, change(PublishedLayer(model).tensors()), sharded)
    with pytest.raises(RequestError, match=said) as error:
        native_heads(AutoModelForCausalLM.from_pretrained(tmp_path), 2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_quantised_layer_that_transformers_knows_is_refused(tmp_path: Path, family: str) -> None:
    """As in the FP8 checkpoints of DeepSeek-V3, whose layer is stored behind the last one."""
    save_native(family, tmp_path, num_mtp_layers=1)
    before = native_heads(AutoModelForCausalLM.from_pretrained(tmp_path), 2).state_dict()
    name = f"model.layers.{tiny_model(family).config.num_hidden_layers}.eh_proj.weight"
    codes = (before["layer.eh_proj.weight"] * 448).to(torch.float8_e4m3fn)
    add_tensors(tmp_path, {name: codes, f"{name}_scale_inv": torch.full((1, 1), 1 / 448)})
    with pytest.raises(RequestError, match=rf"\(its tensors are quantised, as {name}_scale_inv shows; load"):
        native_heads(AutoModelForCausalLM.from_pretrained(tmp_path), 2)


def test_configs_without_a_layer_that_we_can_read_are_refused() -> None:
    config = tiny_model("qwen3_5_text", mtp_num_hidden_layers=0).config
    with pytest.raises(RequestError, match="of type qwen3_5_text without mtp_num_hidden_layers in its config has no"):
        native_config(config, 2)
    config.mtp_num_hidden_layers, config.mtp_use_dedicated_embeddings = 1, True
    with pytest.raises(RequestError, match="cannot draft trees: it has embeddings of its own; take another"):
        new_layers(native_config(config, 2).mtp or {})
