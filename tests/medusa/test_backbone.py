"""medusa/backbone.py: hidden states and logits of stock models, rejected models, and fingerprints."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from medusa import RequestError
from medusa.backbone import Backbone, new_layers, require_tree_support, usual_layers
from medusa.fingerprint import differs, fingerprint
from medusa.loading import LoadOptions, load_backbone, load_config
from tests.helpers import COMMON, FAMILIES, HIDDEN, REFUSED, VOCAB, at_once, parts_of, random_ids, tiny_model

SPLITS = {family: family not in ("gemma2", "cohere", "llama4_text") for family in FAMILIES}
IDS = torch.tensor([random_ids(9), random_ids(9, seed=1)])


def head_input(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The LM head's input, recorded by a hook."""
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(input_ids=ids, use_cache=False)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fast_and_full_path_equal_the_model(family: str) -> None:
    """Logits and hidden states equal the model's bit for bit, also for models that cap or scale logits."""
    model = tiny_model(family)
    backbone = Backbone(model)
    assert backbone.splits == SPLITS[family]
    hidden, logits = backbone.forward(IDS, DynamicCache())
    assert torch.equal(logits, model(input_ids=IDS, past_key_values=DynamicCache()).logits)
    assert torch.equal(hidden, head_input(model, IDS))
    assert torch.equal(backbone.hidden_states(IDS, use_cache=False), hidden)
    assert (backbone.hidden_size, backbone.vocab_size, backbone.context) == (HIDDEN, VOCAB, 128)


@torch.no_grad()
def test_a_cap_that_the_config_gets_later_is_noticed() -> None:
    """Until then, the logits are those of base and LM head, which leave the cap out."""
    model = tiny_model("gemma2", final_logit_softcapping=None)
    for cap in (None, 3.0, None):
        model.config.final_logit_softcapping = cap
        backbone = Backbone(model)
        assert backbone.splits == (cap is None)
        logits = backbone.forward(IDS, DynamicCache()).logits
        assert torch.equal(logits, model(input_ids=IDS, past_key_values=DynamicCache()).logits)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_the_lm_head_reads_only_the_last_position_of_each_row(family: str) -> None:
    backbone = Backbone(tiny_model(family))
    everything = backbone.forward(IDS, DynamicCache())
    last = backbone.forward(IDS, DynamicCache(), last=torch.tensor([8, 3]))
    assert last.logits.shape == (2, VOCAB)
    for row, position in enumerate((8, 3)):
        assert torch.equal(last.hidden[row], everything.hidden[row, position])
        # One row instead of nine through the LM head: sums of 32 products in another order.
        torch.testing.assert_close(last.logits[row], everything.logits[row, position], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_feature_layers_are_the_hidden_states_of_transformers(family: str) -> None:
    """In one forward, next to the same logits; the last number is the LM head's input, which heads usually read."""
    model, layers = tiny_model(family), [1, 0, 2]
    backbone = Backbone(model, layers)
    states = model(input_ids=IDS, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([states[1], states[0], head_input(model, IDS)], dim=-1)
    assert torch.equal(backbone.hidden_states(IDS, use_cache=False), expected)
    hidden, logits = backbone.forward(IDS, DynamicCache())
    assert torch.equal(hidden, expected)
    assert torch.equal(logits, Backbone(model).forward(IDS, DynamicCache()).logits)
    for all_hidden in (False, True):
        last = backbone.forward(IDS, DynamicCache(), last=torch.tensor([8, 3]), all_hidden=all_hidden)
        wanted = expected if all_hidden else expected[torch.arange(2), torch.tensor([8, 3])]
        assert torch.equal(last.hidden, wanted)
        torch.testing.assert_close(last.logits, logits[torch.arange(2), torch.tensor([8, 3])], rtol=1e-5, atol=1e-5)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    assert sum(hooks) == 0, "a hook stayed on the model"


@pytest.mark.parametrize(
    ("family", "hooked"),
    [
        ("llama", "model.layers.0.mlp"),
        ("llama", "model.layers.1"),
        ("gemma2", "model.layers.0.mlp"),
        ("gemma2", "lm_head"),
    ],
)
@torch.no_grad()
def test_a_copy_made_in_a_forward_is_a_clean_model(family: str, hooked: str) -> None:
    """A hook of the user's own makes the copy, and runs it at once.

    A hook of a module that is recorded, or that holds one, gets the user's module. Its copies may hold hooks without
    effect, but the model is clean again."""
    model, other = tiny_model(family), torch.tensor([random_ids(9, seed=1)])
    expected = Backbone(model, [1, 0, 2]).hidden_states(IDS, use_cache=False)
    logits, parts = model(other).logits, parts_of(model)
    found: list[Any] = []

    def copied(module: Any, *_: Any) -> None:
        handle.remove()
        assert module is model.get_submodule(hooked)
        found.append(copy.deepcopy(model))
        assert torch.equal(found[0](other).logits, logits)

    handle = model.get_submodule(hooked).register_forward_hook(copied)
    assert torch.equal(Backbone(model, [1, 0, 2]).hidden_states(IDS, use_cache=False), expected)
    assert found
    assert parts_of(model) == parts
    if hooked == "model.layers.0.mlp":
        assert parts_of(found[0]) == parts


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_outputs_that_the_config_asks_for_come_once(family: str) -> None:
    """transformers hooks the layers of such a model in its first forward; a forward of a view must not do so again."""
    model = tiny_model(family)
    expected = Backbone(tiny_model(family), [1, 0, 2]).hidden_states(IDS, use_cache=False)
    model.config.output_hidden_states = True
    for _ in range(2):
        assert torch.equal(Backbone(model, [1, 0, 2]).hidden_states(IDS, use_cache=False), expected)
    assert len(model(IDS).hidden_states) == model.config.num_hidden_layers + 1


@torch.no_grad()
def test_a_parametrized_lm_head_is_recorded() -> None:
    """torch refuses to pickle such a module, and to copy it by the functions of pickle."""
    model = tiny_model("gemma2")
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    hidden, logits = Backbone(model).forward(IDS, DynamicCache())
    assert torch.equal(logits, model(IDS).logits)
    assert torch.equal(hidden, head_input(model, IDS))


def test_the_layers_that_heads_read_by_default() -> None:
    assert usual_layers(32) == (2, 16, 29)
    assert new_layers(32) == [2, 16, 29]
    assert new_layers(8) == [2, 4, 5]
    assert [new_layers(count) for count in (7, 5, 2, 1)] == [[1, 3, 6], [1, 2, 4], [1, 1, 1], [0, 0, 0]]
    assert Backbone(tiny_model(num_hidden_layers=9), "usual").feature_layers == (2, 4, 6)


def test_layers_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(RequestError, match=r"heads read the layers \[3\], but the backbone has 2 layers"):
        Backbone(tiny_model(), [3])
    with pytest.raises(RequestError, match="the backbone has 2 layers"):
        Backbone(tiny_model(), "usual")


@torch.no_grad()
def test_the_last_layer_alone_needs_no_hook() -> None:
    model = tiny_model()
    backbone = Backbone(model, [2])
    assert torch.equal(backbone.hidden_states(IDS, use_cache=False), head_input(model, IDS))
    assert torch.equal(backbone.forward(IDS, DynamicCache()).hidden, head_input(model, IDS))


def test_a_model_with_several_states_per_token_is_refused() -> None:
    """Between its layers, Gemma-3n holds four versions of each hidden state."""
    with pytest.raises(RequestError, match=r"Gemma3nForCausalLM has several states per token; take heads without"):
        Backbone(tiny_model("gemma3n_text"), [0, 1]).hidden_states(IDS, use_cache=False)


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
@torch.no_grad()
def test_caps_and_scales_keep_the_order_of_logits(family: str) -> None:
    """Heads that share the LM head can therefore omit caps and scales."""
    backbone = Backbone(tiny_model(family))
    hidden, logits = backbone.forward(IDS, DynamicCache())
    assert not torch.equal(backbone.lm_head(hidden), logits)
    assert torch.equal(backbone.lm_head(hidden).argmax(-1), logits.argmax(-1))


@torch.no_grad()
def test_a_forward_of_another_thread_changes_no_hidden_states() -> None:
    """The other forward runs after hooks have recorded states, and before these are read."""
    model = tiny_model("gemma2")  # its LM head is hooked, too
    ids = [torch.tensor([random_ids(9, seed=seed)]) for seed in range(2)]
    expected = [Backbone(model, [1, 0, 2]).hidden_states(each, use_cache=False) for each in ids]
    found: list[torch.Tensor] = []

    @torch.no_grad()
    def other(_: int) -> torch.Tensor:
        return Backbone(model, [1, 0, 2]).hidden_states(ids[1], use_cache=False)

    def in_between(*_: Any) -> None:
        hook.remove()
        found.extend(at_once(other))

    backbone = Backbone(model, [1, 0, 2])
    hook = model.get_output_embeddings().register_forward_hook(in_between)
    found.append(backbone.hidden_states(ids[0], use_cache=False))
    assert torch.equal(found[0], expected[1])
    assert torch.equal(found[1], expected[0])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_model_is_unchanged_after_a_forward(family: str) -> None:
    model = tiny_model(family)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    backbone = Backbone(model)
    backbone.forward(IDS, DynamicCache())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_the_hook_is_removed_when_the_forward_fails() -> None:
    backbone = Backbone(tiny_model("gemma2"))
    with pytest.raises(IndexError):
        backbone.forward(torch.tensor([[VOCAB]]), DynamicCache())
    assert not backbone.head._forward_pre_hooks


def noisy(module: torch.nn.Module) -> None:
    """Make a module's output differ by rounding noise in every forward, as kernels with atomic additions do."""

    def add_noise(module: torch.nn.Module, args: Any, out: Any) -> Any:
        states = out if isinstance(out, torch.Tensor) else out[0]
        states.mul_(1 + 4 * torch.finfo(states.dtype).eps * (2 * torch.rand_like(states) - 1))

    module.register_forward_hook(add_noise)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("gemma2", torch.float32), *((name, torch.bfloat16) for name in ("llama", "gpt2", "cohere", "llama4_text"))],
)
@torch.no_grad()
def test_rounding_noise_does_not_change_whether_the_lm_head_splits_off(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    noisy(model.get_decoder())
    noisy(model.get_output_embeddings())
    assert not torch.equal(model(IDS).logits, model(IDS).logits)
    assert Backbone(model).splits == SPLITS[family]


def test_a_base_that_the_model_calls_in_another_way_does_not_split_off() -> None:
    """The base alone must give what it gives in the model."""
    model = tiny_model("llama")
    call = type(model.model).forward

    def with_other_positions(**kwargs: Any) -> Any:
        inside = kwargs.get("attention_mask", "alone") is None  # a model passes its mask on; we pass none
        shift = 3 if inside else 0
        positions = torch.arange(kwargs["input_ids"].shape[1])[None] * (1 + shift)
        return call(model.model, **kwargs | {"position_ids": positions})

    model.model.forward = with_other_positions
    assert not Backbone(model).splits


def test_a_model_is_checked_only_once() -> None:
    """Each request creates a Backbone; only the first runs the self-test's two forwards."""
    model, forwards = tiny_model("llama"), []
    model.model.register_forward_hook(lambda *args: forwards.append(1))
    Backbone(model)
    assert len(forwards) == 2
    assert Backbone(model).splits
    assert len(forwards) == 2


def test_an_unreferenced_model_is_freed() -> None:
    """References to old models would keep gigabytes in memory."""
    model = tiny_model("llama")
    gone = weakref.ref(model)
    Backbone(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_replaced_lm_head_is_detected() -> None:
    """`resize_token_embeddings`, adapters and quantisation replace the module."""
    model = tiny_model("llama")
    Backbone(model)
    model.resize_token_embeddings(VOCAB + 8)
    assert Backbone(model).head is model.get_output_embeddings()


@pytest.mark.parametrize("family", REFUSED)
def test_models_without_tree_support_are_rejected_by_name(family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(RequestError) as error:
        require_tree_support(model)
    assert type(model).__name__ in str(error.value)
    assert model.config.model_type in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "paged|eager"])
def test_attention_without_mask_support_is_rejected(attention: str) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation_internal = attention
    with pytest.raises(RequestError, match="sdpa"):
        require_tree_support(model)


def test_the_longrope_boundary() -> None:
    """The config gives the boundary, also with parameters per kind of layer; other rotary types have no boundary."""
    assert Backbone(tiny_model("phi3, longrope")).rope_boundary == 32
    for family in ("llama", "llama, dynamic rope", "gpt2", "gemma3_text"):
        assert Backbone(tiny_model(family)).rope_boundary is None
    model = tiny_model("gemma3_text")
    longrope = tiny_model("phi3, longrope").config.rope_parameters
    model.config.rope_parameters = model.config.rope_parameters | {"full_attention": longrope}
    assert Backbone(model).rope_boundary == 32


def test_fingerprints_ignore_the_dtype_and_distinguish_models() -> None:
    model = tiny_model("llama")
    known = fingerprint(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert not differs(tiny_model("llama").to(dtype), known), dtype
    assert differs(tiny_model("llama", seed=1), known)
    assert differs(tiny_model("mistral", num_hidden_layers=3), known)
    assert not differs(model, {})
    half = fingerprint(tiny_model("llama").to(torch.bfloat16))
    assert not differs(model, half)
    assert half["dtype"] == "bfloat16"


def test_rounded_copies_are_one_model() -> None:
    """In another dtype, or loaded in float32 from files in another dtype, as on a CPU."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    copies = [tiny_model("llama", initializer_range=0.02).to(dtype) for dtype in dtypes]
    copies += [copy.deepcopy(model).float() for model in copies[1:]]
    for one, other in itertools.product(copies, copies):
        assert not differs(one, fingerprint(other))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_adapter_has_another_fingerprint(stored: torch.dtype, dtype: torch.dtype) -> None:
    """After three steps of training at a small rate, on two of seven layers of a block.

    Most weights change by less than a rounding to bfloat16. The mean change is a fraction of 0.5 % of the mean weight,
    which earlier versions allowed."""
    model = tiny_model("llama", initializer_range=0.02).to(stored).to(dtype)
    known, ids = fingerprint(model), torch.tensor([random_ids(16)])
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=RATES[dtype])
    for _ in range(3):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = adapted.merge_and_unload()
    assert differs(merged, known)
    found, expected = (torch.tensor(sample["weights"]) for sample in (fingerprint(merged), known))
    assert (found - expected).abs().mean() < 5e-4 * expected.abs().mean()


RATES = {torch.float32: 1e-5, torch.bfloat16: 5e-5}  # a smaller change of a weight in bfloat16 is rounded away


def test_loading(tmp_path: Any) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    loaded = load_backbone(str(tmp_path))
    assert loaded.tokenizer is None
    assert loaded.model.dtype == torch.float32
    assert torch.equal(loaded.model(IDS).logits, model(IDS).logits)
    assert load_backbone(str(tmp_path), LoadOptions("bfloat16")).model.dtype == torch.bfloat16
    assert load_backbone(str(tmp_path), LoadOptions(attention="eager")).model.config._attn_implementation == "eager"
    assert load_config(str(tmp_path)).vocab_size == VOCAB


@pytest.mark.parametrize(
    ("family", "chosen", "dtype"),
    [("llama", "sdpa", "float16"), ("gemma2", "eager", "float32"), ("gpt_oss", "eager", "bfloat16")],
)
def test_attention_is_eager_by_default_where_there_is_no_sdpa(
    tmp_path: Any, family: str, chosen: str, dtype: str
) -> None:
    model = tiny_model(family, attn_implementation="eager")
    if chosen == "eager" and model._supports_sdpa:
        pytest.skip("this version of transformers runs it with sdpa")
    model.save_pretrained(tmp_path)
    assert load_backbone(str(tmp_path), LoadOptions(dtype)).model.config._attn_implementation == chosen
    if chosen == "eager":
        with pytest.raises(RequestError, match="does not support an attention implementation") as error:
            load_backbone(str(tmp_path), LoadOptions(dtype, attention="sdpa"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "request_", [{"dtype": "int4"}, {"device": "toaster"}, {"device": "cuda"}, {"attention": "telepathy"}]
)
def test_bad_requests_are_refused_in_one_line(tmp_path: Any, request_: dict) -> None:
    if request_.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(RequestError) as error:
        load_backbone(str(tmp_path), LoadOptions(**request_))
    assert next(iter(request_.values())) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model_type": "llama"}', '{"model_type": "nonsense"}'])
def test_a_missing_backbone_is_rejected(tmp_path: Any, content: str | None) -> None:
    folder = tmp_path / "absent"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    with pytest.raises(RequestError) as error:
        load_backbone(str(folder))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_weights_are_refused(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RequestError, match="no backbone at"):
        load_backbone(str(tmp_path))


def test_common_token_ids_are_not_eos() -> None:
    """Otherwise a test could end early when a random model writes a default config's EOS id."""
    assert COMMON["eos_token_id"] is None
    assert all(tiny_model(family).generation_config.eos_token_id is None for family in FAMILIES)
