"""Some seconds of scripts/load_test.py against the server of these tests, and what an idle server keeps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from decode.serve.app import CompletionApi
from decode.serve.worker import BatchRow, BatchWorker
from decode.settings import Settings
from decode.texts import TextGenerator
from load_clients import NONSENSE, Client, Found, Wanted
from load_test import LoadOptions, load, requests, texts_left
from tests.decode.serve.server_tools import PROMPTS, SHORT, admit, expected


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The errors that the server logs."""
    found, logger = list[str](), logging.getLogger("uvicorn.error")
    handler = logging.Handler(logging.ERROR)
    monkeypatch.setattr(handler, "emit", lambda record: found.append(record.getMessage()))
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def address_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.full
def test_clients_that_join_leave_and_send_nonsense(
    url: str, generator: TextGenerator, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("load_clients.PAUSE", (0.2, 0.4))
    monkeypatch.setattr("load_test.LENGTHS", (3, 12, 24))
    options, address = LoadOptions(minutes=0.05, clients=8), address_of(url)

    def written(prompt: str, tokens: int) -> str:
        return expected(generator, prompt, Settings(max_new_tokens=tokens))

    pool = requests(PROMPTS, 6, 0, written, address)
    result = load(address, pool, options, lambda: psutil.Process().memory_info().rss)
    assert result["errors"] == {}
    assert result["texts"] > 8
    assert result["beginnings"] > 2
    assert result["all_requests"] == sum(result["requests"].values())
    assert texts_left(address) == 0
    assert logged == []


def test_a_wrong_text_and_a_wrong_status_are_errors(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: what it must count if texts are mixed, or nonsense is accepted."""
    body = {"prompt": PROMPTS[0], "max_tokens": 8}
    found = Found()
    client = Client(address_of(url), [Wanted(body, "another text")], found, 0)
    monkeypatch.setattr(client.rng, "randrange", lambda most: most)
    for act in (client.ask, client.stream, client.leave):
        with pytest.raises(AssertionError, match="differs"):
            act()
    assert not found.compared
    monkeypatch.setattr(client.rng, "choice", lambda sent: NONSENSE[0]._replace(status=200))
    with pytest.raises(AssertionError, match=r"not HTTP: HTTP/1\.1 400"):
        client.nonsense()
    rounds = iter([True, False])
    monkeypatch.setattr(client.rng, "choices", lambda acts, weights: [client.nonsense])
    client.run(lambda: next(rounds))
    assert list(found.errors) == ["nonsense: AssertionError: not HTTP: HTTP/1.1 400 Bad Request"]


@pytest.mark.parametrize("name", [sent.name for sent in NONSENSE])
def test_each_nonsense_is_refused(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found()
    client = Client(address_of(url), [], found, 0)
    monkeypatch.setattr(client.rng, "choice", lambda sent: next(one for one in sent if one.name == name))
    client.nonsense()
    assert found.refused.total() == 1


def test_half_a_request_leaves_no_error(url: str, logged: list[str]) -> None:
    Client(address_of(url), [], Found(), 0).half_a_request()
    time.sleep(0.3)
    assert logged == []


def test_an_idle_server_keeps_no_caches(generator: TextGenerator) -> None:
    worker = BatchWorker(generator, 2)
    prompt = generator.tokenizer(PROMPTS[0])["input_ids"]
    admit(worker, *(BatchRow(prompt, SHORT, 0, lambda event: None) for _ in range(2)))
    while worker.running:
        assert worker.batch.stepper is not None
        worker.step()
    assert worker.batch.stepper is None


def test_the_server_of_these_tests_is_idle(api: CompletionApi, url: str) -> None:
    assert texts_left(address_of(url)) == 0
    assert api.worker.batch.stepper is None
