"""Taught tokens of a conversation are exactly the assistant's, with its end-of-turn token, in every template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from medusa.errors import RequestError
from medusa.records.record import Record
from tests.train import templates
from tests.train.templates import byte_tokenizer, merging_tokenizer, sentencepiece_tokenizer
from train.data.reader import to_example

Tokenizer = Any
Message = dict[str, Any]


def message(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content} | more


def marked(tokenizer: Tokenizer, messages: list[Message], **fields: Any) -> str:
    """The conversation as the template renders it, with taught tokens between « and »."""
    record = Record("here", messages=messages, **fields)
    example = to_example(record, tokenizer)
    rendered = tokenizer.apply_chat_template(messages, tools=record.tools, return_dict=True)["input_ids"]
    assert example.input_ids == rendered[: len(example.input_ids)], "what transformers makes of the conversation"
    assert record.unfinished or len(example.input_ids) == len(rendered)
    return show(tokenizer, example.input_ids, example.loss_mask)


def show(tokenizer: Tokenizer, ids: list[int], mask: list[bool]) -> str:
    out, taught, run = "", False, []
    for token, mark in [*zip(ids, mask, strict=True), (None, False)]:
        if mark != taught or token is None:
            text = spelled(tokenizer, run)
            out += f"«{text}»" if taught else text
            taught, run = mark, []
        run.append(token)
    return out


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode a part of a text with its leading space, which sentencepiece's `decode` drops."""
    if tokenizer.backend_tokenizer.pre_tokenizer.__class__.__name__ == "Metaspace":
        return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("▁", " ")
    return str(tokenizer.decode(ids))


# The same words in every turn: a mask found by searching the text would land on the first of them (original D10).
REPEATED = [message("user", "yes"), message("assistant", "yes"), message("user", "yes"), message("assistant", "yes")]
SYSTEM = [message("system", "Be kind."), *REPEATED]

CHATML_TURNS = "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n" * 2
LLAMA3_TURNS = (
    "<|start_header_id|>user<|end_header_id|>\n\nyes<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "«yes<|eot_id|>»"
) * 2
LLAMA3_SYSTEM = "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
EXPECTED: dict[str, tuple[str, list[Message], str]] = {
    "chatml": (templates.CHATML, REPEATED, CHATML_TURNS),
    "chatml, system": (templates.CHATML, SYSTEM, "<|im_start|>system\nBe kind.<|im_end|>\n" + CHATML_TURNS),
    "qwen-2.5": (templates.QWEN25, REPEATED, "<|im_start|>system\nYou are Qwen.<|im_end|>\n" + CHATML_TURNS),
    "qwen-2.5, system": (templates.QWEN25, SYSTEM, "<|im_start|>system\nBe kind.<|im_end|>\n" + CHATML_TURNS),
    "llama-3": (templates.LLAMA3, REPEATED, LLAMA3_SYSTEM + "<|eot_id|>" + LLAMA3_TURNS),
    "llama-3, system": (templates.LLAMA3, SYSTEM, LLAMA3_SYSTEM + "Be kind.<|eot_id|>" + LLAMA3_TURNS),
    "mistral": (templates.MISTRAL, REPEATED, "<s>" + "[INST] yes [/INST]« yes</s>»" * 2),
    "zephyr": (templates.ZEPHYR, REPEATED, "<|user|>\nyes</s>\n<|assistant|>\n«yes</s>»\n" * 2),
    "zephyr, system": (
        templates.ZEPHYR,
        SYSTEM,
        "<|system|>\nBe kind.</s>\n" + "<|user|>\nyes</s>\n<|assistant|>\n«yes</s>»\n" * 2,
    ),
    "gemma": (
        templates.GEMMA,
        REPEATED,
        "<s>" + "<start_of_turn>user\nyes<end_of_turn>\n<start_of_turn>model\n«yes<end_of_turn>»\n" * 2,
    ),
    "vicuna": (
        templates.VICUNA,
        REPEATED,
        "<s>A chat between a curious user and an assistant. " + "USER: yes ASSISTANT:« yes</s>»" * 2,
    ),
    "vicuna, system": (templates.VICUNA, SYSTEM, "<s>Be kind. " + "USER: yes ASSISTANT:« yes</s>»" * 2),
    "phi-3, whose conversations end in a token more": (
        templates.PHI3,
        REPEATED,
        "<|user|>\nyes<|end|>\n<|assistant|>\n«yes<|end|>»\n" * 2 + "</s>",
    ),
    "thinking, dropped from earlier turns (qwen-3)": (
        templates.QWEN3,
        REPEATED,
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nyes<|im_end|>»\n",
    ),
    "thinking in the data (qwen-3)": (
        templates.QWEN3,
        [
            message("user", "yes"),
            message("assistant", "<think>\nno\n</think>\n\nyes"),
            message("user", "yes"),
            message("assistant", "<think>\nno\n</think>\n\nyes"),
        ],
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«<think>\nno\n</think>\n\nyes<|im_end|>»\n",
    ),
    "no end of turn, and a special token begins the next one": (
        templates.CHATML.replace("<|im_end|>\n", ""),
        REPEATED,
        "<|im_start|>user\nyes<|im_start|>assistant\n«yes»" * 2,
    ),
    "no generation prompt": (templates.CHATML_WITHOUT_PROMPT, REPEATED, CHATML_TURNS),
    "generation tags": (templates.CHATML_TAGGED, REPEATED, CHATML_TURNS),
    "generation tags around the words alone": (templates.CHATML_TAGGED_WITHOUT_END, REPEATED, CHATML_TURNS),
    "generation tags around some turns only": (
        templates.CHATML_TAGGED.replace(
            "{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}"
        ),
        REPEATED,
        CHATML_TURNS,
    ),
    "generation tags that nothing reaches": (templates.CHATML_TAGGED_NOWHERE, REPEATED, CHATML_TURNS),
    "llama-3 with generation tags": (
        templates.LLAMA3_TAGGED,
        SYSTEM,
        LLAMA3_SYSTEM + "Be kind.<|eot_id|>" + LLAMA3_TURNS,
    ),
}


@pytest.mark.parametrize("kind", [byte_tokenizer, merging_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("name", list(EXPECTED))
def test_only_the_assistants_turns_are_taught(name: str, kind: Callable[[str], Tokenizer]) -> None:
    template, messages, expected = EXPECTED[name]
    assert marked(kind(template), messages).removeprefix(" ") == expected  # sentencepiece's first word has one


@pytest.mark.parametrize("name", [name for name, (_, _, text) in EXPECTED.items() if text.startswith("<s>")])
def test_a_conversation_begins_with_one_bos(name: str) -> None:
    """The template writes BOS, and a tokenizer that adds BOS to every text must not add a second."""
    template, messages, _ = EXPECTED[name]
    tokenizer = merging_tokenizer(template)
    assert tokenizer("yes")["input_ids"][0] == tokenizer.bos_token_id
    assert to_example(Record("here", messages=messages), tokenizer).input_ids.count(tokenizer.bos_token_id) == 1


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
WITH_TOOL = [
    message("user", "yes"),
    message("assistant", None, tool_calls=[CALL]),
    message("tool", "yes"),
    message("assistant", "yes"),
]
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_tool_calls_are_taught_and_tool_results_are_not() -> None:
    assert marked(byte_tokenizer(templates.QWEN25), WITH_TOOL, tools=TOOLS) == (
        '<|im_start|>system\nYou are Qwen.\n\n# Tools\n\n<tools>\n{"type": "function", "function": {"name": "add", '
        '"parameters": {}}}\n</tools><|im_end|>\n<|im_start|>user\nyes<|im_end|>\n'
        f"<|im_start|>assistant\n«{CALLED}<|im_end|>»\n"
        "<|im_start|>user\n<tool_response>\nyes\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«yes<|im_end|>»\n"
    )
    assert marked(byte_tokenizer(templates.LLAMA3), WITH_TOOL) == (
        LLAMA3_SYSTEM + "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nyes<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n«{"name": "add", "parameters": {"a": 1}}<|eot_id|>»'
        "<|start_header_id|>ipython<|end_header_id|>\n\nyes<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«yes<|eot_id|>»"
    )


def test_a_tool_call_is_found_when_the_template_drops_reasoning() -> None:
    messages = [*WITH_TOOL, message("user", "yes"), message("assistant", "yes")]
    told = marked(byte_tokenizer(templates.QWEN3), messages)
    assert (
        '<|im_start|>assistant\n«\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>»' in told
    )
    assert told.count("«") == 3
    assert "«<think>\n\n</think>\n\nyes<|im_end|>»\n" in told


def test_two_turns_of_the_assistant_in_a_row_are_both_taught() -> None:
    messages = [message("user", "a"), message("assistant", "b"), message("assistant", "c")]
    assert marked(byte_tokenizer(templates.VICUNA), messages).endswith("USER: a ASSISTANT:« b</s>»ASSISTANT:« c</s>»")


def test_a_first_assistant_turn_is_taught() -> None:
    """No turn comes before it, and templates reject empty conversations."""
    messages = [message("assistant", "hello"), message("user", "yes")]
    assert marked(byte_tokenizer(templates.CHATML), messages).startswith("<|im_start|>assistant\n«hello<|im_end|>»\n")


def test_content_that_the_template_trims_is_still_found() -> None:
    messages = [message("user", "a"), message("assistant", "  é \n")]
    assert marked(byte_tokenizer(templates.GEMMA), messages).endswith("<start_of_turn>model\n«é<end_of_turn>»\n")


@pytest.mark.parametrize("template", [templates.CHATML, templates.CHATML_TAGGED, templates.CHATML_TAGGED_WITHOUT_END])
@pytest.mark.parametrize("kind", [byte_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("content", ["", " ", "yes ", "    yes", "é\n", "yes\n    "])
def test_space_at_the_borders_of_an_answer_belongs_to_it(template: str, kind: Any, content: str) -> None:
    """Byte-level tokenizers do not count spaces among a token's characters; transformers' own mask runs on there."""
    messages = [message("user", "a"), message("assistant", content), message("user", "no")]
    told = marked(kind(template), messages)
    if content == "" and template == templates.CHATML_TAGGED_WITHOUT_END:
        assert "«<|im_end|>»" in told, "by the difference: an empty mark is none"
    assert told == (
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«{content}<|im_end|>»\n<|im_start|>user\nno<|im_end|>\n"
    )


def test_only_the_last_turn_can_be_taught() -> None:
    for template in (templates.CHATML, templates.CHATML_TAGGED):
        told = marked(byte_tokenizer(template), REPEATED, teach_last=True)
        assert told == CHATML_TURNS.replace("«", "").replace("»", "", 1).replace("yes<|im_end|>»", "«yes<|im_end|>»")


def test_a_truncated_answer_gets_no_end_token() -> None:
    """`medusa distill` limits the tokens; an end of turn at the limit would teach a wrong end."""
    told = marked(byte_tokenizer(templates.CHATML), REPEATED, unfinished=True)
    assert told == CHATML_TURNS.removesuffix("<|im_end|>»\n") + "»"


class Slow:
    """A tokenizer without offsets, like tokenizers from remote code."""

    is_fast = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, return_offsets_mapping: bool = False, **kwargs: Any) -> Any:
        assert not return_offsets_mapping, "it has none"
        return self.tokenizer(text, **kwargs)


@pytest.mark.parametrize("kind", [byte_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("name", list(EXPECTED))
def test_tokenizers_without_offsets_work(name: str, kind: Any) -> None:
    template, messages, expected = EXPECTED[name]
    assert marked(Slow(kind(template)), messages) == expected


# --- refused ---------------------------------------------------------------------------------------------------------


def refused(template: str | None, messages: list[Message]) -> str:
    with pytest.raises(RequestError) as refusal:
        to_example(Record("d.jsonl:7", messages=messages), byte_tokenizer(template))
    assert str(refusal.value).startswith("d.jsonl:7: ")
    return str(refusal.value)


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (templates.GEMMA, SYSTEM, "System role not supported"),
        (templates.MISTRAL, SYSTEM, "roles must alternate"),
        (templates.MISTRAL, [REPEATED[0], REPEATED[0]], "roles must alternate"),
    ],
)
def test_roles_the_template_rejects_are_named_with_the_line(template: str, messages: list[Message], said: str) -> None:
    told = refused(template, messages)
    assert said in told
    assert f"roles are {messages[0]['role']}, {messages[1]['role']}" in told
    assert "leave out this record" in told


def test_a_conversation_needs_a_template() -> None:
    assert "chat_template.jinja" in refused(None, REPEATED)


def test_a_template_without_assistant_turns_is_rejected() -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    assert "nothing of what the assistant says" in refused(silent, REPEATED)


# A template that counts letters: it writes other answers otherwise, and earlier ones otherwise than the last.
ODD = "{% for m in messages %}{{ (m.content | length) ~ (messages | length) ~ m.content + '|' }}{% endfor %}"


def test_an_ambiguous_turn_is_rejected() -> None:
    assert "{% generation %}" in refused(ODD, REPEATED)


def test_generation_tags_in_the_template_resolve_ambiguous_turns() -> None:
    marks = (
        "{{ (m.content | length) ~ (messages | length) }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '|' }}{% endgeneration %}{% else %}{{ m.content + '|' }}{% endif %}"
    )
    template = "{% for m in messages %}" + marks + "{% endfor %}"
    assert marked(byte_tokenizer(template), REPEATED) == "34yes|34«yes|»34yes|34«yes|»"
