"""Published block drafters: each project's layout gives the right logits, and chains accept what its walk accepts.

The package `dflash` of z-lab, where it is installed, is compared with the same forms."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from decode.draft import Drafter
from decode.drafters.layouts import with_shortlist
from decode.drafters.trained_heads import TrainedHeads
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.session import Session
from medusa import MedusaHeads, Tree
from medusa.backbone import Backbone
from medusa.checkpoints.dflash import to_dflash
from medusa.errors import RequestError
from medusa.vocabulary import lm_head_for, over_all
from tests.helpers import VOCAB, plain, random_ids, run_steps, shared_model
from tests.medusa.checkpoints.block_layouts import (
    LAYERS,
    LAYOUTS,
    MASK,
    NAMED,
    Z_LAB,
    A,
    D,
    H,
    Layout,
    N,
    Tensors,
    confidence,
    edges,
    unary,
    walk,
)

REFERENCE = [name for name in LAYOUTS if name.startswith(("z-lab", "DFlash 2"))]  # forms of the package `dflash`
MODEL = {"num_hidden_layers": LAYERS}


def loaded(layout: Layout, folder: Path, seed: int = 0) -> tuple[MedusaHeads, Tensors]:
    tensors = layout.tensors(seed)
    return MedusaHeads.from_pretrained(layout.write(folder, tensors)), tensors


@torch.no_grad()
def logits_of(heads: MedusaHeads, model: Any, ids: list[int]) -> Tensor:
    """The logits [T, K, V] after all tokens but the last of a text, over all tokens."""
    backbone, text = Backbone(model, heads.config.feature_layers), torch.tensor([ids])
    hidden = backbone.hidden_states(text, use_cache=False)
    logits = heads(heads.inputs(hidden, text, backbone.embed), lm_head_for(heads, backbone))
    return over_all(heads, logits, VOCAB)[:, 0].transpose(0, 1)[:-1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_gives_its_projects_logits(name: str, tmp_path: Path) -> None:
    layout, model, ids = LAYOUTS[name], shared_model(**MODEL), random_ids(12, seed=3)
    heads, tensors = loaded(layout, tmp_path)
    found = logits_of(heads, model, ids)
    kept = torch.arange(VOCAB) if "d2t" not in tensors else tensors["d2t"] + torch.arange(N)
    for root in (1, 4, len(ids) - layout.tokens - 1):
        x, logits = unary(layout, tensors, model, ids[: root + 1])
        for guess, at in enumerate(x):
            wanted = logits[guess] + edges(tensors, at, ids[root + guess])
            torch.testing.assert_close(found[root - 1, guess, kept], wanted, rtol=1e-4, atol=2e-4)
    assert (found.isfinite().sum(-1) == len(kept)).all()


@pytest.mark.parametrize("name", ["DSpark", "speculators, dspark"])
@torch.no_grad()
def test_confidences_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    layout, model, ids = LAYOUTS[name], shared_model(**MODEL), random_ids(12, seed=3)
    heads, tensors = loaded(layout, tmp_path)
    assert heads.config.confidence_edges == (name == "DSpark")
    backbone, text = Backbone(model, heads.config.feature_layers), torch.tensor([ids])
    inputs = heads.inputs(backbone.hidden_states(text, use_cache=False), text, backbone.embed)
    found = heads.confidence(heads.features(inputs)).sigmoid()[:, 0]
    for root in (1, 4, len(ids) - layout.tokens - 1):
        x, _ = unary(layout, tensors, model, ids[: root + 1])
        wanted = [confidence(tensors, at, ids[root + guess]) for guess, at in enumerate(x)]
        torch.testing.assert_close(found[:, root - 1], torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    assert found.std() > 0.02, "nearly equal: no power"


def test_wrong_layouts_layers_and_masks_give_other_logits(tmp_path: Path) -> None:
    model, ids, plain_form = shared_model(**MODEL), random_ids(12, seed=3), LAYOUTS["z-lab"]
    right = logits_of(loaded(plain_form, tmp_path)[0], model, ids)
    shifted = {"architectures": ["Qwen3DSparkModel"], "block_size": 3}
    for config, inner in (
        (shifted, {}),
        ({}, {"target_layer_ids": [1, 2, 3]}),
        ({"is_causal": True}, {}),
        ({}, {"mask_token_id": 8}),
    ):
        wrong = Layout(Z_LAB | config, plain_form.read, inner=NAMED | inner)
        assert not torch.allclose(logits_of(loaded(wrong, tmp_path)[0], model, ids), right, atol=0.1)


def learned(heads: MedusaHeads, model: Any, text: list[int], steps: int) -> None:
    """Let a drafter learn a text by heart, in part, so that some guesses are right."""
    backbone, ids = Backbone(model, heads.config.feature_layers), torch.tensor([text])
    hidden, lm_head = backbone.hidden_states(ids, use_cache=False).detach(), lm_head_for(heads, backbone)
    count = heads.config.num_heads
    labels = torch.stack([ids[0].roll(-2 - head) for head in range(count)])
    if heads.vocabulary is not None:
        places = torch.full((VOCAB,), -100)
        labels = places.index_copy(0, heads.vocabulary, torch.arange(N))[labels]
    inner = [parameter for name, parameter in heads.named_parameters() if name not in ("lm_heads", "embedding.weight")]
    optimizer = torch.optim.Adam(inner, lr=0.01)
    for _ in range(steps):
        logits = heads(heads.inputs(hidden, ids, backbone.embed), lm_head)[:, 0, : -1 - count]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, : -1 - count].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def lengths_of(drafter: Drafter, session: Session) -> list[int]:
    return [step.lengths[0] for step in run_steps(session, drafter, AcceptanceRule("greedy"))]


LEARNED = {"z-lab, windows": 6, "DSpark": 12, "DFlash 2": 7, "speculators, dspark": 24}  # steps: some guesses are right


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in ("DSpark", "DFlash 2"))) for name in LEARNED]
)
def test_a_chain_accepts_what_the_projects_greedy_walk_does_in_every_step(name: str, tmp_path: Path) -> None:
    layout, model, prompt, new = LAYOUTS[name], shared_model(**MODEL), random_ids(5, seed=8), 28
    text = plain(model, prompt, max_new_tokens=new, eos_token_id=None)
    heads, _ = loaded(layout, tmp_path)
    learned(heads, model, prompt + text, LEARNED[name])
    tensors = {name: tensor.detach() for name, tensor in to_dflash(heads.checkpoint()).items()}
    if heads.vocabulary is not None:
        tensors["d2t"] = heads.vocabulary - torch.arange(N)
    wanted, at = list[int](), 0
    while at < new - layout.tokens:
        guesses = walk(layout, tensors, model, prompt + text[: at + 1])
        right = [guess == token for guess, token in zip(guesses, text[at + 1 :], strict=False)]
        wanted.append(1 + (right.index(False) if False in right else len(right)))
        at += wanted[-1]
    requests = prepare(model, [prompt], max_new_tokens=new, do_sample=False, eos_token_id=None)
    session = Session(model, requests, slack=8, heads=heads)
    tree = with_shortlist(Tree.chain(heads.config.num_heads), 16 if "pairwise" in layout.parts else VOCAB)
    found = lengths_of(TrainedHeads(heads, tree).start(session), session)
    assert found[: len(wanted)] == wanted
    assert sum(wanted) > len(wanted) + 4, "hardly any guess is right: no power"
    assert len(set(wanted)) > 1, "guesses are right as often in each step: no power"
    assert session.sequences.new_ids[0] == text
    require_reference(layout, tensors, model, prompt, text, found)


def require_reference(
    layout: Layout, tensors: Tensors, model: Any, prompt: list[int], text: list[int], found: list[int]
) -> None:
    """Where z-lab's package is installed, its loop accepts as many tokens in every step but the last, shorter ones."""
    try:
        from dflash import model as package
    except ImportError:
        return
    if "DFlash" not in layout.config.get("architectures", [""])[0]:
        return
    drafter, prompts, room = reference(package, layout, tensors), torch.tensor([prompt]), len(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "_cuda_time", float)
        theirs = package.dflash_generate(drafter, model, prompts, room, None, return_stats=True)
    assert theirs.output_ids[0, len(prompt) :].tolist() == text
    whole = [end for end in itertools.accumulate(theirs.acceptance_lengths) if end <= room - layout.tokens]
    assert len(whole) > 5
    assert theirs.acceptance_lengths[: len(whole)] == found[: len(whole)]


def reference(package: Any, layout: Layout, tensors: Tensors) -> Any:
    from transformers import Qwen3Config

    given = {key: value for key, value in layout.config.items() if key not in ("model_type", "architectures")}
    config = Qwen3Config(**given, **({"dflash_config": layout.inner} if layout.inner else {}))
    drafter = getattr(package, layout.config["architectures"][0])(config).eval()
    named = {key + (".weight" if key.endswith("_codebook") else ""): tensor for key, tensor in tensors.items()}
    drafter.load_state_dict(named, strict=True)
    return drafter


@pytest.mark.parametrize("name", REFERENCE)
@torch.no_grad()
def test_z_labs_package_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    package = pytest.importorskip("dflash.model")
    layout, model, ids = LAYOUTS[name], shared_model(**MODEL), random_ids(12, seed=3)
    heads, tensors = loaded(layout, tmp_path)
    drafter, found, start = reference(package, layout, tensors), logits_of(heads, model, ids), 7
    states = model(torch.tensor([ids[:start]]), output_hidden_states=True).hidden_states
    noise = package._raw_input_embeddings(model, torch.tensor([[ids[start]] + [MASK] * 3]), layout.scales[0])
    hidden = drafter(
        target_hidden=package.extract_context_feature(states, drafter.target_layer_ids),
        noise_embedding=noise,
        position_ids=torch.arange(start + 4)[None],
    )[0, 1:]
    wanted = drafter.compute_logits(hidden, model.lm_head)
    for guess, x in enumerate(hidden):
        wanted[guess] += edges(tensors, x, ids[start + guess])
    torch.testing.assert_close(found[start - 1], wanted, rtol=1e-4, atol=2e-4)


def test_a_mask_embedding_takes_the_place_of_the_mask_token(tmp_path: Path) -> None:
    layout, model, ids = LAYOUTS["z-lab"], shared_model(**MODEL), random_ids(12, seed=3)
    heads, _ = loaded(layout, tmp_path)
    vector = model.get_input_embeddings().weight[MASK].detach().clone()
    other = Layout(Z_LAB, layout.read, inner={"target_layer_ids": [0, 3, 4]})
    for content in (vector, {"embedding": vector[None], "mask_token_id": MASK}):
        torch.save(content, tmp_path / "mask_embedding.pt")
        masked, _ = loaded(other, tmp_path)
        assert torch.equal(logits_of(masked, model, ids), logits_of(heads, model, ids))
    masked.save_pretrained(tmp_path / "ours")
    again = MedusaHeads.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits_of(again, model, ids), logits_of(heads, model, ids))


ADDED: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "gates": ({"layers.0.self_attn.g_proj.weight": torch.ones(8, H)}, {}, "gates cannot be loaded"),
    "biases": ({"layers.0.self_attn.q_proj.bias": torch.ones(A * D)}, {}, "attention with biases"),
    "sinks": ({"layers.1.self_attn.sinks": torch.ones(A)}, {}, "attention sinks"),
    "MLA": ({"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(8, H)}, {}, "latent attention"),
    "Gemma": ({"layers.0.pre_feedforward_layernorm.weight": torch.ones(H)}, {}, "Gemma's shape"),
    "gated edges": ({"markov_head.gate_proj.weight": torch.ones(8, H)}, {}, "another type than vanilla"),
    "rnn edges": ({}, {"markov_rank": 4, "markov_head_type": "rnn"}, "markov_head_type is 'rnn'"),
    "architecture": ({}, {"architectures": ["LagunaDraftModel"]}, "LagunaDraftModel"),
    "speculators": ({}, {"speculators_model_type": "xpress"}, "xpress"),
    "layout": ({}, {"speculators_model_type": "dspark"}, "no sample_from_anchor"),
    "mask": ({}, {"dflash_config": {"target_layer_ids": [0, 3, 4]}}, "mask_token_id is None"),
    "layers": ({}, {"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 1}}, "fc.weight joins"),
    "confidence of gates": ({"confidence_head.gate.weight": torch.ones(1, H)}, {}, "another form than DSpark's"),
    "confidence at top level": ({"confidence_proj.weight": torch.ones(1, H)}, {}, "another form than DSpark's"),
    "confidence alone": ({"confidence_head.proj.weight": torch.ones(1, H)}, {}, "confidence without Markov edges"),
    "quantised": ({"layers.0.mlp.down_proj.weight_scale": torch.ones(1)}, {}, "quantised; use the unquantised ones"),
    "blocks of 8 bits": ({"layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}, {}, "quantised; use the unquan"),
    "unknown": ({"layers.0.extra.weight": torch.ones(H)}, {}, "layers.0.extra.weight"),
    "layer types": ({}, {"layer_types": 2 * ["chunked_attention"]}, "chunked_attention"),
}


@pytest.mark.parametrize("name", ["z-lab", "DSpark"])
def test_weights_of_8_bits_without_their_factors_are_refused(name: str, tmp_path: Path) -> None:
    tensors = LAYOUTS[name].tensors()
    key = "layers.0.mlp.down_proj.weight"
    LAYOUTS[name].write(tmp_path, tensors | {key: tensors[key].to(torch.float8_e4m3fn)})
    with pytest.raises(RequestError, match=f"holds {key}: its weights are quantised"):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("case", ADDED)
def test_what_is_not_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    added, config, message = ADDED[case]
    layout = LAYOUTS["z-lab"]
    wrong = Layout(layout.config | config, layout.read, inner={} if "dflash_config" in config else layout.inner)
    wrong.write(tmp_path, layout.tensors() | added)
    with pytest.raises(RequestError, match=message):
        MedusaHeads.from_pretrained(tmp_path)


def test_heads_are_saved_and_loaded_in_our_format(tmp_path: Path) -> None:
    for name in ("DSpark", "DFlash 2"):
        heads, tensors = loaded(LAYOUTS[name], tmp_path / name)
        heads.save_pretrained(tmp_path / "ours")
        again = MedusaHeads.from_pretrained(tmp_path / "ours")
        for back, tensor in to_dflash(again.checkpoint()).items():
            assert torch.equal(tensor, tensors.pop(back)), back
        assert not tensors, "read and lost"
        assert again.config.to_dict() == heads.config.to_dict()
        assert load_file(tmp_path / "ours" / "medusa_lm_head.safetensors").keys() == heads.state_dict().keys()
