"""`medusa serve`: the API over HTTP, rejected requests, batches, closed connections, and our client."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient

from decode.serve import app
from decode.serve.app import CompletionApi, serve
from decode.serve.schema import ApiError, ChatRequest, CompletionRequest, parse
from decode.serve.worker import BatchRow, BatchWorker
from decode.settings import Settings
from decode.strategies.contrastive import Amateur
from decode.texts import TextGenerator
from medusa.commands.distill.client import Server, ServerError
from medusa.errors import RunError
from medusa.records.record import Record, prompt_ids
from tests.decode.serve.server_tools import PROMPTS, SHORT, ask, begin, choices_of, decode, expected, said, written
from tests.helpers import shared_model, tiny_model
from tests.train.templates import CHATML, sentencepiece_tokenizer

# --- the API ---------------------------------------------------------------------------------------------------------


def test_texts_equal_plain_decoding(url: str, generator: TextGenerator) -> None:
    """The prompts are a text, ids, and several of both in one request."""
    ids = generator.tokenizer(PROMPTS[1])["input_ids"]
    status, answer = ask(url, "/v1/completions", {"model": "demo", "prompt": [PROMPTS[0], ids, PROMPTS[2]]})
    assert status == 200
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == [expected(generator, prompt) for prompt in PROMPTS]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    given = sum(len(generator.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    assert answer["usage"] == {"prompt_tokens": given, "completion_tokens": 24, "total_tokens": given + 24}


def test_a_stream_gives_the_same_text_in_pieces(url: str, generator: TextGenerator) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 24, "stop": ["."]}
    status, text = ask(url, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    assert status == 200
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    pieces = choices_of(text)
    assert len(pieces) > 2
    whole = "".join(piece["text"] for piece in pieces)
    assert whole == expected(generator, PROMPTS[0], Settings(max_new_tokens=24, stop=(".",)))
    assert "." not in whole
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_chat_goes_through_the_template(url: str, generator: TextGenerator) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    status, answer = ask(url, "/v1/chat/completions", {"messages": messages, "max_completion_tokens": 8})
    assert status == 200
    message = answer["choices"][0]["message"]
    ids = prompt_ids(Record("", messages=[{"role": "user", "content": "Hello"}]), generator.tokenizer)
    assert message == {"role": "assistant", "content": written(generator, ids, Settings(max_new_tokens=8))}
    status, text = ask(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 8, "stream": True})
    deltas = [choice["delta"] for choice in choices_of(text)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


def test_samples_depend_only_on_the_seed(url: str) -> None:
    """Samples do not depend on the batch: three copies equal the texts of three seeds."""
    body = {"prompt": PROMPTS[0], "temperature": 1.0, "seed": 7}
    copies = [choice["text"] for choice in ask(url, "/v1/completions", body | {"n": 3})[1]["choices"]]
    alone = [ask(url, "/v1/completions", body | {"seed": seed})[1]["choices"][0]["text"] for seed in (7, 8, 9)]
    assert copies == alone
    assert len(set(copies)) == 3


def test_models_and_health(url: str) -> None:
    status, answer = ask(url, "/v1/models")
    assert (status, [model["id"] for model in answer["data"]]) == (200, ["demo"])
    assert answer["data"][0]["max_model_len"] == 512
    assert ask(url, "/v1/models/demo")[0] == ask(url, "/health")[0] == 200
    assert ask(url, "/v1/models/other")[0] == 404


USER = {"role": "user", "content": "a"}
WRONG_COMPLETIONS: list[tuple[Any, str]] = [
    (b"{", "the request is not JSON"),
    (b"[" * 100_000, "the request is not JSON"),
    ([1], "must be a JSON object"),
    ({}, "prompt is missing; it must be a text or a list of ids"),
    ({"prompt": []}, "prompt is []; it must be a text or a list of ids"),
    ({"prompt": [True]}, "prompt is [True]; it must be a text"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": [99999]}, "vocabulary has 4096"),
    ({"prompt": "word " * 600}, "context ends at 512"),
    ({"prompt": "word " * 40_000}, "the prompt has 200000 characters, but the context ends at 512 tokens"),
    ({"prompt": "a", "n_predict": "x"}, "n_predict is 'x'; it must be a whole number"),
    ({"prompt": "a", "temprature": 1}, "temprature is not a parameter of this endpoint"),
    ({"prompt": "a", "": 1}, " is not a parameter of this endpoint"),
    ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ({"prompt": "a", "temperature": -1}, "temperature is -1.0; it must be 0"),
    ({"prompt": "a", "temperature": 1e-320}, "temperature is 1e-320; it must be a number, 0 or at least 0.001"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature is nan; it must be a number"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens is True; it must be a whole number"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
    ({"prompt": "a", "max_completion_tokens": -2}, "max_completion_tokens is -2; it must be a whole number of at"),
    ({"prompt": "a", "repetition_penalty": 1e-9}, "it must be a number of at least 0.01"),
    ({"prompt": "a", "stop": "x\ud83d"}, "half a character"),
    ({"prompt": "a", "stop": 3}, "stop is 3"),
    ({"prompt": "a", "stop": ""}, "a stop string is empty"),
    ({"prompt": "a", "n": 0}, "n is 0; it must be a whole number from 1"),
    ({"prompt": ["a"] * 100, "n": 2}, "200 texts were asked for"),
    ({"prompt": [-1], "echo": True}, "the prompt holds the id -1"),
    ({"prompt": [[1], [2**64]], "echo": True}, f"the prompt holds the id {2**64}"),
    ({"prompt": "a", "seed": -2}, "seed is -2"),
    ({"prompt": "a", "stream": "yes"}, "stream is 'yes'; it must be true or false"),
    ({"prompt": "a", "stream_options": {"include_usage": 1}}, "it must be an object such"),
    ({"prompt": 3, "temprature": 1}, "temprature is not a parameter"),
    ({"prompt": [[1] * 999 + ["x"]]}, "...]]; it must be a text or a list of ids"),
    ({"prompt": "a", "logprobs": 21}, "logprobs is 21; it must be a whole number from 0"),
    ({"prompt": "a", "logprobs": True}, "logprobs is True; it must be a whole number"),
    ({"prompt": "a", "logprobs": 1, "max_tokens": 0}, "it must be a whole number of at le"),
    ({"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty is not supported"),
    ({"prompt": "a", "messages": []}, "messages is not a parameter of this endpoint"),
]
WRONG_CHATS: list[tuple[Any, str]] = [
    ({"messages": [USER], "echo": True}, "echo is not supported"),
    ({"messages": [USER], "logprobs": 1}, "logprobs is 1; it must be tr"),
    ({"messages": [USER], "top_logprobs": 1}, "needs logprobs: true"),
    ({"messages": [USER], "tool_choice": "required"}, "it must be auto or none"),
    ({"messages": []}, "messages is []; it must be a list"),
    ({"messages": [], "modalities": ["text", "audio"]}, "modalities is not supported"),
    ({"messages": [USER | {"content": 3}]}, "message 1: content is 3; it must"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "end with the user's"),
    ({"messages": [{"role": "user"}]}, "message 1: a message of the user needs content"),
]
WRONG = [("/v1/completions", *case, 400) for case in WRONG_COMPLETIONS]
WRONG += [("/v1/chat/completions", *case, 400) for case in WRONG_CHATS]
WRONG += [("/v1/completions", {"prompt": "a", "model": "gpt"}, "model is 'gpt'; this server has 'demo'", 404)]
WRONG += [("/v1/completions", {"prompt": "a", "model": ""}, "model is ''; this server has 'demo'", 404)]
WRONG += [("/v1/embeddings", {}, "there are /v1/models, /v1/completions", 404)]


@pytest.mark.parametrize(("path", "body", "told", "status"), WRONG)
def test_wrong_requests_get_an_error_object(url: str, path: str, body: Any, told: str, status: int) -> None:
    found, answer = ask(url, path, body)
    assert found == status, answer
    assert told in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_parameters_that_cannot_change_the_text_pass(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}
    extra = {"reasoning_effort": "low", "prediction": {"type": "content", "content": "x"}, "modalities": ["text"]}
    extra |= {"metadata": {"a": "b"}, "temperature": None, "n": None, "best_of": 1, "tools": []}
    status, answer = ask(url, "/v1/chat/completions", body | extra)
    assert status == 200, answer
    assert answer["choices"] == ask(url, "/v1/chat/completions", body)[1]["choices"]


def figures(url: str) -> dict[str, float]:
    status, text = ask(url, "/metrics")
    assert status == 200
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def test_too_many_prompts_are_refused_before_one_is_encoded(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests wait for the one that is encoded."""
    monkeypatch.setattr("decode.serve.schema.text_ids", lambda *args: pytest.fail("encoded"))
    worker = BatchWorker(generator, 2)
    worker.start(lambda: None)
    with TestClient(CompletionApi(worker, "tiny").app(["testserver"])) as client:
        assert client.post("/v1/completions", json={"prompt": ["a"] * 200}).status_code == 400


@pytest.mark.parametrize("content", ["{}", [{"type": "text", "text": "{}"}]], ids=["a text", "parts"])
@pytest.mark.parametrize("name", ["messages", "tools"])
def test_long_texts_of_chats_are_counted_wherever_they_stand(name: str, content: Any) -> None:
    long = json.loads(json.dumps(content).replace("{}", "x" * 5000))
    message: dict[str, Any] = {"role": "user", "content": "a" if name == "tools" else long}
    tools = {"tools": [{"type": "function", "function": {"name": "f", "description": long}}]} if name == "tools" else {}
    body = {"messages": [message]} | tools
    assert parse(json.dumps(body).encode(), ChatRequest).letters > 5000


def test_a_failure_of_the_server_is_answered_and_counted(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise ZeroDivisionError

    worker = BatchWorker(generator, 2)
    worker.start(lambda: None)
    monkeypatch.setattr(CompletionApi, "begin", fails)
    app = CompletionApi(worker, "tiny").app(["testserver"])
    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the server failed: ZeroDivisionError"
        assert 'path="/v1/completions",status="500"} 1.0' in client.get("/metrics").text


def test_metrics_count_requests_tokens_and_accepted_guesses(url: str, generator: TextGenerator) -> None:
    before = figures(url)
    ids = generator.tokenizer(PROMPTS[0])["input_ids"]
    assert ask(url, "/v1/completions", {"prompt": ids, "max_tokens": 24})[0] == 200
    assert ask(url, "/v1/completions", {"prompt": "", "max_tokens": 24})[0] == 400
    settings = Settings(max_new_tokens=24)
    run = begin(generator, ids, settings)
    lengths = [step.lengths[0] for step in run]
    assert max(lengths) > 1
    grown = {name: value - before.get(name, 0) for name, value in figures(url).items()}
    assert grown['medusa_requests_total{path="/v1/completions",status="200"}'] == 1
    assert grown['medusa_requests_total{path="/v1/completions",status="400"}'] == 1
    assert grown["medusa_prompt_tokens_total"] == len(ids)
    assert grown["medusa_new_tokens_total"] == 24
    assert grown["medusa_steps_total"] == grown["medusa_step_tokens_count"] == len(lengths)
    assert grown["medusa_step_tokens_sum"] == sum(lengths)
    assert figures(url)["medusa_waiting_texts"] == 0


def test_other_origins_may_read_answers_on_request(api: CompletionApi) -> None:
    from starlette.testclient import TestClient

    wanted = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    for origins, allowed in (([], None), (["http://page.example"], "http://page.example"), (["*"], "*")):
        client = TestClient(api.app(["*"], origins))
        assert client.options("/v1/completions", headers=wanted).headers.get("access-control-allow-origin") == allowed
        wrong = client.post("/v1/completions", content=b"{", headers={"Origin": "http://page.example"})
        assert (wrong.status_code, wrong.headers.get("access-control-allow-origin")) == (400, allowed)
    client = TestClient(api.app(["*"], ["http://page.example"]))
    assert client.options("/v1/completions", headers=wanted | {"Origin": "http://evil.example"}).status_code == 400


def test_wrong_methods_and_hosts_are_rejected(url: str) -> None:
    assert ask(url, "/v1/completions")[0] == 405
    assert ask(url, "/v1/models", host="elsewhere.example")[0] == 400


def test_without_a_template_a_chat_is_refused(
    generator: TextGenerator, api: CompletionApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator.tokenizer, "chat_template", None)
    with pytest.raises(ApiError, match="no chat template; use /v1/completions"):
        ChatRequest(messages=[{"role": "user", "content": "a"}]).prompts(generator.tokenizer, {})


def test_the_distillation_client_works_with_the_server(url: str, generator: TextGenerator) -> None:
    """The client is that of `medusa distill --server`."""
    server = Server(url)
    assert server.model == "demo"
    answer = server.complete(generator.tokenizer(PROMPTS[0])["input_ids"], {"max_tokens": 8, "temperature": 0})
    assert (answer.text, answer.finish_reason) == (expected(generator, PROMPTS[0]), "length")
    assert server.chat([{"role": "user", "content": "Hello"}], None, {"max_tokens": 4}).text
    with pytest.raises(ServerError, match="HTTP 400"):
        server.complete([], {})


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_goes_on_with_the_text_of_its_prompt(stream: bool) -> None:
    """With ▁ for spaces, a text of its own does not begin with a space, but after a prompt it may."""
    tokenizer = sentencepiece_tokenizer(CHATML)
    model = shared_model(vocab_size=len(tokenizer))
    worker = BatchWorker(TextGenerator(model, SHORT, tokenizer), 2)
    worker.start(lambda: None)
    prompts = [tokenizer(text)["input_ids"] for text in ("hello", "yes no", "bye")]
    prompts += [[1, token] for token in range(3, 40)]
    body = {"prompt": prompts, "max_tokens": 1, "echo": True, "return_token_ids": True, "stream": stream}
    messages = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "hello"}]
    with TestClient(CompletionApi(worker, "tiny").app(["testserver"])) as client:
        choices = choices_of(client.post("/v1/completions", json=body).text) if stream else []
        choices = choices or client.post("/v1/completions", json=body).json()["choices"]
        chat = {"messages": messages, "max_tokens": 1, "continue_final_message": True, "return_token_ids": True}
        answer = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
    texts, spaces = [""] * len(prompts), 0
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    for choice in choices:
        if new := choice.get("token_ids"):
            spaces += tokenizer.convert_ids_to_tokens(new)[0].startswith("▁")
            assert texts[choice["index"]] == tokenizer.decode(prompts[choice["index"]] + new, skip_special_tokens=True)
    assert spaces > 1
    before = tokenizer("hello", add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(before + answer["token_ids"], skip_special_tokens=True)
    assert "hello" + answer["message"]["content"] == whole


def test_a_request_that_takes_long_to_read_keeps_no_other_waiting(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end, parse = threading.Event(), threading.Event(), app.parse

    def slow(*given: Any) -> Any:
        began.set()
        assert may_end.wait(60)
        return parse(*given)

    monkeypatch.setattr(app, "parse", slow)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, url, "/v1/completions", {"prompt": PROMPTS[0]})
        assert began.wait(60)
        assert ask(url, "/health")[0] == 200
        may_end.set()
        assert asked.result(60)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_ends_answers_with_an_error(
    url: str, api: CompletionApi, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "stopped", False)  # and again after this test
    body = {"prompt": PROMPTS[0], "n": 64, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    before = {*api.answers}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, url, "/v1/completions", body)
        while not (new := {*api.answers} - before):
            time.sleep(0.01)
        new.pop().loop.call_soon_threadsafe(api.stop)
        status, reply = asked.result(60)
    if stream:
        assert status == 200
        reply = json.loads(reply.rstrip().rpartition("data: ")[2])
    else:
        assert status == 503
    assert (reply["error"]["message"], reply["error"]["type"]) == ("the server stops; ask again", "server_error")


# --- the worker ------------------------------------------------------------------------------------------------------


def row_of(generator: TextGenerator, text: str, settings: Settings = SHORT) -> BatchRow:
    return BatchRow(generator.tokenizer(text)["input_ids"], settings, 0, lambda event: None)


def test_batches_of_an_amateur_with_longrope_hold_one_row(generator: TextGenerator) -> None:
    """Longrope rotates all rows by the longest of them."""
    settings = Settings(amateur=Amateur(tiny_model("phi3, longrope")))
    assert BatchWorker(replace(generator, settings=settings), 3).room == 1
    assert BatchWorker(generator, 3).room == 3


@pytest.mark.parametrize(("options", "room"), [({"typical_p": 0.9}, 1), ({"epsilon_cutoff": 1e-3}, 1), ({}, 3)])
def test_options_of_sampled_texts_alone_leave_one_row_to_compiled_steps(
    generator: TextGenerator, options: dict[str, float], room: int
) -> None:
    model = tiny_model("llama")
    model.generation_config.update(**options)
    made = replace(generator, model=model, source=None, settings=Settings(compile=True))
    assert BatchWorker(made, 3).room == room


def test_a_prompt_that_does_not_fit_the_amateur_is_refused_alone(generator: TextGenerator) -> None:
    """In a batch, the check of its rows together would fail all of them."""
    amateur = Amateur(tiny_model("llama", vocab_size=4096, max_position_embeddings=32))
    api = CompletionApi(BatchWorker(replace(generator, settings=Settings(amateur=amateur)), 4), "demo")
    with pytest.raises(ApiError, match="the amateur's context ends at 32"):
        api.begin(CompletionRequest(prompt=[[5] * 40]), asyncio.new_event_loop())
    assert api.worker.arrivals.empty()


def test_a_closed_connection_ends_only_its_row(generator: TextGenerator) -> None:
    settings = Settings(max_new_tokens=24)
    rows = [row_of(generator, PROMPTS[0], settings) for _ in range(2)]
    rows[0].tell = lambda event: rows[0].left.set()  # the reader leaves after the first text
    never = row_of(generator, PROMPTS[1])
    never.left.set()
    told = decode(BatchWorker(generator, 4), *rows, never)
    assert never.new_tokens == 0
    assert rows[0].new_tokens < 12
    assert rows[1].new_tokens == 24
    assert told[1][-1].finish_reason == "length"
    assert said(told[1]) == expected(generator, PROMPTS[0], settings)


class BrokenRow(BatchRow):
    def request(self, generator: TextGenerator) -> NoReturn:
        raise ZeroDivisionError


def test_an_error_in_one_row_goes_to_its_reader_alone(generator: TextGenerator) -> None:
    """Also if it asks for more than the context holds. The worker goes on."""
    worker = BatchWorker(generator, 2)
    broken = BrokenRow([5, 6, 7], replace(SHORT, max_new_tokens=10**9), 0, lambda event: None)
    fine, wrong = decode(worker, BatchRow([5, 6, 7], SHORT, 0, lambda event: None), broken)
    assert [type(event.error) for event in wrong] == [ZeroDivisionError]
    assert not any(event.error for event in fine)
    for told in (fine, *decode(worker, row_of(generator, PROMPTS[0]))):
        assert told[-1].finish_reason == "length"


def test_a_stop_string_does_not_begin_in_the_prompt(url: str) -> None:
    body = {"prompt": "Once upon a", "max_tokens": 8}
    _, whole = ask(url, "/v1/completions", body)
    text = whole["choices"][0]["text"]
    first = text.split(",")[0]  # " time"
    _, same = ask(url, "/v1/completions", body | {"stop": "a" + first})
    assert (same["choices"][0]["text"], same["choices"][0]["finish_reason"]) == (text, "length")
    _, cut = ask(url, "/v1/completions", body | {"stop": ["zzz", first[-2:] + ","]})
    assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == (first[:-2], "stop")


def test_repeated_prompts_give_different_samples_without_a_seed(url: str) -> None:
    body = {"prompt": ["The dog", "The dog"], "temperature": 1.0, "max_tokens": 8}
    _, free = ask(url, "/v1/completions", body)
    assert len({choice["text"] for choice in free["choices"]}) == 2
    _, seeded = ask(url, "/v1/completions", body | {"seed": 7})
    assert len({choice["text"] for choice in seeded["choices"]}) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_http_connection_stops_the_row(url: str, api: CompletionApi, stream: bool) -> None:
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 480, "ignore_eos": True, "stream": stream})
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    reply = connection.makefile("rb")
    if stream:
        assert reply.readline().startswith(b"HTTP/1.1 200")
        assert any(b'"text"' in line for line in reply)  # the headers come before the row is decoded, its text does not
    while not api.worker.running:
        time.sleep(0.001)
    running = list(api.worker.running.values())
    reply.close()
    connection.close()
    while api.worker.running:
        time.sleep(0.001)
    assert len(running) == 1
    assert running[0].new_tokens < 480


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv4 and IPv6")
def test_the_server_listens_at_every_address_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have an IPv4 and an IPv6 address, as localhost often has and the empty name always."""
    found: list[str] = []

    async def end(self: uvicorn.Server) -> None:
        found.extend(listening.getsockname()[0] for server in self.servers for listening in server.sockets)

    monkeypatch.setattr(uvicorn.Server, "main_loop", end)
    serve(Starlette(), "", 0, lambda: found.append("started"))
    assert sorted(found[1:]) == ["0.0.0.0", "::"]
    assert found[0] == "started"


def test_a_port_that_is_taken_meanwhile_ends_the_run() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match=r"cannot listen at 127\.0\.0\.1, port"):
            serve(Starlette(), "127.0.0.1", taken.getsockname()[1], lambda: pytest.fail("it does not listen"))
