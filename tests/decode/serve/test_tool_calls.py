"""Calls of tools in answers: whole and streamed, in every format, and as text where the format is broken."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from chat_families import byte_tokenizer
from medusa.records.replies import FORMATS, ReplyReader, message_of, response_template
from tests.decode.serve.server_tools import choices_of
from tests.helpers import shared_model

ADD = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
ONE = '{"name": "add", "arguments": {"a": 1}}'
WRITTEN = {
    "channels (gpt-oss)": "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.add"
    '<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    "XML parameters (Qwen3-Coder, Qwen3.5)": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>",
    "Hermes and Qwen": f"<tool_call>\n{ONE}\n</tool_call><|im_end|>",
    "Mistral, names before arguments": '[TOOL_CALLS]add[ARGS]{"a": 1}</s>',
    "Mistral": f"[TOOL_CALLS] [{ONE}]</s>",
    "Llama 3.1": '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>',
}


def read(name: str, text: str, seed: int = 0) -> dict[str, Any]:
    """The message that a reader makes of a text that arrives in random pieces."""
    draw, tokenizer = random.Random(seed), byte_tokenizer("{# " + " ".join(FORMATS[name][0]) + " #}")
    form = response_template(tokenizer)
    assert form is FORMATS[name][1]
    reader, deltas = ReplyReader(form, form["start_anchor"], tokenizer, ADD), []
    while text:
        size = draw.randint(1, 9)
        deltas += reader.feed(text[:size])
        text = text[size:]
    return message_of([*deltas, *reader.end()])


@pytest.mark.parametrize("name", list(FORMATS))
def test_calls_of_every_format_are_read_in_any_pieces(name: str) -> None:
    for seed in range(5):
        found = read(name, WRITTEN[name], seed)
        (call,) = found.pop("tool_calls")
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert call["id"].isalnum()
        assert len(call["id"]) == 9
        assert found.get("reasoning_content") == ("Hm" if "gpt-oss" in name else None)
        assert found["content"] is None


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_call_that_breaks_the_format_is_text(name: str) -> None:
    broken = WRITTEN[name].replace('"a": 1', '"a": 1, "b"').replace("</function>", "").replace("add", "a d")
    found = read(name, broken)
    assert "tool_calls" not in found
    assert found["content"].strip()


SPOKEN = ("channels (gpt-oss)",)  # formats with a mark for content


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_cut_call_is_text_and_no_call_that_lacks_arguments(name: str) -> None:
    """An agent would carry it out. Only JSON shows its own end, so only there the closing mark may be missing."""
    call = WRITTEN[name].partition("<|end|>")[2] or WRITTEN[name]
    before = "" if name in SPOKEN or name == "Llama 3.1" else "Let me see.\n"  # there, a call begins the text
    closed = read(name, before + call)
    assert closed["content"] == (before.rstrip() or None)
    for end in range(1, len(call)):
        found = read(name, before + call[:end], seed=end)
        if calls := found.get("tool_calls"):
            assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}, "cut after its last letter"
        else:
            assert found["content"] == before + call[:end]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in SPOKEN])
def test_without_a_valid_call_every_letter_is_content(name: str) -> None:
    opening = WRITTEN[name][: WRITTEN[name].index("{" if name != "XML parameters (Qwen3-Coder, Qwen3.5)" else "1")]
    draw, tries = random.Random(0), 0
    for seed in range(60):
        pieces = [draw.choice(["a", " ", "\n", "<", "[", opening, opening[:5], "b c", "{", "}"]) for _ in range(9)]
        text = "x" + "".join(pieces) + "."
        found = read(name, text, seed)
        assert "tool_calls" not in found
        assert found["content"] == text
        tries += opening in text
    assert tries > 10, "no power"


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud83d"}', '{"a": NaN}', '{"a": ' + 3000 * "[" + 3000 * "]" + "}", 3000 * "["],
    ids=["half a character", "no number", "nested too deeply", "cut"],
)
def test_arguments_that_no_client_can_read_are_content(arguments: str) -> None:
    form = "Hermes and Qwen"
    text = WRITTEN[form].replace('{"a": 1}', arguments)
    assert text != WRITTEN[form]
    found = read(form, text, 0)
    assert "tool_calls" not in found
    json.dumps(found, allow_nan=False).encode()


def test_a_piece_of_text_is_one_delta() -> None:
    form = FORMATS["Hermes and Qwen"][1]
    reader = ReplyReader(form, form["start_anchor"], byte_tokenizer("{# <tool_call> #}"), ADD)
    assert [*reader.feed("<think>Hm, well</think>I add.")] == [
        {"reasoning_content": "Hm, well"},
        {"content": "I add."},
    ]


def test_text_thoughts_and_several_calls_stand_in_one_answer() -> None:
    name = "Hermes and Qwen"
    text = "<think>\nHm\n</think>\n\nI add." + WRITTEN[name].removesuffix("<|im_end|>") * 2
    found = read(name, text)
    assert found["content"].strip() == "I add."
    assert found["reasoning_content"].strip() == "Hm"
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["add", "add"]
    assert len({call["id"] for call in found["tool_calls"]}) == 2
    assert read(name, "1 < 2 and <tool")["content"] == "1 < 2 and <tool"


def test_the_server_answers_with_calls_of_tools() -> None:
    """A grammar makes the model call a tool, in a whole answer and in a stream; tool_choice none makes it text."""
    pytest.importorskip("llguidance", reason="needs the extra structured")
    pytest.importorskip("starlette", reason="needs the extra serve")
    from starlette.testclient import TestClient

    from decode.serve.app import CompletionApi
    from decode.serve.worker import BatchWorker
    from decode.settings import Settings
    from decode.strategies.grammar import Grammars, lark_source
    from decode.texts import TextGenerator

    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}{# <tool_call> #}"
    )
    model = shared_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    call = WRITTEN["Hermes and Qwen"].removesuffix("<|im_end|>")
    grammar = Grammars(model, tokenizer).compiled(lark_source(f"start: {json.dumps('Yes.' + call)}"))
    worker = BatchWorker(TextGenerator(model, Settings(max_new_tokens=128, grammar=grammar), tokenizer), 2)
    worker.start(lambda: None)
    asked = {"messages": [{"role": "user", "content": "Add."}], "tools": ADD}
    with TestClient(CompletionApi(worker, "tiny").app(["testserver"])) as client:
        replies = [
            client.post("/v1/chat/completions", json=asked | more)
            for more in ({}, {"stream": True}, {"tool_choice": "none"})
        ]
    assert [reply.status_code for reply in replies] == [200] * 3
    (whole,), (without,) = replies[0].json()["choices"], replies[2].json()["choices"]
    streamed = choices_of(replies[1].text)
    for message, reasons in (
        (whole["message"], [whole["finish_reason"]]),
        (
            message_of([choice["delta"] for choice in streamed]),
            [choice["finish_reason"] for choice in streamed if choice["finish_reason"]],
        ),
    ):
        assert message["content"] == "Yes."
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
        assert reasons == ["tool_calls"]
    assert (without["message"]["content"], without["finish_reason"]) == ("Yes." + call, "stop")
