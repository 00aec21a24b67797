"""Taught tokens of a conversation are exactly the assistant's, with its end-of-turn token, in every template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from chat_families import CONVERSATIONS, TEMPLATES, byte_tokenizer, family_tokenizer
from medusa.errors import RequestError
from medusa.records.record import Record, parse_record
from tests.train import templates
from tests.train.templates import merging_tokenizer, older_tokenizer, sentencepiece_tokenizer
from train.data.chat import CHANGED, ELSEWHERE
from train.data.reader import to_examples

Tokenizer = Any
Message = dict[str, Any]


def message(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content} | more


def marked(tokenizer: Tokenizer, messages: list[Message], **fields: Any) -> str:
    """The conversation's only example, with taught tokens between « and »; it ends where the last answer ends."""
    record = Record("here", messages=messages, **fields)
    (example,), left_out = to_examples(record, tokenizer)
    assert not left_out
    rendered = tokenizer.apply_chat_template(messages, tools=record.tools, return_dict=True)["input_ids"]
    assert example.input_ids == rendered[: len(example.input_ids)], "what transformers makes of the conversation"
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

CHATML_TURN = "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»"
CHATML_TURNS = f"{CHATML_TURN}\n{CHATML_TURN}"


EXPECTED: dict[str, tuple[str, list[Message], str]] = {
    "chatml": (templates.CHATML, REPEATED, CHATML_TURNS),
    "chatml, system": (templates.CHATML, SYSTEM, "<|im_start|>system\nBe kind.<|im_end|>\n" + CHATML_TURNS),
    "mistral": (templates.MISTRAL, REPEATED, "<s>" + "[INST] yes [/INST]« yes</s>»" * 2),
    "zephyr": (templates.ZEPHYR, REPEATED, "<|user|>\nyes</s>\n<|assistant|>\n«yes</s>»\n" * 2),
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
        "<|user|>\nyes<|end|>\n<|assistant|>\n«yes<|end|>»\n" * 2,
    ),
    "no end of turn, and a special token begins the next one": (
        templates.CHATML.replace("<|im_end|>\n", ""),
        REPEATED,
        "<|im_start|>user\nyes<|im_start|>assistant\n«yes»" * 2,
    ),
    "no generation prompt": (templates.CHATML_WITHOUT_PROMPT, REPEATED, CHATML_TURNS),
    "generation tags": (templates.CHATML_TAGGED, REPEATED, CHATML_TURNS),
}


@pytest.mark.parametrize("kind", [byte_tokenizer, merging_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("name", list(EXPECTED))
def test_only_the_assistants_turns_are_taught(name: str, kind: Callable[[str], Tokenizer]) -> None:
    template, messages, expected = EXPECTED[name]
    if kind is not byte_tokenizer:  # these add BOS to other texts; a template writes its own
        assert spelled(kind(), kind()("yes")["input_ids"][:1]) == "<s>"
    told = marked(kind(template), messages).removeprefix(" ")  # sentencepiece's first word has one
    assert told == expected.removesuffix("\n")  # what the template writes after the last answer is left out


def test_two_turns_of_the_assistant_in_a_row_are_both_taught() -> None:
    messages = [message("user", "a"), message("assistant", "b"), message("assistant", "c")]
    assert marked(byte_tokenizer(templates.VICUNA), messages).endswith("USER: a ASSISTANT:« b</s>»ASSISTANT:« c</s>»")


def left_out(template: str, messages: list[Message], **fields: Any) -> list[tuple[str, str]]:
    """Reasons and explanations of the answers that are left out."""
    found = to_examples(Record("d.jsonl:7", messages=messages, **fields), byte_tokenizer(template))[1]
    return [(error.reason, str(error)) for error in found]


def test_a_greeting_is_left_out_and_later_answers_are_taught() -> None:
    """It is not known what the assistant was shown before its first message."""
    messages = [message("assistant", "hello"), *REPEATED]
    examples, errors = to_examples(Record("here", messages=messages), byte_tokenizer(templates.CHATML))
    assert [error.reason for error in errors] == [ELSEWHERE]
    assert [sum(example.loss_mask) for example in examples] == [2 * len("yes_")]


def test_spaces_that_the_template_trims_are_taught() -> None:
    """The model wrote them, after the tokens of the generation prompt and before the end of its turn."""
    messages = [message("user", "a"), message("assistant", "  é \n")]
    (example,), _ = to_examples(Record("here", messages=messages), byte_tokenizer(templates.GEMMA))
    told = show(byte_tokenizer(templates.GEMMA), example.input_ids, example.loss_mask)
    assert told.endswith("<start_of_turn>model\n«  é \n<end_of_turn>»")


@pytest.mark.parametrize("prompt", ["hello", "hello ", "hello\n"])
@pytest.mark.parametrize("answer", ["yes", " yes", "\nyes"])
@pytest.mark.parametrize("kind", [byte_tokenizer, merging_tokenizer, sentencepiece_tokenizer, older_tokenizer])
def test_no_space_comes_between_a_plain_prompt_and_its_answer(kind: Any, answer: str, prompt: str) -> None:
    """Tokenizers like Llama 2's write one before a text that is tokenised alone, and older ones also after BOS."""
    tokenizer = kind(None)
    record = Record("here", text=prompt, is_prompt=True, answer=answer)
    (example,), _ = to_examples(record, tokenizer, raw=True)
    assert tokenizer.decode(example.input_ids, skip_special_tokens=True) == prompt + answer
    shown = example.loss_mask.index(True)
    assert tokenizer.decode(example.input_ids[:shown], skip_special_tokens=True) == prompt


@pytest.mark.parametrize("kind", [byte_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("content", ["", " ", "yes ", "    yes", "é\n", "yes\n    "])
def test_space_at_the_borders_of_an_answer_belongs_to_it(kind: Any, content: str) -> None:
    messages = [message("user", "a"), message("assistant", content), message("user", "no")]
    told = marked(kind(templates.CHATML), messages)
    assert told == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«{content}<|im_end|>»"


def test_the_tokens_of_an_answer_continue_those_of_its_prompt() -> None:
    """Tokenised together, the newline before an answer and the first one of the answer would be one token."""
    messages = [message("user", "yes"), message("assistant", "\nyes")]
    tokenizer = byte_tokenizer(templates.CHATML)
    tokenizer.add_tokens(["\n\n"])
    (example,), _ = to_examples(Record("here", messages=messages), tokenizer)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert whole[: len(prompt)] != prompt, "the test shows nothing otherwise"
    assert example.input_ids[: len(prompt)] == prompt
    assert example.loss_mask == [at >= len(prompt) for at in range(len(example.input_ids))]


def test_only_the_last_turn_can_be_taught() -> None:
    told = marked(byte_tokenizer(templates.CHATML), REPEATED, first_taught=3)
    assert told == CHATML_TURNS.replace("«", "").replace("»", "", 1).replace("yes<|im_end|>»", "«yes<|im_end|>»")


def test_an_answer_of_weight_zero_is_shown_and_not_taught() -> None:
    unweighed = [REPEATED[0], {**REPEATED[1], "weight": 0}, *REPEATED[2:]]
    told = marked(byte_tokenizer(templates.CHATML), unweighed)
    assert told == marked(byte_tokenizer(templates.CHATML), REPEATED, first_taught=3)


def test_a_truncated_answer_gets_no_end_token() -> None:
    """`medusa distill` limits the tokens; an end of turn at the limit would teach a wrong end."""
    told = marked(byte_tokenizer(templates.CHATML), REPEATED, unfinished=True)
    assert told == CHATML_TURNS.removesuffix("<|im_end|>»") + "»"


@pytest.mark.parametrize("reason", ["length", "stop string", "abort", "content_filter", "unheard-of"])
def test_no_end_token_is_taught_unless_the_model_ended_the_answer(reason: str) -> None:
    row: dict[str, Any] = {"messages": REPEATED, "finish_reason": reason}
    if reason == "stop string":  # which vLLM tells beside the reason `stop`
        row |= {"finish_reason": "stop", "stop_reason": "###"}
    tokenizer = byte_tokenizer(templates.CHATML)
    (cut,), _ = to_examples(parse_record(row, "here"), tokenizer)
    (whole,), _ = to_examples(parse_record(row | {"finish_reason": "stop", "stop_reason": None}, "here"), tokenizer)
    assert cut.input_ids == whole.input_ids[:-1]


def test_a_thought_that_was_cut_off_is_taught_without_its_end() -> None:
    messages = [message("user", "a"), message("assistant", None, reasoning_content="Well, ")]
    (example,), _ = to_examples(Record("here", messages=messages, unfinished=True), byte_tokenizer(TEMPLATES["Qwen3"]))
    told = show(byte_tokenizer(), example.input_ids, example.loss_mask)
    assert told.endswith("<|im_start|>assistant\n«<think>\nWell,»")


@pytest.mark.parametrize("family", ["Qwen3", "SmolLM3"])
def test_a_thought_that_was_cut_off_within_the_content_follows_the_prompt(family: str) -> None:
    """The template writes an empty thought before it, which the model was not shown."""
    tokenizer, asked = family_tokenizer(family), [message("user", "a")]
    row = {"messages": [*asked, message("assistant", "<think>\nWell")], "finish_reason": "length"}
    (example,), left_out = to_examples(parse_record(row, "here"), tokenizer)
    shown = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert not left_out
    assert show(tokenizer, example.input_ids, example.loss_mask) == f"{shown}«<think>\nWell»"


class Slow:
    """A tokenizer that is not fast, like tokenizers from remote code."""

    is_fast = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, return_offsets_mapping: bool = False, **kwargs: Any) -> Any:
        assert not return_offsets_mapping, "it has none"
        return self.tokenizer(text, **kwargs)


def test_tokenizers_without_offsets_work() -> None:
    assert marked(Slow(merging_tokenizer(templates.CHATML)), REPEATED) == CHATML_TURNS


class Counting(Slow):
    """A tokenizer that counts the characters that it reads."""

    is_fast, read = True, 0

    def __call__(self, text: str, **kwargs: Any) -> Any:
        self.read += len(text)
        return self.tokenizer(text, **kwargs)


def test_the_time_for_a_conversation_grows_with_its_length_and_not_with_its_square() -> None:
    tokenizer = Counting(merging_tokenizer(templates.CHATML))
    marked(tokenizer, REPEATED[:2] * 20)
    text = tokenizer.apply_chat_template(REPEATED[:2] * 20, tokenize=False)
    assert tokenizer.read < 6 * len(text), "whole texts would be 20 times the text"


# --- families of models ----------------------------------------------------------------------------------------------

EXPECTATIONS = yaml.safe_load((Path(__file__).parent / "families.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_what_heads_learn_from_conversations_of_a_family(family: str) -> None:
    """Text that is taught, text before it, and history, of six conversations."""
    tokenizer, expected = family_tokenizer(family), EXPECTATIONS[family]
    reasons = {CHANGED: "changed", ELSEWHERE: "elsewhere"}
    for name, row in CONVERSATIONS.items():
        if expected[name] == "refused":
            with pytest.raises(RequestError, match="the chat template refuses the messages"):
                to_examples(parse_record(row, "here"), tokenizer)
            continue
        examples, errors = to_examples(parse_record(row, "here"), tokenizer)
        told = [show(tokenizer, example.input_ids, example.loss_mask) for example in examples]
        assert told == expected[name], name
        assert sorted({reasons[error.reason] for error in errors}) == expected.get(f"{name}, left out", []), name


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_an_answer_of_several_calls_is_taught_whole_or_left_out(family: str) -> None:
    """gpt-oss writes the first call only, and the calls may differ in a number."""
    taught = {"Qwen2.5", "Qwen3", "Qwen3.5", "Mistral v0.3", "Mistral Small 3", "DeepSeek V3.1", "Granite 3.3"}
    taught |= {"GLM-4.5", "Kimi K2"}
    arguments: tuple[Any, Any] = ({"a": 17, "b": True}, {"a": 18, "b": False})
    calls = [{"type": "function", "function": {"name": "add", "arguments": given}} for given in arguments]
    row = {"messages": [message("user", "hi"), message("assistant", "", tool_calls=calls)]}
    try:
        examples, _ = to_examples(parse_record(row, "here"), tokenizer := family_tokenizer(family))
    except RequestError:
        examples = []
    assert bool(examples) == (family in taught)
    for example in examples:
        told = show(tokenizer, example.input_ids, example.loss_mask)
        assert -1 < told.find("17") < told.find("18"), told
        assert told.count("add") == 2
        assert ("true" in told) or ("True" in told)


# --- refused ---------------------------------------------------------------------------------------------------------


def refused(template: str | None, messages: list[Message]) -> str:
    with pytest.raises(RequestError) as refusal:
        to_examples(Record("d.jsonl:7", messages=messages), byte_tokenizer(template))
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


def test_answers_that_the_template_drops_or_changes_are_left_out() -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    loud = templates.CHATML.replace("m.content", "m.content | upper")
    first, second = left_out(silent, REPEATED), left_out(loud, REPEATED)
    assert [reason for reason, _ in first + second] == [CHANGED] * 4
    assert "the message has 'yes', and the template writes 'YES'" in second[0][1]


def test_answers_that_do_not_continue_the_generation_prompt_are_left_out() -> None:
    ((reason, told),) = left_out(TEMPLATES["DeepSeek R1"], REPEATED[:2])
    assert reason == ELSEWHERE
    assert "<think>\\n', and the text of the answer with" in told
