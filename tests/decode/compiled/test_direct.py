"""Steps of compiled code that are called without torch.compile's checks: when they are, and what may change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx

from decode import generate, steps
from decode.compiled import fixed_cache, stepper
from decode.compiled.direct import DirectStep, RecordingBackend
from decode.compiled.region import Region, Regions
from decode.compiled.stepper import CompiledStepper
from medusa import Tree
from tests.helpers import plain, random_heads, random_ids, random_tree, tiny_model

GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}


class Interrupted(BaseException):
    """As by Ctrl-C, which would end the tests, too."""


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
        assert isinstance(region.runner, DirectStep)
        assert not region.runner.calls, "when a long row ends, the window may become one that was used with old caches"

    monkeypatch.setattr(Region, "make_room", noted)
    windows = 0
    for seed in range(3):
        prompt, before = random_ids(5 + seed, seed=seed), len(calls.steps)
        assert text(model, heads, prompt, tree, **GREEDY) == plain(model, prompt, **GREEDY)
        windows += len(set(calls.steps[before:]))
    assert len(grown) == made
    assert len(set(calls.steps)) > 3
    assert windows <= calls.checked <= windows + len(grown) < len(calls.steps) / 2


def negated(model: Any, heads: Any) -> None:
    model.lm_head.weight.mul_(-1)  # in place


def swapped(model: Any, heads: Any) -> None:
    for state in (*model.parameters(), *heads.parameters()):  # other memory, the same parameters
        state.data = torch.randn_like(state)


def another_buffer(model: Any, heads: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", 3 - rotary.inv_freq)  # no setting and no parameter, so the region stays


@pytest.mark.parametrize("change", [negated, swapped, another_buffer])
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


def test_no_inputs_are_held_between_texts_or_by_a_step_that_fails(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model("llama", num_hidden_layers=1), random_ids(5)
    heads, found = random_heads(model), list[Region]()
    running = steps(model, heads, torch.tensor([prompt]), tree=Tree.chain(2), compile=True, **GREEDY)
    take = CompiledStepper._region
    monkeypatch.setattr(CompiledStepper, "_region", lambda *args: found.append(take(*args)) or found[-1])
    next(running)
    (region,) = found
    assert isinstance(region.runner, DirectStep)
    assert region.runner.calls
    assert region.runner.backend.last is None
    assert isinstance(running, Generator)
    running.close()
    assert not region.runner.calls

    checked = region.compiled

    def fails() -> Tensor:
        checked()
        raise Interrupted

    region.compiled = fails
    with pytest.raises(Interrupted):
        text(model, heads, prompt, Tree.chain(2), **GREEDY)
    assert not region.runner.calls
    assert region.runner.backend.last is None


@pytest.mark.usefixtures("traced")
def test_regions_and_models_are_freed() -> None:
    """PyTorch keeps what compiles a step, so this must not refer to the step."""
    model = tiny_model("llama", num_hidden_layers=1)
    text(model, random_heads(model), random_ids(5), Tree.chain(2), **GREEDY)
    ((_, region),) = Regions.of(model)
    held = weakref.ref(region), weakref.ref(model)
    del model, region
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_code_that_gives_more_than_the_result_is_always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile then still has something to do after the code, such as storing a tensor in an attribute."""
    results, count = list[tuple[Tensor, ...]](), 0
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, config_patches: lambda: results[-1])
    backend = RecordingBackend({})
    code = backend(torch.fx.GraphModule({}, torch.fx.Graph()), [])

    def step() -> Tensor:
        nonlocal count
        count += 1
        return code()[0]

    direct = DirectStep(step, backend)
    for given, expected in (((torch.ones(1), torch.ones(1)), 3), ((torch.ones(1),), 4)):
        results.append(given)
        for _ in range(3):
            assert direct(0) is given[0]
        assert count == expected
