"""The client of OpenAI-compatible servers: its requests, its retries, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from medusa.commands.distill.client import Server, ServerError
from medusa.errors import RequestError
from tests.commands.fake_server import FakeServer, Reply, serving

FEW = {"max_tokens": 9, "temperature": 0.0}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as running:
        yield running


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def client(server: FakeServer, waits: list[float]) -> Server:
    return Server(server.url, sleep=waits.append)


def test_texts_and_conversations(server: FakeServer, client: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert client.complete("abc", FEW).text == "cba"
    assert client.complete([0, 1, 2], FEW).text == "cba"
    messages = [{"role": "user", "content": "hello, hello"}]
    reply = client.chat(messages, None, FEW)
    assert (reply.text, reply.finish_reason) == ("olleh ,ol", "length")
    paths, bodies, headers = zip(*server.asked, strict=True)
    assert paths == ("/v1/completions", "/v1/completions", "/v1/chat/completions")
    assert bodies[2] == {"model": "the-model", "messages": messages} | FEW
    assert all(header["Authorization"] == "Bearer secret" for header in headers)


@pytest.mark.parametrize(("key", "sent"), [(None, None), (" sec\nret\n", "Bearer secret")])
def test_an_api_key_is_sent_in_one_line_or_not_at_all(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, key: str | None, sent: str | None
) -> None:
    """Python's error for a header with a line break quotes the key, which must not be printed or written."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    assert Server(server.url + "/v1/").complete("abc", FEW).text == "cba", "the URL may contain the version"
    assert server.asked[0][2].get("Authorization") == sent


TROUBLE: list[Reply] = [(503, {}, "later"), (429, {}, "slowly"), (200, {}, '{"choices": [{"te'), None]


def test_temporary_errors_are_retried_five_times(server: FakeServer, client: Server, waits: list[float]) -> None:
    """Each wait is longer, or what the server asks for, but not for ever."""
    for reply in TROUBLE:
        before = len(server.asked)
        server.trouble = lambda number, body, end=before + 3, reply=reply: reply if number <= end else False
        assert client.complete("abc", FEW).text == "cba"
        assert waits == [1, 2, 4]
        waits.clear()
    before, after = len(server.asked), {"Retry-After": "7"}
    server.trouble = lambda number, body: (429, after if number == before + 1 else {"Retry-After": "700"}, "")
    with pytest.raises(ServerError, match=r"HTTP 429.*\(6 attempts\)"):
        client.complete("abc", FEW)
    assert waits == [7, 60, 60, 60, 60]
    assert len(server.asked) == before + 6


def test_client_errors_are_not_retried(server: FakeServer, client: Server) -> None:
    server.trouble = lambda number, body: (400, {}, '{"error": "too\\nlong"}')
    with pytest.raises(ServerError, match=r"HTTP 400.*too"):
        client.complete("abc", FEW)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [({"choices": []}, "no choice"), ([], "no choice"), ({"choices": [{"finish_reason": "stop"}]}, "no text")],
)
def test_malformed_replies_are_failures(server: FakeServer, client: Server, body: Any, said: str) -> None:
    server.trouble = lambda number, asked: (200, {}, json.dumps(body))
    with pytest.raises(ServerError, match=said):
        client.complete("abc", FEW)


@pytest.mark.parametrize(
    ("reply", "options", "reason"),
    [
        ({"finish_reason": "stop"}, {}, "eos"),
        ({"finish_reason": "stop", "stop_reason": None}, {}, "eos"),
        ({"finish_reason": "stop", "stop_reason": "zz"}, {}, "stop"),
        ({"finish_reason": "stop"}, {"stop": ["zz"]}, "stop"),
        ({"finish_reason": "stop", "stop_reason": None}, {"stop": ["zz"]}, "eos"),
        ({"finish_reason": "tool_calls"}, {"stop": ["zz"]}, "eos"),
        ({"finish_reason": "length"}, {}, "length"),
    ],
)
def test_finish_reasons(
    server: FakeServer, client: Server, reply: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    server.trouble = lambda number, asked: (200, {}, json.dumps({"choices": [{"text": "ab"} | reply]}))
    assert client.complete("abc", FEW | options).finish_reason == reason


def test_tool_calls_and_reasoning_are_kept(server: FakeServer, client: Server) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    reply = {"choices": [{"message": message | {"reasoning_content": "hm"}, "finish_reason": "tool_calls"}]}
    server.trouble = lambda number, asked: (200, {}, json.dumps(reply))
    found = client.chat([{"role": "user", "content": "a"}], [{"type": "function"}], FEW)
    assert found.text == ""
    called = {"type": "function", "function": {"name": "f", "arguments": {}}}
    wanted = {"role": "assistant", "content": "", "tool_calls": [called], "reasoning_content": "hm"}
    assert found.message == wanted
    assert server.asked[0][1]["tools"] == [{"type": "function"}]


def test_a_missing_server_is_a_request_error(server: FakeServer) -> None:
    for url in ("localhost:8000", "ftp://localhost", ""):
        with pytest.raises(RequestError, match="http://localhost:8000/v1"):
            Server(url)
    server.shutdown()
    server.server_close()
    with pytest.raises(RequestError, match="no OpenAI-compatible server at"):
        Server(server.url)


def test_of_several_models_one_must_be_chosen(server: FakeServer) -> None:
    server.models = ["one", "two"]
    with pytest.raises(RequestError, match=r"serves one, two; choose one with --model"):
        Server(server.url)
    assert Server(server.url, "two").model == "two"
