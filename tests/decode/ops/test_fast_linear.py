"""decode/ops/fast_linear.py: linear layers by another library, with packed weights that follow their weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from decode import generate
from decode.draft import Draft, Frontier, NoDraft
from decode.ops import fast_linear as module
from decode.ops.fast_linear import MIN_PRODUCTS, fast_linear, linear, pack, packed, weights_of
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.serve.batch import RunningBatch
from decode.session import Session
from decode.texts import stepper_for
from decode.tree_check import check_tree_forward
from medusa.backbone import Backbone
from medusa.heads.stacked import product
from tests.helpers import (
    FORMS,
    left_padded,
    plain,
    random_heads,
    random_ids,
    run_steps,
    shared_model,
    tiny_model,
    weekly,
)

STOCK = torch._C._nn.linear
WEIGHT = torch.nn.Parameter(torch.randn(1024, 256))


@pytest.fixture(autouse=True)
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all machines behave like one with an AMD CPU with AVX-512 that multiplies no bfloat16."""
    monkeypatch.setattr(module, "TYPES", {torch.float32})
    monkeypatch.setattr(module, "UNPACKED", True)


@pytest.fixture
def packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take oneDNN for all products of tiny models, with packed weights."""
    for name in ("MIN_PRODUCTS", "MIN_PACKED", "MIN_NUMBERS"):
        monkeypatch.setattr(module, name, 1)


class ByOneDNN(TorchDispatchMode):
    """Counts the products that oneDNN computes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [None, torch.randn(1024)], ids=["without bias", "with bias"])
@pytest.mark.parametrize(
    "x",
    [torch.randn(8, 256), torch.randn(2, 5, 256), torch.randn(2, 256, 5).mT, torch.randn(1, 9, 512)[..., ::2]],
    ids=["two dimensions", "three", "transposed", "with gaps"],
)
@pytest.mark.parametrize("weight", [WEIGHT, torch.randn(256, 1024).T], ids=["a parameter", "a transposed weight"])
@torch.no_grad()
def test_products_equal_those_of_pytorch(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    with fast_linear(WEIGHT, 8), ByOneDNN() as used:
        found = linear(x, weight, bias)
    assert used.count == 1
    exact = STOCK(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)  # 256 products of about 1; a bias is 1
    torch.testing.assert_close(STOCK(x, weight, bias).double(), exact, rtol=0, atol=2e-4)


def test_without_avx512_only_packed_weights_are_multiplied_by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNPACKED", False)
    layer = nn.Linear(256, 1024)
    assert not used_in(layer.weight, 8)
    pack(layer)
    with torch.no_grad(), fast_linear(layer.weight, 8), ByOneDNN() as used:
        layer(torch.randn(8, 256))
    assert used.count == 1


def test_everything_else_is_left_to_pytorch() -> None:
    x, one, few = torch.randn(8, 256), torch.randn(1, 256), torch.randn(MIN_PRODUCTS // WEIGHT.numel() - 1, 256)
    with fast_linear(WEIGHT, 8), ByOneDNN() as used:
        linear(x, WEIGHT).sum().backward()
        assert WEIGHT.grad is not None
        with torch.no_grad():
            for tokens in (one, few):
                assert torch.equal(linear(tokens, WEIGHT), STOCK(tokens, WEIGHT))
            assert linear(x.double(), WEIGHT.double()).dtype == torch.float64
            with torch.autocast("cpu", torch.bfloat16):
                assert linear(x, WEIGHT).dtype == torch.bfloat16
    assert not used.count


@torch.no_grad()
def test_unusual_weights_and_biases_are_left_to_pytorch() -> None:
    """oneDNN reads a bias as 1024 numbers that lie side by side, and fails for other weights."""
    x, many = torch.randn(8, 256), torch.randn(2048, 1024)
    with fast_linear(WEIGHT, 8):
        for bias in (torch.tensor(3.0), torch.randn(1), torch.randn(2048)[::2], torch.randn(8, 1024)):
            assert torch.equal(linear(x, WEIGHT, bias), STOCK(x, WEIGHT, bias))
        assert torch.equal(linear(many, many[0]), STOCK(many, many[0]))


def used_in(weight: Tensor, tokens: int) -> int:
    """The products of 8 tokens and `WEIGHT` that oneDNN computes, in a context for a forward over so many `tokens`."""
    with torch.no_grad(), fast_linear(weight, tokens), ByOneDNN() as used:
        F.linear(torch.randn(8, 256), WEIGHT)
    return used.count


def test_it_works_only_in_the_context_of_large_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        with fast_linear(WEIGHT, 8):
            assert used_in(WEIGHT, 8) == 1
            assert used_in(WEIGHT, 1) == 1, "the outer context goes on"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    for weight, tokens in ((WEIGHT, 1), (WEIGHT, 2), (WEIGHT.bfloat16(), 64), (WEIGHT.to("meta"), 64)):
        assert not used_in(weight, tokens)
    monkeypatch.setattr(module, "TYPES", set())
    assert not used_in(WEIGHT, 64)


@torch.no_grad()
def test_other_threads_do_not_notice() -> None:
    """Each thread has its own context: one that opens and closes it leaves this one's open, too."""
    x = torch.randn(8, 256)

    def elsewhere() -> tuple[int, int, bool]:
        with torch.no_grad(), ByOneDNN() as before:
            same = torch.equal(F.linear(x, WEIGHT), STOCK(x, WEIGHT))
        return before.count, used_in(WEIGHT, 8), same

    with ThreadPoolExecutor(1) as other:
        with fast_linear(WEIGHT, 8):
            assert other.submit(elsewhere).result() == (0, 1, True)
            with ByOneDNN() as used:
                F.linear(x, WEIGHT)
            assert used.count == 1
            running = other.submit(fast_linear(WEIGHT, 8).__enter__)
            running.result()
        with ByOneDNN() as used:
            F.linear(x, WEIGHT)
        assert not used.count, "the other thread's open context is not ours"


def test_a_custom_function_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*args: Any) -> Tensor:
        return STOCK(*args)

    monkeypatch.setattr(F, "linear", own)
    with fast_linear(WEIGHT, 8):
        assert F.linear is own
    assert F.linear is own


@pytest.mark.usefixtures("packs_all")
@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", *weekly("llama")])
def test_text_equals_generate(family: str) -> None:
    """With all products by oneDNN, also those of the prefill."""
    model = tiny_model(family)
    prompts, options = [random_ids(12), random_ids(5, seed=1)], {"max_new_tokens": 12, "do_sample": False}
    with ByOneDNN() as used:
        out = generate(model, random_heads(model), **left_padded(prompts), tree="topk:3,2,1", **options)
    assert used.count > 12
    assert out[:, 12:].tolist() == [plain(model, prompt, **options) for prompt in prompts]


@torch.no_grad()
def test_drafts_take_it_too() -> None:
    """Heads that share the LM head spend most of a draft's time there."""
    seen: list[int] = []

    class Recording(NoDraft):
        def propose(self, frontier: Frontier) -> Draft:
            seen.append(used_in(WEIGHT, 1))  # only an outer context counts
            return super().propose(frontier)

    model = tiny_model("llama", vocab_size=1 << 16)
    requests = prepare(model, [random_ids(3), random_ids(4)], max_new_tokens=4, do_sample=False, eos_token_id=None)
    run_steps(Session(model, requests), Recording(torch.device("cpu")), AcceptanceRule("greedy"))
    assert seen
    assert set(seen) == {1}


# Packed weights


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 1024)


def require_product(one: nn.Linear, x: Tensor) -> None:
    """Check a product by oneDNN, which takes the packed weight if there is one."""
    with fast_linear(one.weight, 8), ByOneDNN() as used:
        found = linear(x, one.weight, one.bias)
    assert used.count == 1
    exact = STOCK(x.double(), one.weight.double(), one.bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)  # as above


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
@torch.no_grad()
def test_products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """By packed weights only, as PyTorch takes oneDNN for the others; also of one token, but not of a vector."""
    monkeypatch.setattr(module, "TYPES", {torch.bfloat16})
    one = layer().bfloat16()
    tokens = [torch.randn(count, 256, dtype=torch.bfloat16) for count in (1, 5, 40)]
    with fast_linear(one.weight, 1):
        for takes in (0, 1):
            for x in tokens:
                with ByOneDNN() as used:
                    found = F.linear(x, one.weight, one.bias)
                assert used.count == takes
                exact = STOCK(x.double(), one.weight.double(), one.bias.double())
                rounding = 2**-8  # of a bfloat16
                torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=2e-4)
            pack(one)
        for x in (tokens[0][0], tokens[0][:0]):
            assert torch.equal(F.linear(x, one.weight, one.bias), STOCK(x, one.weight, one.bias))
        before = packed(one.weight)
        one.weight.data[3, 5] *= 1.01
        pack(one)
        assert packed(one.weight) is not before, "a change that the sum of a row in bfloat16 would hide"


@torch.no_grad()
@pytest.mark.parametrize("tokens", [2, 7, 16, 300])
def test_products_of_packed_weights_equal_those_of_pytorch(tokens: int) -> None:
    """Packed for no number of tokens, used for all."""
    one = layer()
    pack(one)
    assert packed(one.weight) is not None
    require_product(one, torch.randn(3, tokens, 256))


def plus(weight: Tensor) -> None:
    weight.data += 1


def one_number(weight: Tensor) -> None:
    weight.data[5, 7] += 1e-3


def rows_swapped(weight: Tensor) -> None:
    weight.data.copy_(weight.data.flip(0))


def columns_swapped(weight: Tensor) -> None:
    weight.data.copy_(weight.data.flip(1))


def another(weight: Tensor) -> None:
    weight.data = torch.randn_like(weight)


def counted(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


def groups_moved(weight: Tensor) -> None:
    """Groups of eight bytes, such as the columns of attention heads, change places: the sums of all rows stay."""
    with torch.no_grad():
        weight.copy_(weight.view(len(weight), -1, 8).flip(1).flatten(1))


@pytest.mark.parametrize("change", [plus, one_number, rows_swapped, columns_swapped, another, counted, groups_moved])
@torch.no_grad()
def test_each_text_begins_with_the_present_weights(change: Callable[[Tensor], None]) -> None:
    """Changes by `.data`, as PEFT merges adapters, are not counted by PyTorch."""
    one = layer()
    pack(one)
    kept = packed(one.weight)
    change(one.weight)
    pack(one)
    require_product(one, torch.randn(4, 256))
    again = packed(one.weight)
    assert again is not None
    assert again is not kept
    pack(one)
    assert packed(one.weight) is again, "packed once"


def test_counted_changes_are_seen_at_once() -> None:
    one = layer()
    pack(one)
    counted(one.weight)
    assert packed(one.weight) is None


def test_copies_end_with_their_weights_and_have_their_own() -> None:
    one = layer()
    pack(one)
    twin, key = copy.deepcopy(one), id(one.weight)
    assert packed(twin.weight) is None
    assert key in module._PACKED
    del one
    gc.collect()
    assert key not in module._PACKED


def test_a_garbage_collection_may_end_weights_while_others_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that holds the lock."""
    monkeypatch.setattr(module, "_LOCK", Lock())
    one, other, held, sums = layer(), layer(), [], module._sums
    pack(one)
    ring: list[Any] = [one]
    ring.append(ring)  # only a garbage collection frees it
    key = id(one.weight)
    del one, ring

    def collects(weight: Tensor) -> Tensor:
        held.append(key in module._PACKED)
        gc.collect()
        return sums(weight)

    monkeypatch.setattr(module, "_sums", collects)
    thread = Thread(target=pack, args=(other,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert held == [True]
    assert key not in module._PACKED


def in_double(one: nn.Linear) -> None:
    one.double()


def turned(one: nn.Linear) -> None:
    one.weight.data = torch.randn(256, 1024).T


@pytest.mark.parametrize("change", [in_double, turned])
@torch.no_grad()
def test_copies_end_when_their_weights_may_not_be_packed_any_more(change: Callable[[nn.Linear], None]) -> None:
    """PyTorch does not count that a weight got other numbers in this way."""
    one = layer()
    pack(one)
    change(one)
    pack(one)
    assert packed(one.weight) is None
    assert id(one.weight) not in module._PACKED


def test_models_too_large_for_a_second_copy_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer()
    twin = copy.deepcopy(one)
    pack(twin)
    monkeypatch.setattr(module, "_limit", lambda: one.weight.nbytes - 1)
    for each in (one, twin):
        pack(each)
        assert packed(each.weight) is None


def test_other_weights_are_left_alone() -> None:
    for other in (layer().double(), layer().bfloat16(), layer().to("meta"), nn.Embedding(30, 40), nn.LayerNorm(64)):
        pack(other)
        assert not any(packed(weight) for weight in other.parameters())


@pytest.mark.usefixtures("packs_all")
def test_text_equals_generate_before_and_after_a_change() -> None:
    """Also with the heads' product of the shared LM head."""
    model, options = tiny_model("llama"), {"max_new_tokens": 16, "do_sample": False}
    heads, prompt = random_heads(model, lm_head="shared"), random_ids(7)
    texts = []
    for _ in range(2):
        found = generate(model, heads, torch.tensor([prompt]), tree="topk:3,2,1", **options)
        texts.append(found[0, 7:].tolist())
        assert texts[-1] == plain(model, prompt, **options)
        assert all(packed(one.weight) is not None for one in model.modules() if isinstance(one, nn.Linear))
        for parameter in model.parameters():
            parameter.data *= -1.5
    assert texts[0] != texts[1], "the change has an effect"


@pytest.mark.usefixtures("packs_all")
def test_the_weights_of_an_amateur_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, amateur, prompt = tiny_model("llama"), tiny_model("llama", seed=1), torch.tensor([random_ids(7)])
    texts = []
    for _ in range(2):
        for types in ({torch.float32}, set()):
            monkeypatch.setattr(module, "TYPES", types)
            heads = random_heads(model)
            found = generate(model, heads, prompt, amateur=amateur, max_new_tokens=16, do_sample=False)
            texts.append(found.tolist())
        pack(amateur)  # as texts of its own do
        for parameter in amateur.parameters():
            parameter.data *= -1.5
    first, first_stock, second, second_stock = texts
    assert (first, second) == (first_stock, second_stock)
    assert first != second, "the change has an effect"


@pytest.mark.usefixtures("packs_all")
def test_the_self_test_of_trees_reads_the_present_weights() -> None:
    model = tiny_model("llama")
    pack(model)
    for parameter in model.parameters():
        parameter.data *= -1.5
    assert check_tree_forward(model).ok


@pytest.mark.usefixtures("packs_all")
def test_weights_are_checked_before_the_first_text_of_a_batch_and_not_for_those_that_join() -> None:
    """While texts are decoded, weights must not change; afterwards they may."""
    model, checks = shared_model(), list[nn.Module]()
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    batch = RunningBatch(lambda requests: stepper_for(model, None, requests, AcceptanceRule("greedy")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "pack", checks.append)
        for _ in range(2):
            for number in range(3):
                batch.join(prepare(model, [random_ids(4, seed=number)], **options))
            while batch.rows:
                batch.step()
    assert len(checks) == 2


# Stacked weights of heads


class Stacked(nn.Module):
    stacked_weights = ("up", "absent")
    absent = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.bias = nn.Parameter(torch.randn(4, 256, 512)), nn.Parameter(torch.randn(4, 1, 512))


@pytest.mark.parametrize("heads", [slice(None), slice(2), slice(1, 4), slice(3, 4)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["without bias", "with bias"])
@torch.no_grad()
def test_products_of_stacked_weights_equal_those_of_pytorch(heads: slice, with_bias: bool) -> None:
    """Also of one input for all heads, and of an input with gaps."""
    one = Stacked()
    pack(one)
    count, bias = len(range(4)[heads]), one.bias if with_bias else None
    for x in (torch.randn(count, 5, 256), torch.randn(5, 256).expand(count, -1, -1), torch.randn(count, 256, 7).mT):
        with fast_linear(one.up, 8), ByOneDNN() as used:
            found = product(x, one.up, heads, bias)
        assert used.count == count
        exact = x.double() @ one.up[heads].double() + (one.bias[heads].double() if with_bias else 0)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)  # 256 products of about 1; a bias is 1
        torch.testing.assert_close(product(x, one.up, heads, bias).double(), exact, rtol=0, atol=2e-4)


@torch.no_grad()
def test_other_products_of_stacked_weights_are_left_to_pytorch() -> None:
    one, x = Stacked(), torch.randn(4, 5, 256)

    def used_for(x: Tensor) -> int:
        with ByOneDNN() as used:
            product(x, one.up, slice(None))
        return used.count

    with fast_linear(one.up, 8):
        assert not used_for(x), "not packed"
        pack(one)
        assert used_for(x) == 4
        assert not used_for(x[:, :1]), "a vector in float32"
        assert not used_for(x[:, :0])
        with torch.enable_grad():
            assert not used_for(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not used_for(x)
        with fast_linear(one.up, 8, stable=True):
            assert not used_for(x)
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(used_for, x).result(), "another thread"
        counted(one.up)
        assert not used_for(x), "written to"
        plus(one.up)
        pack(one)
        assert used_for(x) == 4
        torch.testing.assert_close(product(x, one.up, slice(None)), x @ one.up, rtol=1e-4, atol=1e-3)
    assert not used_for(x)


@pytest.mark.usefixtures("packs_all")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "mtp"])
def test_drafts_of_all_kinds_of_heads_read_packed_weights(form: str) -> None:
    """With a reduced vocabulary, so that the LM head's rows are packed, too; before and after a change."""
    model = tiny_model("llama")
    heads, prompt = random_heads(model, **{"vocabulary": 48} | FORMS[form]), torch.tensor([random_ids(7)])
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    for _ in range(2):
        found = generate(model, heads, prompt, **options)
        assert found[0, 7:].tolist() == plain(model, prompt[0].tolist(), **options)
        weights = [weight for each in heads.modules() for weight in weights_of(each)]
        assert weights
        assert all(packed(weight) is not None for weight in weights if weight.shape[-1] % 2 == 0)
        for parameter in heads.parameters():
            parameter.data *= -1.5


@pytest.mark.usefixtures("packs_all")
@pytest.mark.parametrize("kind", ["medusa", "markov", "hydra", "recurrent"])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@torch.no_grad()
def test_logits_of_heads_with_packed_weights_are_those_without(kind: str, lm_head: str) -> None:
    model = tiny_model("llama")
    heads, backbone = random_heads(model, kind=kind, lm_head=lm_head), Backbone(model)
    ids = torch.tensor([random_ids(7)])
    hidden = torch.randn(1, 7, backbone.hidden_size)
    plainly = heads(heads.inputs(hidden, ids, backbone.embed), backbone.lm_head)
    pack(heads)
    with fast_linear(backbone.head_weight, 8), ByOneDNN() as used:
        found = heads(heads.inputs(hidden, ids, backbone.embed), backbone.lm_head)
    assert used.count >= heads.config.num_heads
    torch.testing.assert_close(found, plainly, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_compiled_steps_read_packed_weights() -> None:
    """The graph is compiled once, and follows a change of the weight."""
    one, x, called = layer(), torch.randn(4, 256), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        called.extend(node.target for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(lambda x: F.linear(x, one.weight, one.bias), backend=backend, fullgraph=True)
    for _ in range(2):
        pack(one)
        with fast_linear(one.weight, 4):
            found = compiled(x)
        assert called.count(torch.ops.medusa.linear) == 1
        torch.testing.assert_close(found, STOCK(x, one.weight, one.bias), rtol=1e-5, atol=2e-5)
        plus(one.weight)
