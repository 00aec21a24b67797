"""decode/tree_check.py: the self-test passes models with tree support and detects every kind of error."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel

from decode import generate, reader
from decode import tree_check as capability
from decode.cache import TreeCache
from decode.reader import by_slot
from decode.tree_check import TreeCheck, check_tree_forward, require_tree_forward
from medusa import RequestError, tree_support
from medusa.backbone import Backbone
from medusa.tree_support import LayerKind, LayerKinds, additive
from tests.helpers import FAMILIES, REFUSED, at_once, random_heads, random_ids, rename_attention, tiny_model, weekly
from tiny_models import RECURRENT

WINDOWED = ["mistral", "qwen2", "gemma3_text", "gemma2", "llama4_text"]
PROMPT = torch.tensor([random_ids(6)])
LONGROPE = "phi3, longrope"


def long_windows(family: str, **settings: Any) -> Any:
    """A model whose window is longer than the self-test's prompts, as in real models."""
    chunks = {"attention_chunk_size": 4096} if family == "llama4_text" else {"sliding_window": 4096}
    return tiny_model(family, max_position_embeddings=8192, **chunks, **settings)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, (torch.float32, torch.bfloat16)[number % 2]) for number, family in enumerate(FAMILIES)),
        *(("llama", dtype) for dtype in (torch.float64, torch.float16)),
        *weekly(*((family, (torch.bfloat16, torch.float32)[number % 2]) for number, family in enumerate(FAMILIES))),
    ],
)
def test_models_with_tree_support_pass(family: str, dtype: torch.dtype) -> None:
    check = check_tree_forward(tiny_model(family, dtype=dtype))
    assert check.ok, check.reason
    # Half of what would still pass: the limits leave room for machines that round otherwise.
    assert check.error < check.limit / 2
    assert check.control > 0.1, "no power"


def test_recurrent_layers_round_as_float32_in_any_dtype() -> None:
    """transformers computes their states in float32: its own forwards differ by as much in a model of float64."""
    layers = RECURRENT["qwen3_5_text"]["layer_types"]
    deep: dict[str, Any] = {"num_hidden_layers": 8, "layer_types": (8 * layers)[:8]}
    check = check_tree_forward(tiny_model("qwen3_5_text", seed=3, dtype=torch.float64, **deep))
    assert 1e-5 < check.error < check.limit / 2, "more than rounding in float64, or no power"


# Broken masks, positions and caches


Nodes = tuple[Tensor, Tensor, Tensor, Tensor]
"""What `decode.reader.additive_masks` knows of nodes: what they see of each other, lengths of texts, and depths."""


def all_visible(nodes: Nodes, slots: int, kind: LayerKind) -> Tensor:
    """A mask that lets every node attend to all earlier nodes."""
    own, *rest = nodes
    return kind.limited(*by_slot(torch.ones_like(own).tril(), *rest, slots))


def windows_by_slot(nodes: Nodes, slots: int, kind: LayerKind) -> Tensor:
    """Windows that count slots, as transformers' own mask builder does."""
    own, lengths, *_ = nodes
    query = lengths[:, None, None] + torch.arange(own.shape[1])[:, None]
    return kind.limited(by_slot(*nodes, slots)[0], query, torch.arange(slots))


def no_windows(nodes: Nodes, slots: int, kind: LayerKind) -> Tensor:
    return by_slot(*nodes, slots)[0]


def one_too_wide(nodes: Nodes, slots: int, kind: LayerKind) -> Tensor:
    wider = kind._replace(window=kind.window and kind.window + 1, chunk=kind.chunk and kind.chunk + 1)
    return wider.limited(*by_slot(*nodes, slots))


def plant(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    """Let readers make the masks of a `broken` function."""

    def masks(layers: LayerKinds, dtype: torch.dtype, nodes: Nodes, slots: int) -> Any:
        return layers.masks(lambda kind: additive(broken(nodes, slots, kind), dtype)[:, None])

    monkeypatch.setattr(reader, "additive_masks", masks)


@pytest.mark.parametrize(
    ("broken", "family", "dtype"),
    [  # bfloat16 hides more than float32
        (all_visible, "gpt2", torch.bfloat16),
        (all_visible, "llama", torch.float32),
        (one_too_wide, "llama4_text", torch.float32),
        (no_windows, "llama4_text", torch.bfloat16),
        (windows_by_slot, "gemma3_text", torch.bfloat16),
        *((one_too_wide, family, torch.bfloat16) for family in WINDOWED),
    ],
)
def test_wrong_masks_are_caught(broken: Any, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models include some with windows far longer than the self-test."""
    model = long_windows(family, dtype=dtype) if family in WINDOWED else tiny_model(family, dtype=dtype)
    assert check_tree_forward(model).ok
    plant(monkeypatch, broken)
    check = check_tree_forward(model)
    assert not check.ok
    assert check.error > 1.5 * check.limit
    assert f"differs from plain forwards by {check.error:.2g}" in str(check.reason)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_by_slot_are_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Backbone.forward

    def by_slot(self: Backbone, ids: Tensor, cache: TreeCache, *rest: Any, **kwargs: Any) -> Any:
        start = torch.tensor(cache.lengths)[:, None]
        return forward(self, ids, cache, *rest, **kwargs | {"position_ids": start + torch.arange(ids.shape[1])})

    monkeypatch.setattr(Backbone, "forward", by_slot)
    assert not check_tree_forward(tiny_model(family)).ok


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_cache_that_keeps_the_wrong_nodes_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tree reads the nodes kept from the first."""
    commit = TreeCache.commit

    def first_nodes(self: TreeCache, path: Tensor, counts: Tensor) -> None:
        commit(self, None, counts)

    monkeypatch.setattr(TreeCache, "commit", first_nodes)
    check = check_tree_forward(tiny_model(family))
    assert not check.ok


def test_an_attention_with_another_name_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's eager branch has no mask in a prefill; the self-test reads prompts as decoding does."""
    assert check_tree_forward(tiny_model("falcon")).ok
    rename_attention(monkeypatch)
    assert not check_tree_forward(tiny_model("falcon")).ok


def test_a_mask_that_is_added_as_0_and_1_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention does this to boolean masks without an error."""
    monkeypatch.setattr(reader, "additive", lambda allowed, dtype: allowed)
    assert not check_tree_forward(tiny_model("llama", attn_implementation="eager")).ok
    assert check_tree_forward(tiny_model("llama", attn_implementation="sdpa")).ok, "sdpa takes both"


def test_an_encoder_is_named() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    for is_decoder in (False, True):
        model = BertLMHeadModel(BertConfig(vocab_size=64, is_decoder=is_decoder, **sizes)).eval()
        check = check_tree_forward(model)
        assert check.ok == is_decoder
        assert is_decoder or "is_decoder is false in its config" in str(check.reason)


@pytest.mark.parametrize("family", [family for family in REFUSED if family != "t5"])
def test_models_rejected_by_name_also_fail_the_numeric_test(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder-decoder models are left out, as they have no plain forward."""
    model = tiny_model(family)
    with pytest.raises(RequestError) as by_name:
        require_tree_forward(model)
    monkeypatch.setattr(capability, "require_tree_support", lambda model: None)
    with pytest.raises(RequestError) as by_number:
        require_tree_forward(model)
    for error in (by_name, by_number):
        assert str(error.value).startswith(f"{type(model).__name__} ({model.config.model_type}) cannot hold a tree: ")
        assert "\n" not in str(error.value)
    assert "a tree forward" in str(by_number.value)


def test_why_gpt_neo_is_rejected_by_name() -> None:
    """GPT-Neo's window is built into the model and longer than the self-test, which therefore cannot detect it."""
    assert "gpt_neo" in tree_support.MASK_BLIND
    assert check_tree_forward(tiny_model("gpt_neo", window_size=256)).ok


def test_why_mpt_is_rejected_by_name() -> None:
    """MPT's biases are smaller than rounding in half precision, but not in float32."""
    assert "mpt" in tree_support.MASK_BLIND
    assert not check_tree_forward(tiny_model("mpt")).ok
    assert check_tree_forward(tiny_model("mpt", dtype=torch.bfloat16)).ok


# What else can be in the way


def test_train_mode_with_dropout_is_rejected_with_a_remedy() -> None:
    model = tiny_model("llama", attention_dropout=0.5).train()
    with pytest.raises(RequestError, match=r"train mode.*model\.eval\(\)"):
        require_tree_forward(model)
    require_tree_forward(model.eval())


def test_train_mode_without_dropout_is_accepted() -> None:
    require_tree_forward(tiny_model("llama").train())


def test_non_finite_logits_are_reported() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0] = torch.inf
    with pytest.raises(RequestError, match="not finite in float32"):
        require_tree_forward(model)


@pytest.mark.parametrize(
    ("family", "context"),
    [*(("gpt2", context) for context in (9, 12, 20, 21)), ("llama", 9), ("opt", 20), (LONGROPE, 9), (LONGROPE, 21)],
)
def test_short_contexts_use_shorter_prompts(family: str, context: int) -> None:
    """Learned positions have no row beyond the end, and longrope rotates all nodes differently beyond its boundary."""
    ends = {"max_position_embeddings": context}
    if family == LONGROPE:
        longrope = tiny_model(LONGROPE).config.rope_parameters | {"original_max_position_embeddings": context}
        ends = {"original_max_position_embeddings": context, "rope_parameters": longrope}
    check = check_tree_forward(tiny_model(family, **ends))
    assert check.ok, check.reason


def test_a_context_too_short_for_a_tree_is_reported() -> None:
    with pytest.raises(RequestError, match="context of 8 tokens is too short"):
        require_tree_forward(tiny_model("gpt2", max_position_embeddings=8))


def test_lower_matmul_precision_is_taken_into_account() -> None:
    """TF32 and autocast keep some ten bits of float32."""
    model = tiny_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        check = check_tree_forward(model)
    assert check.tolerance == capability.HALF_TOLERANCE
    assert check.ok
    torch.set_float32_matmul_precision("high")
    try:
        assert check_tree_forward(model).tolerance == capability.HALF_TOLERANCE
    finally:
        torch.set_float32_matmul_precision("highest")
    assert check_tree_forward(model).tolerance == 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_insensitive_to_masks_is_accepted(dtype: torch.dtype) -> None:
    """All tokens are equal to this model, so errors and control are rounding, and either may be larger."""
    model = tiny_model("llama", dtype=dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = model.model.embed_tokens.weight[0]
    check = check_tree_forward(model)
    assert check.ok, check.reason
    assert check.control < 0.02


def test_occasional_changes_of_experts_are_accepted() -> None:
    """Phi-3.5-MoE routes by a threshold: in bfloat16, rounding can change a token's expert and its node."""
    model = tiny_model("phimoe, longrope", dtype=torch.bfloat16)
    check = check_tree_forward(model)
    assert check.ok, check.reason


# Side effects


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text"])
def test_the_self_test_leaves_the_model_unchanged(family: str, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps no attribute, hook or short window, also after a failed forward, and no random number is used."""
    model = long_windows(family) if family in WINDOWED else tiny_model(family)
    Backbone(model)  # whose own trial is not the matter here
    if broken:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise IndexError("a broken model")

        monkeypatch.setattr(Backbone, "forward", fail)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    config, state, logits = model.config.to_dict(), torch.get_rng_state(), model(PROMPT).logits
    check = check_tree_forward(model)
    assert check.ok != broken
    if broken:
        assert check.reason == "a tree forward raises IndexError: a broken model"
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(PROMPT).logits, logits)


@pytest.mark.parametrize("family", ["gemma2", "llama4_text"])
def test_other_threads_see_no_short_window(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread runs the model during each of the self-test's forwards."""
    model, ids = long_windows(family), torch.tensor([random_ids(30)])
    expected, found = model(ids).logits, list[Tensor]()

    def meanwhile() -> None:
        found.extend(at_once(lambda _: model(ids).logits))

    for name in ("_plain", "_through_trees"):
        whole = getattr(capability, name)
        monkeypatch.setattr(capability, name, lambda *args, whole=whole: (meanwhile(), whole(*args))[1])
    assert check_tree_forward(model).ok
    assert len(found) == 3
    assert all(torch.equal(logits, expected) for logits in found)


def test_a_model_whose_forward_is_a_function_of_its_own_is_tested() -> None:
    """The function runs the modules that it was made for, not a copy of them."""
    model, calls = long_windows("mistral"), []
    forward = model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return forward(*args, **kwargs)

    model.forward = counting
    assert check_tree_forward(model).ok
    assert calls


def test_dropout_does_not_use_the_callers_generator() -> None:
    model, state = tiny_model("llama", attention_dropout=0.5).train(), torch.get_rng_state()
    assert not check_tree_forward(model).ok
    assert torch.equal(torch.get_rng_state(), state)


def test_out_of_memory_is_not_remembered_as_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later self-test must run again."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    model = tiny_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr(Backbone, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            require_tree_forward(model)
    require_tree_forward(model)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[TreeCheck]:
    seen: list[TreeCheck] = []

    def counting(model: Any) -> TreeCheck:
        seen.append(check_tree_forward(model))
        return seen[-1]

    monkeypatch.setattr(capability, "check_tree_forward", counting)
    return seen


def test_a_model_is_tested_once_for_all_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, model = counted(monkeypatch), tiny_model("llama", attn_implementation="sdpa")
    for _ in range(3):
        generate(model, random_heads(model), PROMPT, max_new_tokens=3, do_sample=False)
    assert len(seen) == 1
    model.set_attn_implementation("eager")
    generate(model, random_heads(model), PROMPT, max_new_tokens=3, do_sample=False)
    assert len(seen) == 2, "another attention is another matter"
    model.to(torch.bfloat16)
    generate(model, random_heads(model), PROMPT, max_new_tokens=3, do_sample=False)
    assert len(seen) == 3, "and so is another dtype"


def test_a_rejection_is_remembered_and_raised_by_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, model = counted(monkeypatch), tiny_model("mpt")
    monkeypatch.setattr(tree_support, "MASK_BLIND", {})
    for _ in range(2):
        with pytest.raises(RequestError, match=r"MptForCausalLM \(mpt\) cannot hold a tree: a tree forward differs"):
            generate(model, random_heads(model), PROMPT, max_new_tokens=3, do_sample=False)
    assert len(seen) == 1


def test_two_threads_test_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, model = counted(monkeypatch), long_windows("mistral")
    at_once(lambda _: require_tree_forward(model), 4)
    assert len(seen) == 1
    assert model.config.sliding_window == 4096


def test_an_unreferenced_model_is_freed() -> None:
    model = tiny_model("llama")
    gone = weakref.ref(model)
    require_tree_forward(model)
    del model
    gc.collect()
    assert gone() is None
