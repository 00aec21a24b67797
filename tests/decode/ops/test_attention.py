"""decode/ops/attention.py: transformers' sdpa without its copies, and attention over parts of the keys."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode import generate
from decode.cache import TreeCache
from decode.draft import Draft
from decode.ops import attention
from decode.ops.attention import SDPA, Run, attention_in_parts, grouped, num_parts, runs_of, sdpa_grouped
from decode.reader import Reader
from decode.topology import Topology
from medusa import Tree
from medusa.backbone import Backbone
from tests.helpers import (
    FIRST_TRANSFORMERS,
    FORMS,
    left_padded,
    plain,
    random_heads,
    random_ids,
    random_tree,
    shared_model,
    tiny_model,
)

CPU = torch.device("cpu")


def verify(model: Any) -> torch.Tensor:
    tree, reader = Topology.of(random_tree(9)), Reader(Backbone(model), TreeCache(model.config, 2, 40, CPU))
    with torch.no_grad():
        reader.prefill(torch.tensor([random_ids(12), random_ids(12, seed=1)]), [12, 7])
        ids = torch.tensor([random_ids(10, seed=2), random_ids(10, seed=3)])
        return reader(Draft(ids, tree)).logits


@pytest.mark.parametrize("family", ["llama", "mistral, window", "gemma3_text", "llama4_text"])
def test_grouped_attention_equals_sdpa_without_copies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads on two key heads give the same logits without a call of transformers' `repeat_kv`."""
    model, calls = tiny_model(family), []
    Backbone(model)  # tries out, once, how the model makes its logits
    stock = sdpa_attention.repeat_kv

    def counting(*args: Any) -> Any:
        calls.append(args)
        return stock(*args)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", counting)
    masks, repeated = list[Any](), attention.repeated
    monkeypatch.setattr(attention, "repeated", lambda mask, groups: masks.append(mask) or repeated(mask, groups))
    found = verify(model)
    assert not calls
    assert 0 < len(masks) == len({id(mask) for mask in masks}), "layers with the same mask make it again"
    with monkeypatch.context() as patch:
        patch.setattr("decode.reader.grouped", lambda *args: torch.no_grad())
        expected = verify(model)
    assert calls, "nothing was copied in the first place: no power"
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # float32, the same sums in another order at most


@pytest.mark.full  # machine code
@pytest.mark.parametrize("key_heads", [4, 2])
def test_compiled_layers_read_one_mask(key_heads: int) -> None:
    """torch.compile writes it to memory once, whatever it is computed from."""
    from torch._inductor.utils import run_and_get_code  # slow to import

    query, key, lengths = torch.randn(1, 4, 5, 8), torch.randn(1, key_heads, 64, 8), torch.tensor([9])
    config = tiny_model("llama").config

    @torch.no_grad()
    def layers() -> Tensor:
        hidden, seen = torch.arange(64) > lengths[:, None], query
        mask = torch.zeros(1, 1, 5, 64).masked_fill(hidden[:, None, None], -1e30)
        with grouped(config):
            for _ in range(3):
                seen = sdpa_grouped(torch.nn.Module(), seen, key, key, mask)[0].transpose(1, 2)
        return seen

    with grouped(config):
        found, (code,) = run_and_get_code(torch.compile(layers, fullgraph=True))
    torch.testing.assert_close(found, layers())
    assert sum("masked_fill" in line for line in code.splitlines() if line.startswith("cpp_fused")) == 1


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """A function that attends, and says whether transformers' sdpa did so, which repeats keys."""
    found, stock = list[Any](), sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *args: found.append(args) or stock(*args))
    module, query, key = torch.nn.Module(), torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    module.num_key_value_groups = 2

    def attends() -> bool:
        found.clear()
        with torch.no_grad():
            ALL_ATTENTION_FUNCTIONS[SDPA](module, query, key, key, torch.zeros(2, 1, 5, 5))
        return bool(found)

    return attends


def test_it_works_only_in_its_context(repeats: Callable[[], bool]) -> None:
    """Contexts may be nested, and end by errors; the name on the model never changes."""
    config = tiny_model("llama").config

    def fails() -> None:
        with grouped(config):
            with grouped(config):
                assert not repeats()
            assert not repeats()
            assert config._attn_implementation == SDPA
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert repeats()
    config._attn_implementation = "eager"
    with grouped(config):
        assert repeats()


def test_other_threads_do_not_notice(repeats: Callable[[], bool]) -> None:
    """While a forward runs here, a model in another thread gets transformers' sdpa, but in its own contexts."""
    config = tiny_model("llama").config

    def elsewhere() -> tuple[bool, bool, bool]:
        before = repeats()
        with grouped(config):
            inside = repeats()
        return before, inside, repeats()

    with ThreadPoolExecutor(1) as other:
        with grouped(config):
            assert other.submit(elsewhere).result() == (True, False, True)
            assert not repeats()
            theirs = grouped(config)
            other.submit(theirs.__enter__).result()
        assert repeats(), "the other thread's open context is not ours"
        other.submit(theirs.__exit__).result()


@pytest.mark.parametrize("allowed", [True, False])
def test_attention_by_cudnn_is_off_while_any_forward_runs(allowed: bool) -> None:
    """Forwards of two threads overlap, and one fails; afterwards the setting is the user's."""
    config, before = tiny_model("llama").config, torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        first, second = grouped(config), grouped(config)
        first.__enter__()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with ThreadPoolExecutor(1) as other:
            other.submit(second.__enter__).result()
            first.__exit__(ValueError)
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            other.submit(second.__exit__).result()
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_custom_sdpa_is_kept() -> None:
    def own(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not called here")

    stock = ALL_ATTENTION_FUNCTIONS[SDPA]
    AttentionInterface.register(SDPA, own)
    try:
        with grouped(tiny_model("llama").config):
            assert ALL_ATTENTION_FUNCTIONS[SDPA] is own
        assert ALL_ATTENTION_FUNCTIONS[SDPA] is own
    finally:
        AttentionInterface.register(SDPA, stock)


def test_what_decoding_never_asks_for_is_left_to_transformers() -> None:
    """No mask, gradients, one mask row for all queries, and options of other models."""
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    module, mask = torch.nn.Module(), torch.randn(2, 1, 5, 5)
    module.num_key_value_groups = 2
    stock = sdpa_attention.sdpa_attention_forward
    with torch.no_grad(), grouped(LlamaConfig(attn_implementation=SDPA)):
        for few in (None, mask[:, :, :1], mask[:1, :, :1]):
            assert torch.equal(sdpa_grouped(module, query, key, key, few)[0], stock(module, query, key, key, few)[0])
        one = key[:1]
        assert torch.equal(sdpa_grouped(module, query, one, one, mask)[0], stock(module, query, one, one, mask)[0])
        if not FIRST_TRANSFORMERS:
            with pytest.raises(ValueError, match="softcap"):
                sdpa_grouped(module, query, key, key, mask, softcap=30.0)
    with torch.enable_grad(), grouped(LlamaConfig(attn_implementation=SDPA)):
        assert torch.equal(sdpa_grouped(module, query, key, key, mask)[0], stock(module, query, key, key, mask)[0])


@pytest.mark.parametrize("lengths", [[6], [6, 6], [6, 3]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_token_is_a_single_query_in_bfloat16_on_amd(
    family: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain steps of any rows, with and without grouped queries: PyTorch's kernel is slow for single queries there."""
    monkeypatch.setattr("medusa.attention.FEW_HEADS", 0)
    model, queries, stock = tiny_model(family, dtype=torch.bfloat16), list[int](), F.scaled_dot_product_attention
    Backbone(model)  # tries out, once, how the model makes its logits

    def counting(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        queries.append(query.shape[2])
        return stock(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    prompts = left_padded([random_ids(length) for length in lengths])
    heads, tree = random_heads(model), Tree.chain(0)
    generate(model, heads, tree=tree, **prompts, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert len(queries) > model.config.num_hidden_layers, "no step was taken: no power"
    assert min(queries) > 1


# Attention in parts


def tensors(batch: int, heads: int, queries: int, slots: int, size: int = 16) -> list[torch.Tensor]:
    """Queries, keys, values and a mask; keys and values are the first slots of a larger buffer, as in a window."""
    query = torch.randn(batch, heads, queries, size)
    keys, values = torch.randn(2, batch, heads, slots + 64, size)
    seen = torch.rand(batch, 1, queries, slots) < 0.4
    seen[:, :, :, 0] = True  # the first token of a text is never hidden
    seen[:, :, :, slots // 2 :] = False  # whole parts are hidden, as after a short text
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    return [query, keys[:, :, :slots], values[:, :, :slots], mask]


@pytest.mark.parametrize("parts", [2, 8, 32])
@pytest.mark.parametrize(("batch", "heads", "queries"), [(1, 4, 1), (1, 2, 70), (3, 2, 5)])
def test_parts_give_the_attention_of_the_whole(batch: int, heads: int, queries: int, parts: int) -> None:
    query, key, value, mask = tensors(batch, heads, queries, 256)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    found = attention_in_parts(query, key, value, mask, 0.3, parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # float32: the same sums in another order


def test_a_part_that_is_hidden_whole_has_no_weight() -> None:
    """Even where its values are huge: the sum of weights of hidden keys is exactly 0."""
    query, key, value, mask = tensors(1, 2, 3, 256)
    value[:, :, 128:] = 1e30
    expected = F.scaled_dot_product_attention(query, key[:, :, :128], value[:, :, :128], attn_mask=mask[..., :128])
    torch.testing.assert_close(attention_in_parts(query, key, value, mask, 0.25, 8), expected, rtol=1e-5, atol=1e-6)


def test_hidden_keys_have_no_weight_where_scores_are_far_apart() -> None:
    """Empty slots hold zeros and score 0, while all keys of the text can score far below: they share a bias."""
    query, key, value, _ = tensors(1, 2, 3, 256)
    query[:], key[:, :, :20], key[:, :, 20:] = 1.0, -3e5, 0.0
    mask = torch.zeros(1, 1, 3, 256)
    mask[..., 20:] = torch.finfo(torch.float32).min
    expected = value[:, :, :20].mean(2, keepdim=True).expand(-1, -1, 3, -1)
    torch.testing.assert_close(attention_in_parts(query, key, value, mask, 0.25, 8), expected, rtol=1e-5, atol=1e-6)


def parts_of(shape: tuple[int, int, int], slots: int = 256, size: int = 8, dtype: torch.dtype = torch.float32) -> int:
    query, key = torch.empty(*shape, size, dtype=dtype), torch.empty(*shape[:2], slots, size, dtype=dtype)
    return num_parts(query, key, key, torch.empty(shape[0], 1, shape[2], slots, dtype=dtype))


@pytest.fixture
def compiling_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_of((1, 32, 1)) == 1, "eager steps have no use for it"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert parts_of((1, 32, 1)) == 1, "nor have CPUs"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((1, 32, 1), 8),  # plain decoding without grouped queries
        ((1, 32, 64), 8),
        ((1, 8, 4), 16),
        ((1, 8, 256), 8),
        ((1, 1, 8), 16),
        ((3, 32, 64), 8),
        ((4, 32, 64), 1),  # enough pieces for all multiprocessors
        ((16, 8, 1), 1),  # 16 calls would take longer than one
    ],
)
def test_a_gpu_gets_enough_pieces(compiling_on_a_gpu: None, shape: tuple[int, int, int], parts: int) -> None:
    assert parts_of(shape) == parts


@pytest.mark.parametrize("unfit", [{"slots": 250}, {"size": 12}, {"dtype": torch.float64}])
def test_what_the_kernel_cannot_read_is_not_split(compiling_on_a_gpu: None, unfit: dict[str, Any]) -> None:
    """Such as the keys of a model that the user has compiled."""
    assert parts_of((1, 32, 1), **unfit) == 1


def test_tensors_that_autocast_would_convert_are_not_split(compiling_on_a_gpu: None) -> None:
    """The kernel refuses them: under autocast, a Llama's queries and keys are float32 and its values bfloat16."""
    query, key = torch.empty(1, 32, 1, 8), torch.empty(1, 32, 256, 8)
    mask = torch.empty(1, 1, 1, 256)
    assert num_parts(query, key, key, mask) == 8
    assert num_parts(query, key, key.bfloat16(), mask) == 1
    assert num_parts(query, key, key, mask > 0) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert num_parts(query, key, key, mask) == 1


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2)])
def test_layers_attend_in_parts(heads: int, key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of transformers' sdpa, with and without grouped queries."""
    query, key, value, mask = tensors(2, heads, 6, 256)
    key, value = key[:, :key_heads], value[:, :key_heads]
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads // key_heads, True
    with torch.no_grad():
        expected = sdpa_attention.sdpa_attention_forward(module, query, key, value, mask, scaling=0.25)[0]
        monkeypatch.setattr(attention, "num_parts", lambda *args: 4)
        called = []
        stock = attention.attention_in_parts
        monkeypatch.setattr(attention, "attention_in_parts", lambda *args: called.append(args) or stock(*args))
        with grouped(LlamaConfig(attn_implementation="sdpa")):
            found = sdpa_grouped(module, query, key, value, mask, scaling=0.25)[0]
    assert called
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_runs_take_the_least_time_of_all_cuts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 8 rows, against each of their 128 cuts; a call costs as much as 20 slots."""
    monkeypatch.setattr(attention, "CALL", 2000)
    draw = random.Random(seed)
    widths = [draw.choice([10, 12, 30, 90]) for _ in range(draw.randint(2, 8))]

    def costs(runs: Sequence[tuple[int, int]]) -> int:
        return sum(20 + (end - start) * max(widths[start:end]) for start, end in runs)

    inner = range(1, len(widths))
    cuts = [[0, *cut, len(widths)] for count in range(len(widths)) for cut in combinations(inner, count)]
    found = [(run.rows.start, run.rows.stop) for run in runs_of(widths, 100)] or [(0, len(widths))]
    assert costs(found) == min(costs(list(pairwise(cut))) for cut in cuts)
    assert [run.width for run in runs_of(widths, 100)] in ([], [max(widths[start:end]) for start, end in found])


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_texts_in_runs_equal_generate(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is a run, with heads and with a layer that grows a tree; a text ends early, and the others go on."""
    monkeypatch.setattr(attention, "CALL", 1)
    seen, stock = set[int](), attention.attention_of_run

    def counting(run: Run, *args: Any) -> torch.Tensor:
        seen.add(run.width)
        return stock(run, *args)

    monkeypatch.setattr(attention, "attention_of_run", counting)
    model = shared_model(family)
    prompts = [random_ids(length, seed=length) for length in (4, 19, 9, 30)]
    stop = plain(model, prompts[3], max_new_tokens=12, eos_token_id=None)[4]
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": stop}
    inputs = left_padded(prompts)
    out = generate(model, random_heads(model, **FORMS[kind]), **inputs, tree="dynamic:12", **options)
    for row, prompt in zip(out[:, 30:].tolist(), prompts, strict=True):
        alone = plain(model, prompt, **options)
        assert row[: len(alone)] == alone
    assert len(seen) > 4
