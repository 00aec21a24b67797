"""`response_format` in the API, and --json-schema and --grammar of the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")
pytest.importorskip("starlette", reason="needs the extra serve")

from decode.serve.app import CompletionApi
from decode.serve.schema import ResponseFormat
from decode.serve.worker import BatchWorker
from decode.settings import Settings
from decode.strategies.grammar import lark_source
from decode.texts import TextGenerator
from medusa.__main__ import main
from tests.decode.serve.server_tools import PROMPTS, ask

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


def test_answers_follow_the_schema(url: str) -> None:
    """A request for free text after it stays free."""
    messages = [{"role": "user", "content": "Tell me about Tom."}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 1.2, "n": 2}
    status, answer = ask(url, "/v1/chat/completions", body | {"response_format": AS_SCHEMA})
    assert status == 200, answer
    for choice in answer["choices"]:
        found = json.loads(choice["message"]["content"])
        assert [*found] == ["name", "old"]
        assert isinstance(found["old"], bool)
        assert choice["finish_reason"] == "stop"
    _, free = ask(url, "/v1/chat/completions", body | {"response_format": {"type": "text"}, "max_tokens": 4})
    assert not any(choice["message"]["content"].startswith("{") for choice in free["choices"])


def test_a_json_object_begins_like_one(url: str) -> None:
    body = {"prompt": "A list: ", "max_tokens": 5, "response_format": {"type": "json_object"}}
    assert ask(url, "/v1/completions", body)[1]["choices"][0]["text"].startswith("{")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"type": "xml"}, "response_format is {'type': 'xml'}; it must be"),
        ({"type": "json_schema"}, "response_format is"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}, "the JSON schema is invalid: Invalid"),
    ],
)
def test_wrong_formats_are_refused(url: str, asked: Any, told: str) -> None:
    status, answer = ask(url, "/v1/completions", {"prompt": "a", "response_format": asked})
    assert status == 400
    assert told in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_a_request_overrides_the_grammar_of_the_server(generator: TextGenerator) -> None:
    grammar = generator.grammars.compiled(lark_source('start: "no"'))
    made = replace(generator, settings=Settings(max_new_tokens=12, grammar=grammar))
    api = CompletionApi(BatchWorker(made, 1), "demo")
    default, text, some = (
        api._with_format(made.settings, asked)
        for asked in (None, ResponseFormat(type="text"), ResponseFormat(type="json_object"))
    )
    assert (default.grammar, text.grammar) == (grammar, None)
    assert some.grammar is not None
    assert '"type":"object"' in some.grammar.source.replace(" ", "")
    assert replace(some, grammar=None) == text


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["generate", "demo", *words]) == 0
    return capsys.readouterr().out


def test_generate_follows_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "names.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "Tim" | "Sue and " name\nname: /[A-D][a-z]{2}/')
    words = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max-new-tokens", "40", "--tree", "eight"]
    lines = written(capsys, *words, "--json-schema", str(schema), "--batch-size", "2").splitlines()
    assert [[*json.loads(line)] for line in lines] == [["name", "old"]] * 2
    assert written(capsys, *words[2:], "--grammar", str(grammar)).strip()[:3] in ("Tim", "Sue")


@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--json-schema", "{tmp}/no.json"], "there is no file "),
        (["--json-schema", "{tmp}/text"], "cannot be read: Expecting value"),
        (["--json-schema", "{tmp}/list"], "the JSON schema is invalid: Expecting object schema"),
        (["--grammar", "{tmp}/text"], "the grammar is invalid: "),
        (["--grammar", "{tmp}/good", "--json-schema", "{tmp}/list"], "leave one of them out"),
        (["--grammar", "{tmp}/good", "--ignore-eos"], "--ignore-eos has no effect on a grammar"),
        (["--grammar", "{tmp}/good", "--compile"], "--compile is not possible: a grammar"),
    ],
)
def test_wrong_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, words: list[str], told: str
) -> None:
    for name, text in (("text", "hello ("), ("list", "[1]"), ("good", 'start: "a"')):
        (tmp_path / name).write_text(text)
    prompt = ["Hi"] if command == "generate" else []
    assert main([command, "demo", *prompt, *(word.format(tmp=tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
