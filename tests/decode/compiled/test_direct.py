"""Steps of compiled code that are called without torch.compile's checks: when they are, and what may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import generate
from decode.compiled import fixed_cache, stepper
from decode.compiled.direct import DirectStep
from decode.compiled.region import Region, Regions
from medusa import Tree
from tests.helpers import plain, random_heads, random_ids, random_tree, tiny_model

GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}


class Calls:
    """Counts the steps that go through torch.compile, and those of compiled code in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked, self.steps = 0, list[int]()  # the second one: each step's window
        through, every = Region._as_compiled, DirectStep.__call__

        def as_compiled(region: Region) -> Tensor:
            self.checked += 1
            return through(region)

        def call(direct: DirectStep, window: int) -> Tensor:
            self.steps.append(window)
            return every(direct, window)

        monkeypatch.setattr(Region, "_as_compiled", as_compiled)
        monkeypatch.setattr(DirectStep, "__call__", call)


@pytest.fixture
def calls(traced: object, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def text(model: Any, heads: Any, prompt: list[int], tree: Tree, **options: Any) -> list[int]:
    found = generate(model, heads, torch.tensor([prompt]), tree=tree, compile=True, **options)
    assert isinstance(found, Tensor)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("ahead", "made"), [(4, 4), (64, 1)])
def test_one_step_of_each_window_and_cache_is_checked(
    ahead: int, made: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short texts outgrow windows, and also caches if these are not made for 64 tokens ahead."""
    monkeypatch.setattr(fixed_cache, "BLOCK", 4)
    monkeypatch.setattr(fixed_cache, "STEP", 16)
    monkeypatch.setattr(stepper, "AHEAD", ahead)
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    heads, tree, grown = random_heads(model), random_tree(6, max_depth=3), list[int]()
    make_room = Region.make_room

    def noted(region: Region, slots: int, keep: bool = True) -> None:
        grown.append(slots)
        make_room(region, slots, keep)

    monkeypatch.setattr(Region, "make_room", noted)
    for seed in range(3):
        prompt = random_ids(5 + seed, seed=seed)
        assert text(model, heads, prompt, tree, **GREEDY) == plain(model, prompt, **GREEDY)
    assert len(grown) == made
    assert len(set(calls.steps)) > 3
    assert calls.checked <= len(set(calls.steps)) + len(grown) < len(calls.steps) / 2


def negated(model: Any, heads: Any) -> None:
    model.lm_head.weight.mul_(-1)  # in place


def replaced(model: Any, heads: Any) -> None:
    for state in (*model.parameters(), *heads.parameters(), *model.buffers()):
        state.data = torch.randn_like(state) if state.ndim > 1 else state.data.clone()


@pytest.mark.parametrize("change", [negated, replaced])
def test_weights_may_change_between_texts(change: Callable[[Any, Any], None], calls: Calls) -> None:
    model, prompt, tree = tiny_model("llama", num_hidden_layers=1), random_ids(5), random_tree(6, max_depth=3)
    heads, options = random_heads(model), GREEDY | {"eos_token_id": None}
    before = text(model, heads, prompt, tree, **options)
    assert before == plain(model, prompt, **options)
    with torch.no_grad():
        change(model, heads)
    after = text(model, heads, prompt, tree, **options)
    assert after == plain(model, prompt, **options) != before
    assert len(Regions.of(model)) == 1, "the same compiled code"


def test_freed_caches_are_not_held(calls: Calls) -> None:
    model, prompt = tiny_model("llama", num_hidden_layers=1), random_ids(5)
    text(model, random_heads(model), prompt, Tree.chain(2), **GREEDY)
    ((_, region),) = Regions.of(model)
    assert isinstance(region.runner, DirectStep)
    assert region.runner.calls
    region.release()
    assert not region.runner.calls
    assert region.runner.last is None


def test_code_that_gives_more_than_the_result_is_always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile then still has something to do after the code, such as storing a tensor in an attribute."""
    compiled, results = list[Callable[..., Any]](), list[tuple[Tensor, ...]]()

    def inductor(graph: Any, inputs: Any, config_patches: Any) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: results[-1]

    monkeypatch.setattr(torch._dynamo, "lookup_backend", {"inductor": inductor}.get)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        return compiled[0]()[0]

    direct = DirectStep(step, {})
    compiled.append(direct.backend(torch.fx.GraphModule({}, torch.fx.Graph()), []))
    for given, expected in (((torch.ones(1), torch.ones(1)), 3), ((torch.ones(1),), 4)):
        results.append(given)
        for _ in range(3):
            assert direct(0) is given[0]
        assert count == expected
