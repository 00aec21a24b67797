"""`medusa distill --server`: the client of OpenAI-compatible servers, and the answers that a server gives."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from chat_families import byte_tokenizer
from decode.settings import Settings
from medusa.commands.distill.client import Server, ServerError
from medusa.commands.distill.engines import HERE, SENT, server_parameters
from medusa.errors import RequestError
from medusa.records.record import Record
from medusa.records.sources import read_records
from tests.commands.fake_server import FakeServer, Reply, serving
from tests.commands.place import Distilled, assistant, by_key, ids_of, lines_of, user
from tests.helpers import LETTERS
from tests.train.templates import CHATML
from train.data.reader import to_examples

FEW = {"max_tokens": 9, "temperature": 0.0}


# --- the client ------------------------------------------------------------------------------------------------------


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


def test_a_key_that_no_header_can_hold_is_refused(client: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "\u201csecret\u201d")
    with pytest.raises(RequestError, match="OPENAI_API_KEY holds characters that no key has") as refused:
        client.complete("abc", FEW)
    assert "secret" not in str(refused.value)


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
    [
        ({"choices": []}, "no choice"),
        ([], "no choice"),
        ({"choices": [{"finish_reason": "stop"}]}, "no text"),
        ({"choices": [{"text": "ab", "finish_reason": "abort"}]}, "broke the text off, with finish_reason 'abort'"),
    ],
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
        ({"finish_reason": "eos_token"}, {"stop": ["zz"]}, "eos"),
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
    for model in (None, "named"):
        with pytest.raises(RequestError, match="no OpenAI-compatible server at"):
            Server(server.url, model)


def test_of_several_models_one_must_be_chosen(server: FakeServer) -> None:
    server.models = ["one", "two"]
    with pytest.raises(RequestError, match=r"serves one, two; choose one with --model"):
        Server(server.url)
    assert Server(server.url, "two").model == "two"


# --- parameters ------------------------------------------------------------------------------------------------------


def parameters(own: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return server_parameters(Settings(**settings), GenerationConfig(**own))


@pytest.mark.parametrize(
    ("own", "settings", "sent"),
    [
        ({}, {}, {}),
        ({}, {"temperature": 0.7}, {}),
        ({}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}),
        ({}, {"stop": ("a", "b"), "ignore_eos": True}, {"stop": ["a", "b"], "ignore_eos": True}),
        ({}, {"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repetition_penalty": 1.1, "stop_strings": "x"}, {}, {"repetition_penalty": 1.1, "stop": ["x"]}),
        # A server's defaults are the checkpoint's, so what turns them off must be sent.
        ({"repetition_penalty": 1.1, "top_k": 9}, {"ignore_generation_config": True}, {"repetition_penalty": 1.0}),
        ({"stop_strings": ["x"]}, {"ignore_generation_config": True}, {"stop": []}),
        ({"top_k": 9, "top_p": 0.8, "min_p": 0.1}, {"temperature": 1.0}, {"top_k": -1, "top_p": 1.0, "min_p": 0.0}),
        ({"remove_invalid_values": True, "renormalize_logits": True, "min_length": 0}, {}, {}),
        ({"suppress_tokens": [1]}, {"ignore_generation_config": True}, {}),
    ],
)
def test_a_server_is_asked_for_every_setting(own: Any, settings: Any, sent: dict[str, Any]) -> None:
    wanted = {"max_tokens": 256, "temperature": settings.get("temperature", 0.0)} | sent
    assert parameters(own, **settings) == wanted


def test_settings_for_which_no_server_can_be_asked_are_named() -> None:
    """Every setting of the local engine is sent, refused, or read before: none is dropped without a word."""
    read_here = {"max_new_tokens", "temperature", "stop", "ignore_generation_config", "amateur", "grammar"}
    assert {known.name for known in fields(Settings)} == {*SENT, *HERE} | read_here
    others = {"acceptance": "typical", "draft": "sample", "stop_drafting": 0.1, "epsilon": 0.2, "delta": 0.2}
    for name, value in (others | {"compile": True}).items():
        with pytest.raises(RequestError, match=f"--{name.replace('_', '-')} is for decoding on this machine"):
            parameters({}, temperature=1.0, **{name: value})
    for name in ("no_repeat_ngram_size", "suppress_tokens", "min_new_tokens", "forced_eos_token_id"):
        with pytest.raises(RequestError, match=f"sets {name}=.*--ignore-generation-config, or leave out --server"):
            parameters({name: [3] if name == "suppress_tokens" else 3})


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_server(distill: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Distilled]:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were loaded"))
    monkeypatch.setattr("medusa.commands.distill.client.LONGEST_WAIT", 0.0)
    return lambda *argv, **kwargs: distill("--server", server.url, *argv, **kwargs)


def test_a_server_continues_texts_as_ids(by_server: Any, server: FakeServer, talking: str) -> None:
    done = by_server(prompts=[{"text": "abc", "category": "x"}, {"text": "abcdefgh"}])
    assert done.status == 0, done.err
    lines = by_key(done.lines)
    eos = AutoTokenizer.from_pretrained(talking).eos_token_id
    assert lines[0, 0] == {
        "index": 0,
        "turn": 0,
        "input_ids": [*ids_of("abccba"), eos],
        "prompt_tokens": 3,
        "answer": "cba",
        "finish_reason": "eos",
        "category": "x",
    }
    cut = lines[1, 0]
    assert (cut["input_ids"], cut["finish_reason"]) == (ids_of("abcdefghhgfedc"), "length"), "cut off: no end is taught"
    sent = {tuple(body.items()) for body in ({k: str(v) for k, v in body.items()} for _, body, _ in server.asked)}
    assert (("model", "the-model"), ("prompt", str(ids_of("abc"))), ("max_tokens", "6"), ("temperature", "0.0")) in sent


def test_a_server_answers_conversations_turn_by_turn(by_server: Any, server: FakeServer) -> None:
    talk = [{"role": "system", "content": "x"}, user("abc"), assistant("not mine"), user("g"), assistant("no")]
    rows = [{"turns": ["abc", "fed"], "category": "writing"}, {"messages": talk}]
    done = by_server("--concurrency", "3", prompts=rows)
    lines = by_key(done.lines)
    assert lines[1, 1]["messages"] == [
        {"role": "system", "content": "x"},
        user("abc"),
        assistant("cba"),
        user("g"),
        assistant("g"),
    ]
    assert (lines[1, 1]["teach"], lines[1, 1]["finish_reason"]) == ("last", "eos")
    assert lines[0, 1]["category"] == "writing"
    assert done.figures["new_tokens"] == sum(len(line["answer"]) for line in done.lines), "one token a letter"
    assert {path for path, _, _ in server.asked} == {"/v1/chat/completions"}


def test_a_server_gets_the_options_of_the_template_and_the_data_keep_them(by_server: Any, server: FakeServer) -> None:
    row = {"prompt": "abc", "chat_template_kwargs": {"lang": "de"}}
    done = by_server("--template-option", "enable_thinking=false", prompts=[row, {"prompt": "abd"}])
    assert done.status == 0, done.err
    asked = [body.get("chat_template_kwargs") for _, body, _ in server.asked]
    lines = by_key(done.lines)
    assert sorted(asked, key=len) == [{"enable_thinking": False}, {"enable_thinking": False, "lang": "de"}]
    assert lines[0, 0]["chat_template_kwargs"] == {"enable_thinking": False, "lang": "de"}
    assert lines[1, 0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_history_holds_the_thought_and_the_calls_of_earlier_answers(by_server: Any, server: FakeServer) -> None:
    """The server's template decides what it reads of them."""
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": "yes", "reasoning": "hm", "tool_calls": [called]}

    def reply(number: int, body: dict[str, Any]) -> Reply | bool:
        if len(body["messages"]) > 1:
            return False
        return 200, {}, json.dumps({"choices": [{"message": said, "finish_reason": "tool_calls"}]})

    server.trouble = reply
    done = by_server(prompts=[{"turns": ["abc", "abd"]}])
    assert done.status == 0, done.err
    history = next(body["messages"] for _, body, _ in server.asked if len(body["messages"]) > 1)
    assert history[1]["tool_calls"][0]["function"] == called["function"], "with arguments as JSON text"
    assert {history[1]["reasoning"], history[1]["reasoning_content"]} == {"hm"}


def test_server_answers_are_taught_once_with_their_end(by_server: Any, tmp_path: Path) -> None:
    by_server(prompts=[{"turns": ["abc", "abcdefgh"]}])
    records = {len(record.messages or ()): record for record in read_records(str(tmp_path / "own.jsonl"))}
    tokenizer = byte_tokenizer(CHATML)

    def taught(record: Record) -> str:
        (example,), _ = to_examples(record, tokenizer)
        pairs = zip(example.input_ids, example.loss_mask, strict=True)
        return str(tokenizer.decode([token for token, mark in pairs if mark]))

    assert taught(records[2]) == "cba<|im_end|>"
    assert taught(records[4]) == "hgfedc", "the second answer alone, and without an end: it was cut off"


def test_sampling_sends_a_separate_seed_for_each_text(by_server: Any, server: FakeServer) -> None:
    argv = ("--temperature", "0.7", "--top-p", "0.9", "--top-k", "5", "--stop", "zz", "--seed", "3")
    by_server(*argv, prompts=[{"prompt": "abc"}, {"prompt": "abc"}])
    bodies = [body for _, body, _ in server.asked]
    assert len({body["seed"] for body in bodies}) == 2
    for body in bodies:
        wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["zz"]}
        assert wanted.items() <= body.items()
        assert "repetition_penalty" not in body


def test_rejected_requests_are_kept_as_failed_and_retried_on_resume(
    by_server: Any, server: FakeServer, tmp_path: Path
) -> None:
    server.trouble = lambda number, body: (400, {}, "too long") if len(body["prompt"]) == 5 else False
    rows = [{"text": "abc"}, {"text": "abcde"}, {"text": "ab"}]
    done = by_server(prompts=rows)
    assert done.status == 1
    assert by_key(done.lines).keys() == {(0, 0), (2, 0)}
    (failed,) = lines_of(tmp_path / "own.failed.jsonl")
    assert (failed["index"], failed["error"]) == (1, "HTTP 400: too long")
    server.trouble = lambda number, body: False
    before = len(server.asked)
    done = by_server(prompts=rows)
    assert done.status == 0, done.err
    assert by_key(done.lines).keys() == {(0, 0), (1, 0), (2, 0)}
    assert len(server.asked) == before + 1, "what is there is not asked for again"
    assert not (tmp_path / "own.failed.jsonl").exists()


def test_temporary_server_errors_lose_nothing(by_server: Any, server: FakeServer) -> None:
    rows = [{"turns": [LETTERS[n], LETTERS[n + 1]]} for n in range(10)]
    whole = by_server(prompts=rows)
    kinds: list[Reply] = [(503, {}, ""), (429, {}, ""), (200, {}, "{"), None]
    asked: Counter[str] = Counter()

    def trouble(number: int, body: dict[str, Any]) -> Reply | bool:
        """Every question fails up to four times, with every kind of error; the sixth attempt would be the last."""
        question = json.dumps(body)
        asked[question] += 1
        return kinds[number % 4] if asked[question] <= len(question) % 5 else False

    server.trouble = trouble
    done = by_server("--concurrency", "8", prompts=rows, output="other.jsonl")
    assert done.status == 0, done.err
    assert by_key(done.lines) == by_key(whole.lines)


def test_an_unreachable_server_ends_the_run_with_one_line(by_server: Any, server: FakeServer) -> None:
    rows = [{"prompt": letter} for letter in LETTERS[:50]]
    server.trouble = lambda number, body: (401, {}, "no key") if number > 5 else False
    done = by_server("--concurrency", "2", prompts=rows)
    assert done.status == 1
    assert re.search(r"1[67] texts in a row could not be generated", done.err), "16, or one more that was under way"
    assert "HTTP 401: no key" in done.err
    assert 1 <= len(done.lines) <= 5
    assert len(server.asked) < 30, "and the rest was not tried"
    server.trouble = lambda number, body: False
    assert by_key(by_server(prompts=rows).lines).keys() == {(n, 0) for n in range(50)}


def test_ctrl_c_while_requests_are_queued_ends_the_run(
    by_server: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long list of conversations takes seconds to queue."""
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: Any, ask: Any, task: Any, journal: Any) -> Any:
        if task.index == 40:
            raise KeyboardInterrupt
        return submit(pool, ask, task, journal)

    def slow(number: int, body: dict[str, Any]) -> bool:
        time.sleep(0.02)
        return False

    server.trouble = slow
    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    done = by_server("--concurrency", "1", prompts=[{"text": letter * 2} for letter in LETTERS[:50]])
    assert done.status == 130
    assert len(server.asked) < 20, "queued conversations are not asked"


def test_failures_between_answers_do_not_end_the_run(by_server: Any, server: FakeServer) -> None:
    server.trouble = lambda number, body: (400, {}, "no") if body["prompt"][0] % 2 else False
    prompts = [{"text": LETTERS[number % 26] * (2 + number // 26)} for number in range(50)]
    done = by_server("--concurrency", "1", prompts=prompts)
    assert "25 of 50 texts could not be generated" in done.err
    assert by_key(done.lines).keys() == {(n, 0) for n in range(0, 50, 2)}


def test_self_talk_by_a_server(by_server: Any, server: FakeServer, talking: str) -> None:
    done = by_server("--self-talk", "2", "--temperature", "1")
    begin = AutoTokenizer.from_pretrained(talking).bos_token_id
    assert [line["input_ids"][0] for line in done.lines] == [begin, begin]
    assert [body["prompt"] for _, body, _ in server.asked] == [[begin], [begin]]


def test_a_server_writes_questions(by_server: Any, server: FakeServer, talking: str, tmp_path: Path) -> None:
    template = "{% for m in messages %}def{{ m.content }}g{% endfor %}"
    shutil.copytree(talking, tmp_path / "asking")
    (tmp_path / "asking" / "chat_template.jinja").write_text(template, encoding="utf-8")
    done = by_server("--questions", "2", "--temperature", "1", backbone=str(tmp_path / "asking"))
    assert [(line["prompt"], line["tokens"]) for line in done.lines] == [("fed", 3)] * 2
    assert [(body["prompt"], body["stop"]) for _, body, _ in server.asked] == [(ids_of("def"), ["g"])] * 2
    assert len({body["seed"] for _, body, _ in server.asked}) == 2


def test_a_server_is_not_asked_for_questions_whose_ends_it_hides(
    by_server: Any, server: FakeServer, talking: str, tmp_path: Path
) -> None:
    template = "{% for m in messages %}def{{ m.content }}{{ bos_token }}{% endfor %}"
    shutil.copytree(talking, tmp_path / "asking")
    (tmp_path / "asking" / "chat_template.jinja").write_text(template, encoding="utf-8")
    done = by_server("--questions", "2", "--temperature", "1", backbone=str(tmp_path / "asking"))
    assert done.status == 2
    assert "which servers hide; leave out --server" in done.err
    assert not server.asked


def test_a_server_is_not_asked_for_what_it_cannot_do(
    by_server: Any, server: FakeServer, talking: str, tmp_path: Path
) -> None:
    backbone = tmp_path / "backbone"
    shutil.copytree(talking, backbone)
    GenerationConfig(suppress_tokens=[3]).save_pretrained(backbone)
    done = by_server(prompts=[{"prompt": "a"}], backbone=str(backbone))
    assert done.status == 2
    assert "generation_config.json of the model sets suppress_tokens=" in done.err
    assert not server.asked
