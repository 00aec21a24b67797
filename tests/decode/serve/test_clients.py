"""Request bodies as real clients send them: which pass, and which prompt the model gets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from chat_families import byte_tokenizer, family_tokenizer
from decode.serve.fields import IGNORED, UNSUPPORTED
from decode.serve.schema import ApiError, ChatRequest, CompletionRequest, parse
from decode.settings import Settings
from medusa.errors import RequestError

BODIES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "client_bodies.yaml").read_text(encoding="utf-8")
)
TOOLS = "system\n# Tools\n<tools>\n"


def expected(text: str) -> str:
    """Write the short form of a prompt in full, by hand for this one template."""
    text = text.replace("[system-tools]", "[tools]")
    whole = ""
    for name, said in re.findall(
        r"\[(user|assistant|system|tools|go)\]([^\[]*(?:\[(?!user|assistant|system|tools|go\b)[^\[]*)*)", text
    ):
        if name == "go":
            whole += f"<|im_start|>assistant\n{said}"
        elif name == "tools":
            whole += f"<|im_start|>{TOOLS}{said}\n</tools><|im_end|>\n"
        else:
            whole += f"<|im_start|>{name}" + ("" if said.startswith("\n") else "\n") + f"{said}<|im_end|>\n"
    return whole or text


@pytest.mark.parametrize("case", BODIES, ids=lambda case: case["client"])
def test_requests_of_real_clients(case: dict[str, Any]) -> None:
    tokenizer = family_tokenizer("Qwen3")
    kind = CompletionRequest if case.get("path") == "/v1/completions" else ChatRequest

    def prompts() -> list[list[int]]:
        return parse(json.dumps(case["body"]).encode(), kind).prompts(tokenizer, {})

    if "refused" in case:
        with pytest.raises((ApiError, RequestError), match=case["refused"]):
            prompts()
        return
    told = [tokenizer.decode(ids) for ids in prompts()]
    assert told == [expected(text) for text in case.get("prompts", [case.get("prompt")])]


def test_there_are_sixty_of_them() -> None:
    assert len(BODIES) >= 60
    assert len({case["client"] for case in BODIES}) == len(BODIES)


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_the_chat_template_does_not_read_is_refused(name: str) -> None:
    """Else the model would answer without tools, and the client would not know why."""
    body = {"messages": [{"role": "user", "content": "hi"}], name: [{"type": "function", "function": {"name": "add"}}]}
    template = "{# no tools, no documents #}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer(template)
    with pytest.raises(ApiError, match=f"reads no {name}; leave them out"):
        parse(json.dumps(body).encode(), ChatRequest).prompts(tokenizer, {})
    reads = byte_tokenizer(template + "{{ " + name + " | tojson }}")
    (ids,) = parse(json.dumps(body).encode(), ChatRequest).prompts(reads, {})
    assert "add" in str(reads.decode(ids))
    unused: dict[str, Any] = {"tool_choice": "none"} if name == "tools" else {name: []}
    assert parse(json.dumps(body | unused).encode(), ChatRequest).prompts(tokenizer, {})


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_values_that_leave_a_parameter_off_pass_and_others_do_not(name: str, kind: Any) -> None:
    if name in kind.model_fields:
        pytest.skip("a parameter of this endpoint")
    required = {"messages": [{"role": "user", "content": "a"}]} if kind is ChatRequest else {"prompt": "a"}
    for value in UNSUPPORTED[name]:
        parse(json.dumps(required | {name: value}).encode(), kind)
    with pytest.raises(ApiError, match=f"{name} is not supported"):
        parse(json.dumps(required | {name: "something else"}).encode(), kind)


def test_ignored_parameters_pass_with_any_value() -> None:
    body = {"prompt": "a"} | {name: {"any": ["value"]} for name in IGNORED}
    assert parse(json.dumps(body).encode(), CompletionRequest).prompt == ["a"]


def test_a_top_k_of_minus_one_turns_it_off() -> None:
    """As in other servers, and as `medusa distill --server` writes it: null would be the server's own value."""
    defaults, body = Settings(temperature=1.0, top_k=5), {"prompt": "a"}
    for asked, top_k in ({}, 5), ({"top_k": None}, 5), ({"top_k": -1}, 0), ({"top_k": 7}, 7):
        assert parse(json.dumps(body | asked).encode(), CompletionRequest).settings(defaults).top_k == top_k
