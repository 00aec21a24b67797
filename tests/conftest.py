"""Fixtures for all tests. They import torch late: the process that hands tests to others needs none of it."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Shells let their background jobs ignore Ctrl-C, and the processes that tests start and interrupt would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The tests are written for a CPU: on a machine with a GPU, commands would choose it.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
# torch.compile believes what the CPU says about its vector instructions. To try them, it starts Python several times.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# matplotlib keeps what it reads about fonts in a cache; with each test's own, each process would read all fonts again.
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
# transformers would load the weights of a tiny model in threads, which takes a third longer.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")


# Each training run notes the versions of packages, and peft asks for some, from files that take 4 ms to parse.
vars(importlib.metadata)["version"] = functools.cache(importlib.metadata.version)
# Imports make many objects that stay; to look for garbage among them would take an eighth of the time.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long tests, too, and shortened ones at full length")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(5_000, 20, 100)  # models and graphs make objects by the thousand, of which few are garbage


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether long tests run at full length (`--full`)."""
    return bool(request.config.getoption("--full"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files with slow tests first, then those with most tests: the last files that two workers share are short.

    Tests with the mark `full` run with `--full` only."""
    if not config.getoption("--full"):
        long = pytest.mark.skip(reason="runs with --full")
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(long)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


MOST_OBJECTS = 50_000


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Exclude what imports and earlier tests left from garbage collection, if it is much.

    accelerate runs a full collection in every training run. With the objects of all earlier files, one took 0.1 s and a
    run of a tiny model, with several of them, 0.5 s; without them it takes 0.02.
    """
    if len(gc.get_objects(generation=2)) > MOST_OBJECTS:
        gc.collect()
        gc.freeze()


SHARED = Path(__file__).resolve().parents[1] / ".." / "shared"


@pytest.fixture(scope="session", autouse=True)
def quiet_and_on_one_thread() -> None:
    """Compute on one thread, because the threads of tiny models only wait for each other; silence transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    if not torch.accelerator.is_available():  # each seed would be kept for three devices, with stack traces
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            vars(absent)["manual_seed_all"] = lambda seed: None
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session", autouse=True)
def no_numbers_without_storage() -> Iterator[None]:
    """Initialise nothing on the device `meta`, where transformers makes each model that it loads.

    This would take an eighth of the time to load a tiny one."""
    from torch import nn

    with pytest.MonkeyPatch.context() as patch:
        for layer in (nn.Linear, nn.Embedding):
            reset = layer.reset_parameters
            patch.setattr(layer, "reset_parameters", lambda self, reset=reset: self.weight.is_meta or reset(self))
        yield


@pytest.fixture(scope="session", autouse=True)
def looked_up_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Look up entry points once (0.02 s), unless a test has put packages of its own first in sys.path.

    And do not write configs as text, which transformers does for its log whenever it loads one."""
    from transformers import PreTrainedConfig

    from medusa import registry

    look, folder = registry.entry_points, str(tmp_path_factory.getbasetemp())
    kept = functools.cache(look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lambda group: (look if folder in sys.path[0] else kept)(group=group))
        patch.setattr(PreTrainedConfig, "__repr__", object.__repr__)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ../shared with models and data; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    return SHARED.resolve()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub seems to answer; what a test then loads from it must be replaced, too."""
    monkeypatch.setattr("medusa.places.hub_is_reachable", lambda: True)


@pytest.fixture(scope="session")
def llama() -> Any:
    """A tiny random Llama; tests must not change it."""
    from tests.helpers import shared_model

    return shared_model()


_CHECKED: dict[Any, Any] = {}  # results of self-tests


@pytest.fixture(scope="module")
def one_tree_check() -> Iterator[None]:
    """Let the self-test of trees run once for all models of one configuration, instead of for each that is loaded."""
    from decode import tree_check
    from medusa.backbone import by_value

    check = tree_check._check

    def once(model: Any, **how: bool) -> Any:
        key = (type(model), model.dtype, by_value(model.config), *how)
        if key not in _CHECKED:
            _CHECKED[key] = check(model, **how)
        return _CHECKED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_check, "_check", once)
        yield


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the i-th character of `LETTERS`, so texts can be read off ids."""
    from tiny_models import letter_tokenizer

    return letter_tokenizer(unk_token="a")


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders for new caches, one for each test; whatever writes to a cache makes its folder."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, caches: Iterator[Path]) -> None:
    """Give each test its own cache, so that no test reads calibrations of other tests or of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(caches)))


@pytest.fixture(autouse=True)
def no_plot_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave an empty file for the plot of a training run, which takes as long as the training of a tiny model."""
    if "train.run" in sys.modules:
        monkeypatch.setattr("train.run.draw_curves", lambda log, path: path.touch())


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed every test, so that results do not depend on the order of tests.

    `torch.manual_seed` also notes the whole stack for each kind of device, which takes as long as a short test."""
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
