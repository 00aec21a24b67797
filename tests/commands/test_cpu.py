"""Tests of how commands choose threads and dtype on a CPU. The times are made up, except in one test."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from medusa import loading
from medusa.commands import cpu
from medusa.commands.cpu import Tuned, fewest_threads, load_tuned, sampled
from medusa.commands.options import Output, RuntimeOptions
from medusa.errors import RequestError
from medusa.loading import BackboneFiles, load_backbone
from medusa.options import LoadOptions
from tests.helpers import tiny_model

FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def timed(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[int, float]) -> tuple[int, str]:
    """Choose threads where a step takes so many seconds by the number of threads; the largest number is PyTorch's."""
    monkeypatch.setattr(cpu, "usual_threads", lambda: max(seconds))
    return fewest_threads(lambda: seconds[torch.get_num_threads()])


@pytest.mark.parametrize(
    ("seconds", "chosen", "told"),
    [
        ({1: 0.044, 2: 0.51}, 1, "44 ms (2: 510, perhaps because other programs use the cores)"),
        ({1: 0.044, 2: 0.043}, 1, "44 ms (2: 43)"),
        ({1: 0.044, 2: 0.031}, 2, "31 ms (1: 44)"),
        ({1: 0.044, 4: 0.02, 8: 0.0195}, 4, "20 ms (1: 44, 8: 19.5)"),
    ],
)
def test_the_fewest_threads_near_the_best_are_chosen(
    seconds: dict[int, float], chosen: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    assert timed(monkeypatch, seconds) == (
        chosen,
        f"threads: {chosen} of {max(seconds)}, because a step takes about {told}",
    )
    assert torch.get_num_threads() == before


def test_one_core_leaves_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, {1: 0.044}) == (1, "")


Load = Callable[..., Tuned]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny backbone on disk, in bfloat16 as most are published."""
    folder = str(tmp_path_factory.mktemp("backbone"))
    tiny_model("llama", dtype=HALF).save_pretrained(folder)
    return folder


@pytest.fixture
def load(backbone: str, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a backbone as if it were large, where bfloat16 is `gain` times as fast as float32."""

    def load(dtype: str | None, gain: float, fast: bool = True, threads: int | None = None, **output: Any) -> Tuned:
        def timer(sample: object, tokens: int, dtype: torch.dtype | None = None, *clock: object) -> Callable[[], float]:
            return lambda: (1.0 if dtype == HALF else gain) / torch.get_num_threads()

        RuntimeOptions(threads=threads).prepare()  # no progress bars of transformers
        monkeypatch.setattr(cpu, "PROBED", 1)
        monkeypatch.setattr(cpu, "usual_threads", lambda: 2)
        monkeypatch.setattr(cpu.Sample, "timer", timer)
        for module in (cpu, loading):
            monkeypatch.setattr(module, "has_fast_bfloat16", lambda: fast)
        return load_tuned(BackboneFiles(backbone, LoadOptions(dtype, "cpu")), threads, Output(**output))

    return load


@pytest.mark.parametrize(
    ("dtype", "gain", "fast", "loaded", "told"),
    [
        (None, 2.1, True, FLOAT, "float32; --dtype bfloat16 makes steps 2.1 times as fast here, but texts can differ"),
        (None, 1.0, True, FLOAT, ""),
        (None, 2.1, False, FLOAT, ""),
        ("float32", 2.1, True, FLOAT, ""),
        ("bfloat16", 2.1, True, HALF, ""),
        ("auto", 2.1, True, HALF, "bfloat16, because steps are 2.1 times as fast here as in float32; texts can differ"),
        ("auto", 0.8, True, FLOAT, "float32; no speedup by bfloat16 was measured"),
        ("auto", 2.1, False, FLOAT, "float32; no speedup by bfloat16 was measured"),
    ],
)
def test_bfloat16_is_offered_with_its_price_and_taken_by_auto(
    dtype: str | None,
    gain: float,
    fast: bool,
    loaded: torch.dtype,
    told: str,
    load: Load,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert load(dtype, gain, fast, threads=1).loaded.model.dtype == loaded
    said = capsys.readouterr().err
    assert said.startswith(f"dtype: {told}") if told else said == ""


def test_threads_are_chosen_unless_they_are_given(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    load("float32", 2.0, threads=1)
    assert (torch.get_num_threads(), capsys.readouterr().err) == (1, "")
    load("float32", 2.0)
    assert torch.get_num_threads() == 2
    assert capsys.readouterr().err.startswith("threads: 2 of 2, because ")


def test_nothing_is_chosen_without_a_word(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """With --quiet there is no line, so threads and dtype stay; only `--dtype auto` asks for a choice."""
    torch.set_num_threads(1)
    assert load(None, 2.0, quiet=True).loaded.model.dtype == FLOAT
    assert load("auto", 2.0, quiet=True).loaded.model.dtype == HALF
    assert (torch.get_num_threads(), capsys.readouterr().err) == (1, "")


def test_a_trial_leaves_the_model_as_it_was(backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real times of both dtypes, and of a model whose layers do not run alone."""
    monkeypatch.setattr(cpu, "SECONDS", 0.01)
    model, ids = load_backbone(backbone, LoadOptions("float32", "cpu")).model, torch.arange(8)[None]
    before = model(ids).logits
    sample = sampled(model)
    assert sample is not None
    assert all(sample.timer(cpu.TOKENS, dtype)() > 0 for dtype in (None, FLOAT, HALF))
    assert torch.equal(model(ids).logits, before)
    assert {weight.dtype for weight in model.parameters()} == {FLOAT}
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    assert sampled(torch.nn.Linear(2, 2)) is None


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(RequestError, match="'half'; choose one of float64, float32, bfloat16, float16, auto"):
        LoadOptions("half")
