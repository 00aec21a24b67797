"""medusa/loading.py and medusa/gguf.py: models that also read images or sound, GGUF files, and adapters."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_models
from decode import generate, medusa_generate
from decode.strategies.best_first_beam import WholeTexts, scorer_for
from decode.tree_check import check_tree_forward
from medusa import RequestError, Tree
from medusa.backbone import Backbone
from medusa.gguf import gguf_file
from medusa.loading import (
    BackboneFiles,
    LoadOptions,
    auto_class,
    load_backbone,
    load_config,
    load_tokenizer,
)
from medusa.tree_support import DRAFT_SLOTS, context_of
from tests.gguf_files import TOKENS, write_gguf
from tests.helpers import COMMON, VOCAB, left_padded, plain, random_heads, random_ids, tiny_model

ROOT = Path(__file__).parents[2]
NAMED = ["mistral3", "llava", "qwen2_5_vl", "qwen3_vl", "internvl", "idefics3", "gemma3", "llama4"]
TREE = Tree.top_k([30, 3])


def same_text(model: Any, reference: Any, **inputs: Tensor) -> bool:
    """Whether random heads on `model` write the text of `reference.generate`, and some guess is accepted."""
    prompts, heads = [random_ids(1), random_ids(12, seed=1)], random_heads(model, 2)
    out = generate(model, heads, **left_padded(prompts), tree=TREE, max_new_tokens=5, do_sample=False, **inputs)
    return out[:, 12:].tolist() == [plain(reference, prompt, max_new_tokens=5) for prompt in prompts]


# Models that also read images or sound


LATER = ("llava", "qwen3_vl", "internvl", "idefics3")  # which load as others here do


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in LATER)) for name in NAMED])
def test_a_vision_language_checkpoint_loads_for_text(name: str, tmp_path: Path) -> None:
    saved = tiny_model(name)
    saved.save_pretrained(tmp_path)
    model = load_backbone(str(tmp_path)).model
    assert check_tree_forward(model).ok
    assert same_text(model, saved)


def test_whole_and_text_only_classes_are_chosen_by_what_transformers_knows() -> None:
    """Llama 4 has a class for its text part alone, which takes less memory; Mistral 3 has none."""
    assert auto_class(tiny_model("llama4").config).__name__ == "AutoModelForCausalLM"
    assert auto_class(tiny_model("mistral3").config).__name__ == "AutoModelForImageTextToText"
    assert auto_class(tiny_model("qwen2_audio").config).__name__ == "AutoModelForMultimodalLM"
    own = AutoConfig.for_model("vit", auto_map={"AutoModelForImageTextToText": "modeling.Own"})  # with its own code
    assert auto_class(own).__name__ == "AutoModelForImageTextToText"
    assert auto_class(AutoConfig.for_model("vit")).__name__ == "AutoModelForCausalLM", "whose error says what is wrong"


def test_positions_do_not_follow_the_last_image() -> None:
    """Qwen's models keep the offset of the last image's positions; a text after it starts at 0."""
    model, saved = tiny_model("qwen2_5_vl"), tiny_model("qwen2_5_vl")
    model.model.rope_deltas = torch.tensor([[7]])
    assert check_tree_forward(model).ok
    assert same_text(model, saved)


@pytest.mark.parametrize(("name", "types"), [("qwen3_vl", "mm_token_type_ids"), ("gemma3", "token_type_ids")])
def test_token_types_of_text_pass_and_others_are_refused(name: str, types: str) -> None:
    model, heads, ids = tiny_model(name), random_heads(tiny_model(name), 2), torch.tensor([random_ids(9)])
    zeros = {"attention_mask": torch.ones_like(ids), types: torch.zeros_like(ids)}
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, **zeros)
    calls = (
        lambda **inputs: generate(model, heads, ids, max_new_tokens=4, do_sample=False, **inputs),
        lambda **inputs: model.generate(
            ids, custom_generate=medusa_generate, medusa_heads=heads, max_new_tokens=4, do_sample=False, **inputs
        ),
    )
    for call in calls:
        assert torch.equal(call(**zeros), expected)
        with pytest.raises(RequestError, match=f"the model input {types} is not supported"):
            call(**zeros | {types: torch.ones_like(ids)})
    with pytest.raises(RequestError, match="the model input pixel_values is not supported"):
        calls[0](**zeros, pixel_values=[torch.zeros(3, 28, 28)])


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_experts_can_be_loaded_in_float64(family: str, tmp_path: Path) -> None:
    """transformers' default kernel for experts takes 16 and 32 bits only."""
    tiny_model(family).save_pretrained(tmp_path)
    model = load_backbone(str(tmp_path), LoadOptions("float64", "cpu")).model
    assert model.dtype == torch.float64
    assert same_text(model, tiny_model(family))


def test_images_are_refused_at_every_door() -> None:
    """transformers encodes images before it calls a custom method, which then gets a dict instead of `pixel_values`."""
    model = tiny_model("llava")
    heads, image = random_heads(model, 2), torch.randn(1, 3, 28, 28)
    model.config.image_token_id = VOCAB - 1
    ids = torch.tensor([[*random_ids(8), *[VOCAB - 1] * 4, *random_ids(3)]])
    kwargs = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    seen = [model.generate(ids, pixel_values=picture, **kwargs) for picture in (image, 9 * image)]
    assert not torch.equal(*seen), "the image does not matter: no power"
    for call in (
        lambda **its: model.generate(ids, custom_generate=medusa_generate, medusa_heads=heads, **its, **kwargs),
        lambda **its: generate(model, heads, ids, **its, **kwargs),
    ):
        with pytest.raises(RequestError, match="only text can be continued"):
            call(pixel_values=image)
    with pytest.raises(RequestError, match="mm_encoder_outputs is not supported"):
        generate(model, heads, ids, mm_encoder_outputs={"image": object()}, **kwargs)


@pytest.mark.parametrize("floor", [48, 64])
def test_texts_of_llama_4_end_before_it_scales_queries_by_slot(floor: int) -> None:
    """It counts slots where other models count positions, so a tree or a short row would get other factors."""
    model = tiny_model("llama4_text", floor_scale=floor, attn_scale=0.9, attn_temperature_tuning=True)
    backbone, config = Backbone(model), model.config
    assert not all(config.no_rope_layers)
    assert backbone.context == floor // 2
    with pytest.raises(RequestError, match=f"the model has {floor - 1} slots, and text and draft need"):
        generate(model, random_heads(model, 3), torch.tensor([random_ids(9)]), tree=TREE, max_new_tokens=9)
    heads, prompts = random_heads(model, 3), [random_ids(floor // 2 - 6), random_ids(5, seed=1)]
    batch = left_padded(prompts)
    found = generate(model, heads, tree=Tree.top_k([4, 2]), **batch, max_new_tokens=99, do_sample=False)
    width = len(prompts[0])
    for row, prompt in zip(found.tolist(), prompts, strict=True):
        room = floor // 2 - len(prompt)
        assert row[width : width + room] == plain(model, prompt, max_new_tokens=room)
    with pytest.raises(RequestError, match=f"context ends at {floor // 2}"):
        generate(model, heads, torch.tensor([random_ids(floor // 2 + 1)]), max_new_tokens=1, do_sample=False)
    assert isinstance(scorer_for(model, prompts[1]), WholeTexts), "a beam fills more slots than a text"
    usual = tiny_model("llama4_text").config
    assert context_of(usual) == min(usual.max_position_embeddings, 8192 - DRAFT_SLOTS)
    usual.attn_temperature_tuning = False
    assert context_of(usual) == usual.max_position_embeddings


def test_zeros_that_change_the_text_are_refused() -> None:
    """GPT-2 adds the embedding of the id 0 to all tokens, so `model.generate` writes another text with zeros."""
    model, ids = tiny_model("gpt2"), torch.tensor([random_ids(9)])
    types = {"token_type_ids": torch.zeros_like(ids)}
    assert not torch.equal(model(ids).logits, model(ids, **types).logits)
    with pytest.raises(RequestError, match="the model input token_type_ids"):
        generate(model, random_heads(model, 2), ids, max_new_tokens=4, **types)
    llama = tiny_model("llama")  # reads no token types, which some tokenizers give anyway
    assert generate(llama, random_heads(llama, 2), ids, max_new_tokens=4, **types).shape == (1, 13)


def test_a_model_that_needs_an_image_is_refused_by_name() -> None:
    config = AutoConfig.for_model("idefics", **COMMON, qk_layer_norms=True, vision_config={"num_hidden_layers": 1})
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    with pytest.raises(RequestError, match=r"IdeficsForVisionText2Text cannot read text alone .*pixel_values"):
        Backbone(model)


def test_only_one_module_chooses_the_class_of_a_model() -> None:
    """So every command loads the same models. `heads/mtp.py` makes a layer for a config of its own."""
    files = [path for package in ("medusa", "train", "decode") for path in (ROOT / package).rglob("*.py")]
    users = {
        path.name for path in files if re.search(r"AutoModel\w*\.from_\w+\([^\"]", path.read_text(encoding="utf-8"))
    }
    assert users == {"mtp.py"}


# GGUF files


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    pytest.importorskip("gguf", reason="needs the gguf package, of the dev extra")
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_gguf(file, tiny_models.tiny_model("qwen2"))


def test_a_gguf_file_is_a_backbone(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Its weights are those of the file, unpacked; its text equals that of the same weights in transformers' format."""
    file, held = written
    place = str(file)
    loaded = load_backbone(place)
    model, same = loaded.model, tiny_models.tiny_model("qwen2")
    same.load_state_dict({key: torch.from_numpy(value) for key, value in held.items()})
    assert all(torch.equal(tensor, same.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert (model.dtype, model.config.eos_token_id) == (torch.float32, 5)
    assert BackboneFiles(place).generation_config.to_dict() == model.generation_config.to_dict()
    model.generation_config.eos_token_id = None
    assert same_text(model, same)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("abcd", add_special_tokens=False).input_ids == [TOKENS.index("abc"), TOKENS.index("d")]
    assert loaded.tokenizer.chat_template == "{{ messages[0].content }}"
    found = load_backbone(str(file.parent), LoadOptions("bfloat16"))
    assert (found.model.dtype, found.tokenizer is None) == (torch.bfloat16, False), "the folder may be named"


def test_a_config_and_a_tokenizer_are_read_once_and_given_out_as_copies(
    written: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(written[0])
    config, tokenizer = load_config(place), load_tokenizer(place)
    config.vocab_size, tokenizer.padding_side = 7, "left"
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("read again"))
    assert load_config(place).vocab_size == VOCAB
    assert load_tokenizer(place).padding_side == "right"


def test_an_adapter_for_a_gguf_file_loads_with_it(written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    model = load_backbone(str(written[0])).model
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)  # the adapter alone
    again, ids = load_backbone(str(tmp_path)).model, torch.tensor([random_ids(5)])
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert not torch.equal(again(ids).logits, load_backbone(str(written[0])).model(ids).logits)


def adapted(model: Any, place: Path, **settings: Any) -> str:
    """Save an adapter with random weights for the model in the folder `place`."""
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings))
    model.save_pretrained(place / "adapter")
    file = place / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(place)}))
    return str(place / "adapter")


def test_an_adapter_that_transformers_loads_in_part_is_refused(tmp_path: Path) -> None:
    """DoRA: transformers leaves out its magnitudes, and computes something else without an error."""
    tiny_model("llama").save_pretrained(tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), config).save_pretrained(tmp_path / "dora")
    with pytest.raises(RequestError, match=r"or transformers does not load them; merge the adapter \(peft: merge"):
        load_backbone(str(tmp_path / "dora"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_loads_as_transformers_loads_it(dtype: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    place = adapted(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path)
    ours = load_backbone(place, LoadOptions(dtype=dtype)).model
    theirs = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval()
    for (name, found), (known, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (name, found.dtype) == (known, expected.dtype)
        assert torch.equal(found, expected)
    assert not ours.training


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "base_model.model.model.layers.1.self_attn.v"])
def test_weights_that_a_model_with_an_adapter_lacks_are_named(lost: str, tmp_path: Path) -> None:
    """transformers names only those of the adapter, on a log, and makes others at random."""
    tiny_model("llama").save_pretrained(tmp_path)
    place = Path(adapted(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path))
    file = place / "adapter_model.safetensors" if lost.startswith("base") else tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(lost)}
    assert len(kept) < len(load_file(file))
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(RequestError, match=r"its files lack the weights model.layers.1"):
        load_backbone(str(place))


def test_wrong_gguf_requests(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"nothing")
    for name, options, message in (
        (tmp_path, {}, "holds 2 GGUF files: a.gguf, b.gguf; name one of them, as .*a.gguf"),
        (tmp_path / "a.gguf", {}, "no backbone at .*a.gguf: .*magic"),
        (tmp_path / "c.gguf", {}, "no backbone at .*c.gguf: there is no such file"),
        ("c.gguf", {}, "no backbone at c.gguf: there is no such file"),
        (written[0], {"quantization": "int8"}, "are quantised already; leave out --quantization"),
    ):
        with pytest.raises(RequestError, match=message):
            load_backbone(str(name), LoadOptions(**options))
    (tmp_path / "model.safetensors").touch()
    assert gguf_file(str(tmp_path)) is None, "a model in the format of transformers"
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RequestError, match=r"gguf is not installed; type: pip install 'gguf>="):
        load_backbone(str(written[0]))


@pytest.mark.parametrize("base", ["adapter", "other", 5])
def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path, base: str | int) -> None:
    """transformers would load the first adapter's model without that adapter, if it could find it."""
    for name in ("adapter", "other"):
        (tmp_path / name).mkdir()
        place = str(tmp_path / base) if isinstance(base, str) else base
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": place}))
    with pytest.raises(RequestError, match=f"adapts .*{base}, which is no model; merge the adapters"):
        load_config(str(tmp_path / "adapter"))
