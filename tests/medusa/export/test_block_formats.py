"""Exported block drafters: servers read the right layers, masks, layout and edges, and we read the same heads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from medusa import MedusaHeads
from medusa.backbone import Backbone
from medusa.files import read_json
from medusa.vocabulary import lm_head_for, over_all
from tests.helpers import HIDDEN, VOCAB, random_heads, random_ids, shared_model, weekly

LAYERS, K, FEATURES = 5, 3, [1, 4]
BLOCK = {"kind": "dflash", "feature_layers": FEATURES, "mask_token": 5}
FORMS: dict[str, dict[str, Any]] = {
    "dflash": {"edges": "none", "mask_token": None},
    "dflash, windows": {"edges": "none", "num_layers": 2, "windows": [None, 7]},
    "dflash, causal windows": {"edges": "none", "windows": 7, "causal": True, "vocabulary": 40},
    "dspark": {},
    "dspark, own mask": {"mask_token": None, "vocabulary": 40, "confidence": True},
    "dspark, confidence": {"confidence": True, "confidence_edges": False},
    "dflash2": {"edges": "pairwise", "conv": [2, 4], "mask_token": None},
    "dflash2, no conv": {"edges": "pairwise", "windows": 9, "num_layers": 2},
}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    shared_model(num_hidden_layers=LAYERS).save_pretrained(folder)
    return folder


def block_heads(**settings: Any) -> MedusaHeads:
    return random_heads(shared_model(num_hidden_layers=LAYERS), K, **BLOCK | settings)


@torch.no_grad()
def logits_of(heads: MedusaHeads) -> Tensor:
    model, ids = shared_model(num_hidden_layers=LAYERS), torch.tensor([random_ids(15, seed=3, vocab=VOCAB - 1)])
    read = Backbone(model, heads.config.feature_layers)
    inputs = heads.inputs(read.hidden_states(ids, use_cache=False), ids, read.embed)
    return over_all(heads, heads(inputs, lm_head_for(heads, read)), VOCAB)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *((name, "speculators") for name in FORMS),
        *((name, "z-lab") for name in ("dflash, windows", "dspark, confidence", "dflash2")),
        *weekly(*((name, "z-lab") for name in ("dflash", "dspark", "dflash2, no conv"))),
    ],
)
def test_an_export_says_what_its_readers_assume(name: str, to: str, exported: Callable, tmp_path: Path) -> None:
    form, kind = FORMS[name], name.partition(",")[0]
    heads = block_heads(**form)
    folder = exported(heads, to, "--quiet", "--json", str(tmp_path / "result.json"))
    about, tensors, shifted = (
        read_json(folder / "config.json"),
        load_file(folder / "model.safetensors"),
        kind == "dspark",
    )
    again = MedusaHeads.from_pretrained(folder)
    torch.testing.assert_close(logits_of(again), logits_of(heads))
    if kind == "dspark":
        require_confidence(form, about, heads, again)
    assert about["block_size"] == K + (not shifted)
    masked = form.get("mask_token", 5) is None
    assert about["mask_token_id"] == (VOCAB - 1 if masked else 5)
    assert (folder / "mask_embedding.pt").exists() == (masked and not shifted)
    assert ("embed_tokens.weight" in tensors) == (masked and shifted)
    assert tensors["fc.weight"].shape == (HIDDEN, len(FEATURES) * HIDDEN)
    layers, windows = form.get("num_layers", 1), form.get("windows")
    assert len([key for key in tensors if key.endswith("q_norm.weight")]) == layers
    if to == "speculators":
        assert about["speculators_model_type"] == kind
        assert about["aux_hidden_state_layer_ids"] == FEATURES
        assert about["sample_from_anchor"] is shifted
        assert about["sliding_window_non_causal"] is not form.get("causal", False)
        assert about["draft_vocab_size"] == form.get("vocabulary", VOCAB)
        assert about["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
        command = shlex.split(read_json(tmp_path / "result.json")["serve"])
        method = json.loads(command[command.index("--speculative-config") + 1])["method"]
        assert method == ("dspark" if shifted else "dflash"), "vLLM has no method dflash2"
        about = about["transformer_layer_config"]
    else:
        assert about["dflash_config"]["target_layer_ids"] == [layer - 1 for layer in FEATURES]
        assert about["is_causal"] is form.get("causal", False)
    assert about["model_type"] == "qwen3", "whose rotary embeddings and norms the drafter has"
    assert about["tie_word_embeddings"] is False
    if windows is not None:
        each = windows if isinstance(windows, list) else [windows] * layers
        assert about["layer_types"] == ["full_attention" if w is None else "sliding_attention" for w in each]
    assert about["sliding_window"] if windows else not about.get("sliding_window")
    if "vocabulary" in form:
        assert tensors["lm_head.weight"].shape == (40, HIDDEN)
        assert tensors["t2d"].sum() == 40


def require_confidence(form: dict[str, Any], about: dict[str, Any], heads: MedusaHeads, again: MedusaHeads) -> None:
    """Keys that vLLM takes for false where they are missing, and the same tensors."""
    confident = form.get("confidence", False)
    assert about["enable_confidence_head"] is confident
    assert about["confidence_head_with_markov"] is (confident and form.get("confidence_edges", True))
    names = [name for name in heads.state_dict() if name.startswith("confidence_head.")]
    assert len(names) == 2 * confident
    for name in names:
        assert torch.equal(again.state_dict()[name], heads.state_dict()[name])


@pytest.mark.parametrize(
    ("to", "settings", "message"),
    [
        ("vllm", {"feature_layers": None}, "the last hidden state; train them with heads.feature_layers=usual"),
        ("vllm", {"edges": "none", "layout": "shifted"}, "layout shifted; train them with heads.layout=fill"),
        ("speculators", {"conv": [2, 4]}, "convolutions; leave heads.conv out"),
        ("speculators", {"edges": "pairwise", "vocabulary": 40}, "a reduced vocabulary"),
        ("z-lab", {"vocabulary": 40}, "a reduced vocabulary"),
        ("sglang", {"num_layers": 2, "windows": [4, 5]}, "windows of several sizes"),
        ("z-lab", {"num_layers": 2, "causal": [True, False]}, "some causal layers"),
        ("vllm", {"causal": True}, "causal layers without a window; add heads.windows"),
        ("vllm", {"logit_scale": 2.0}, "which only the format z-lab has"),
        ("speculators", {"feature_layers": [1, LAYERS]}, "has 5"),
        ("llama.cpp", {}, "llama.cpp has no Medusa heads"),
    ],
)
def test_what_servers_do_not_have_is_refused_by_name(
    to: str, settings: dict[str, Any], message: str, not_exported: Callable
) -> None:
    assert message in not_exported(block_heads(**settings), to)
