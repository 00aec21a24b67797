"""The layer for multi-token prediction that comes with a model (`--drafter mtp`), against transformers' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, modeling_layers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from decode import generate
from decode.bench.losslessness.cases import passes, rules_for
from decode.bench.losslessness.experiment import Experiment
from decode.drafters import drafter_factory, parse
from decode.drafters.base import DrafterContext
from decode.settings import Settings
from medusa import MedusaHeads, native_layers
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.mtp import new_layers
from medusa.native_layers import native_config, native_heads
from tests.helpers import FIRST_TRANSFORMERS, left_padded, plain, random_ids, tiny_model, weekly
from tests.native_models import needs_forward_layer, save_native

FAMILIES = [
    "deepseek_v3",
    "glm4_moe",
    *weekly("mellum"),
]  # latent attention, several queries for a key, and a window of 4


class Native(NamedTuple):
    """A tiny random model with an MTP layer, loaded from its files, and transformers' own MTP layers."""

    model: Any
    layers: MtpModel


def native(family: str, folder: Path) -> Native:
    layers = save_native(family, folder)
    return Native(AutoModelForCausalLM.from_pretrained(folder).eval(), layers)


@pytest.fixture(scope="module", params=FAMILIES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Native:
    return native(request.param, tmp_path_factory.mktemp(request.param))


@needs_forward_layer
@torch.no_grad()
def test_logits_are_those_of_forward_layer(found: Native) -> None:
    model, layers = found
    ids, steps, length = torch.tensor([random_ids(14)]), 3, 11
    hidden = model.model(ids).last_hidden_state[:, :length]
    cache = MtpCache(config=model.config.get_mtp_config())
    positions = torch.arange(1, length + 1)[None]
    feature = layers.forward_layer(0, hidden, positions, cache, input_ids=ids[:, 1 : length + 1])
    first = model.lm_head(feature)
    wanted = [first[:, -1]]
    feature = feature[:, -1:]
    for step in range(1, steps):  # the same layer reads its own output
        token = ids[:, length + step, None]
        feature = layers.forward_layer(0, feature, torch.tensor([[length + step]]), cache, input_ids=token)
        wanted.append(model.lm_head(feature[:, 0]))
    heads, backbone = native_heads(model, steps), Backbone(model)
    logits = heads(heads.inputs(hidden, ids, backbone.embed), backbone.lm_head)
    torch.testing.assert_close(logits[0], first, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[:, :, -1], torch.stack(wanted), rtol=1e-4, atol=1e-5)


def test_texts_are_the_models_own(found: Native) -> None:
    """Two prompts of different length in one batch."""
    prompts = [random_ids(9, seed=1), random_ids(4, seed=2)]
    wanted = [plain(found.model, prompt, max_new_tokens=8) for prompt in prompts]
    for options in ({"tree": "chain"}, {"tree": "dynamic:12"}):
        out = generate(found.model, **left_padded(prompts), drafter="mtp:4", max_new_tokens=8, **options)
        assert isinstance(out, torch.Tensor)
        assert out[:, 9:].tolist() == wanted, options


def test_drawn_trees_have_the_models_distribution(found: Native) -> None:
    source = drafter_factory("mtp", DrafterContext(found.model, tree="topk:3,2,1"))
    drawn = [rule for rule in rules_for(source) if rule.draft == "sample" and rule.is_judged]
    made = Experiment(found.model, source, random_ids(7), Settings(temperature=2.0), torch.Generator().manual_seed(0))
    cases = [made.run(rule, 0, 20_000) for rule in drawn]
    assert passes(cases)
    assert cases
    assert all(case.mean_accepted > 0.05 for case in cases), "hardly anything was accepted: no power"


def test_the_layer_is_read_once_and_the_model_stays_as_it_was(found: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(found.model))
    first = native_heads(found.model, 2)
    monkeypatch.setattr(native_layers, "read_layer", None)
    again = native_heads(found.model, 5)
    assert again.config.num_heads == 5
    assert {p.data_ptr() for p in again.parameters()} == {p.data_ptr() for p in first.parameters()}
    assert vars(found.model) == before


def test_saved_heads_compute_the_same(found: Native, tmp_path: Path) -> None:
    heads, backbone, ids = native_heads(found.model, 3), Backbone(found.model), torch.tensor([random_ids(9)])
    heads.save_pretrained(tmp_path)
    loaded = MedusaHeads.from_pretrained(tmp_path)
    assert loaded.config == heads.config
    with torch.no_grad():
        hidden = backbone.hidden_states(ids)
        wanted, got = (one(one.inputs(hidden, ids, backbone.embed), backbone.lm_head) for one in (heads, loaded))
    assert torch.equal(got, wanted)


def test_a_model_without_a_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="a model of type llama without num_mtp_layers in its config"):
        native_heads(tiny_model("llama"), 2)
    unread = tiny_model("deepseek_v3")  # its config has a layer, but it comes from no files
    with pytest.raises(RequestError, match="a model that was not loaded has no MTP layer"):
        native_heads(unread, 2)
    monkeypatch.delattr(modeling_layers, "MtpModel")
    with pytest.raises(RequestError, match=r"install transformers 5\.17 or newer"):
        native_config(unread.config, 2)


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("llama", {"chain_hidden_post_norm": True}, "cannot draft trees: its config has chain_hidden_post_norm; take"),
        ("olmo2", {}, "the MTP layer of a olmo2 cannot draft trees: it has no input_layernorm; take"),
        ("gpt2", {}, "transformers makes no MTP layer of a gpt2: "),
        pytest.param(
            *("longcat_flash", {}, "transformers makes no MTP layer of a longcat_flash: "),
            marks=pytest.mark.skipif(FIRST_TRANSFORMERS, reason="transformers 5.17 makes this layer"),
        ),
        ("reformer", {"mtp_layer_types": None}, "transformers makes no MTP layer of a reformer: "),
    ],
)
def test_a_layer_that_cannot_draft_is_refused(family: str, settings: dict[str, Any], said: str) -> None:
    config = {"model_type": family, "num_hidden_layers": 1, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
    with torch.device("meta"), pytest.raises(RequestError, match=said):
        new_layers(config | settings)


@pytest.mark.parametrize("parts", ["heads+mtp", "mtp:2+ngram+mtp:3"])
def test_a_mix_of_two_sets_of_heads_is_refused_by_the_config_alone(parts: str) -> None:
    config = tiny_model("deepseek_v3").config
    parse("mix:mtp:2+ngram").check(config)
    with pytest.raises(RequestError, match="two sets of heads, and a mix drafts with one"):
        parse(f"mix:{parts}").check(config)


def test_files_without_a_layer_are_refused(tmp_path: Path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RequestError, match="hold no MTP layer"):
        native_heads(model, 2)


def test_a_lack_of_memory_is_not_called_a_lack_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(MtpModel, "from_pretrained", fail)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        native_heads(tiny_model("deepseek_v3"), 2)
