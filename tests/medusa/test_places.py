"""Names of models: folders, Hub ids and shipped ones; and the question whether the Hub can be reached."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoConfig

from medusa import places
from medusa.checkpoints.folder import find_folder
from medusa.errors import RequestError
from medusa.loading import DEMO, _tokenizer, load_backbone, load_config, load_tokenizer
from medusa.options import LoadOptions


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests run in a folder with one subfolder, and forget whether the Hub answered."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    places.hub_is_reachable.cache_clear()
    yield
    places.hub_is_reachable.cache_clear()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], list[str]]:
    """Replace the HTTP request to the Hub; gives the list of requests."""

    def use(answer: Callable[..., object]) -> list[str]:
        asked: list[str] = []

        def head(url: str, timeout: float) -> object:
            asked.append(url)
            return answer()

        monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
        return asked

    return use


def fail() -> None:
    raise OSError("no network")


@pytest.mark.parametrize(
    ("name", "on_hub"),
    [
        ("org/model", True),
        ("gpt2", True),
        ("./nodir", False),
        ("../nodir", False),
        ("/no/dir", False),
        ("~/model", False),
        ("models", False),
        ("demo", False),
        ("models/absent", False),
        ("a/b/c", False),
        ("org/", False),
        ("", False),
    ],
)
def test_which_names_may_be_on_the_hub(name: str, on_hub: bool) -> None:
    assert places.may_be_on_hub(name) is on_hub


def test_heads_and_repositories_need_an_owner() -> None:
    assert places.may_be_on_hub("org/heads", needs_owner=True)
    assert not places.may_be_on_hub("heads", needs_owner=True)


def test_the_hub_is_asked_once(hub: Any) -> None:
    asked = hub(lambda: "200")
    assert places.hub_is_reachable()
    assert places.hub_is_reachable()
    assert asked == [constants.ENDPOINT]
    assert places.hub_keywords("org/model") == {}


def test_without_a_network_only_local_files_are_read(hub: Any) -> None:
    hub(fail)
    assert not places.hub_is_reachable()
    assert places.hub_keywords("org/model") == {"local_files_only": True}
    assert places.hub_keywords("models") == {}


def test_the_hub_is_not_asked_offline(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = hub(lambda: "200")
    assert not places.hub_is_reachable()
    assert asked == []
    assert "HF_HUB_OFFLINE=1" in places.why_missing("org/model")


def test_a_network_that_never_answers_costs_seconds(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PATIENCE", 0.1)
    hub(lambda: time.sleep(5))
    start = time.monotonic()
    assert not places.hub_is_reachable()
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("load", [load_config, load_backbone])
def test_a_backbone_that_is_not_there(hub: Any, monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    hub(fail)
    with pytest.raises(RequestError, match=r"no backbone at \./nodir: there is no such folder; give a folder"):
        load("./nodir")
    start = time.monotonic()
    with pytest.raises(RequestError, match="org/model: it is not on this machine, and the Hugging Face Hub cannot"):
        load("org/model")
    assert time.monotonic() - start < 5
    with pytest.raises(RequestError, match="org/heads: it is not on this machine, and the Hugging Face Hub cannot"):
        find_folder("org/heads")


def test_the_cache_is_used_without_a_network(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(fail)
    given: dict[str, Any] = {}
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **keywords: given.update(keywords, name=name))
    load_config("org/model")
    assert given == {"name": "org/model", "revision": None, "trust_remote_code": False, "local_files_only": True}


def test_a_damaged_tokenizer_of_a_hub_model_is_named(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the error, a chat model would count as one without a tokenizer."""
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "1234"
    shutil.copytree(DEMO, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    (snapshot / "tokenizer.json").write_text("{broken")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("1234")
    hub(fail)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(RequestError, match="the tokenizer at org/model cannot be loaded: "):
        load_tokenizer("org/model")


def test_a_model_may_come_from_a_folder_that_only_looks_like_a_hub_id(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    assert _tokenizer(("bare", "some/my--model"), LoadOptions()) is None
