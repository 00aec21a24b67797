"""What a model wrote, as a message: its text, its thought and its calls of tools.

transformers parses the text by a response template. Tokenizers may bring one; for others, the marks in the chat
template tell which of the known formats the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from medusa.errors import RequestError
from medusa.files import Json
from medusa.records.messages import in_api, messages_of
from medusa.records.template import source_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMED: Json = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE: Json = {"type": "function", "function": "{content}"}
THOUGHT: Json = {"open": "<think>", "close": "</think>", "content": "text"}


def _format(anchor: str, **fields: Json) -> Json:
    return {"version": 1, "defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


CHANNELS = _format(
    "<|start|>assistant",
    reasoning_content={"open": "<|channel|>analysis<|message|>", "close": ["<|end|>", "<|call|>"]},
    tool_calls={
        "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.(?P<name>[\w.-]+)"
        r"(?:<\|channel\|>commentary)?(?: ?(?:<\|constrain\|>)?json)?<\|message\|>",
        "close": "<|call|>",
        "content": "json",
        "repeats": True,
        "transform": NAMED,
    },
    content={"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
)
FORMATS: dict[str, tuple[tuple[str, ...], Json]] = {
    "channels (gpt-oss)": (("<|channel|>", "<|message|>", "<|call|>"), CHANNELS),
    "XML parameters (Qwen3-Coder, Qwen3.5)": (
        ("<tool_call>", "<function=", "<parameter="),
        _format(
            "<|im_start|>assistant",
            reasoning_content=THOUGHT,
            tool_calls={
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\s]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"},
                "repeats": True,
                "transform": NAMED,
            },
            content={"close_pattern": r"\s*<\|im_end\|>"},
        ),
    ),
    "Hermes and Qwen": (
        ("<tool_call>",),
        _format(
            "<|im_start|>assistant",
            reasoning_content=THOUGHT,
            tool_calls={
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "repeats": True,
                "transform": WHOLE,
            },
            content={"close_pattern": r"\s*<\|im_end\|>"},
        ),
    ),
    "Mistral, names before arguments": (
        ("[TOOL_CALLS]", "[ARGS]"),
        _format(
            "[/INST]",
            reasoning_content={"open": "[THINK]", "close": "[/THINK]", "content": "text"},
            tool_calls={
                "open_pattern": r"\s*\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
                "content": "json",
                "repeats": True,
                "transform": NAMED,
            },
            content={"close": "</s>"},
        ),
    ),
    "Mistral": (
        ("[TOOL_CALLS]",),
        _format(
            "[/INST]",
            tool_calls={
                "open_pattern": r"\s*\[TOOL_CALLS\]",
                "close": "</s>",
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
                "transform_each": True,
            },
            content={"close": "</s>"},
        ),
    ),
    "Llama 3.1": (
        ("<|python_tag|>", "<|start_header_id|>"),
        _format(
            "<|start_header_id|>assistant<|end_header_id|>",
            tool_calls={
                "open_pattern": r"^\s*(?:<\|python_tag\|>)?(?=\{)",
                "close": ["<|eom_id|>", "<|eot_id|>"],
                "content": "json",
                "repeats": True,
                "transform": WHOLE,
            },
            content={"close": ["<|eot_id|>", "<|eom_id|>"]},
        ),
    ),
}
"""Formats of calls of tools: the marks by which a chat template shows the format, and transformers' response template.

The first format whose marks a template holds is taken."""


def response_template(tokenizer: PreTrainedTokenizerBase) -> Json | None:
    """Return the response template for what a model writes: the tokenizer's own, or that of a known format."""
    if (own := getattr(tokenizer, "response_template", None)) is not None:
        return own
    source = source_of(tokenizer) if tokenizer.chat_template is not None else ""
    return next((form for marks, form in FORMATS.values() if all(mark in source for mark in marks)), None)


def reply(text: str, prompt: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Json] | None = None) -> Json:
    """Return what a model wrote after a prompt as a message: `content`, `reasoning_content` and `tool_calls`.

    Both texts hold their special tokens. With `tools`, arguments get the types of the tools' schemas. A text of no
    known format, or that breaks its format, is the message's content."""
    whole: Json = {"role": "assistant", "content": text}
    if (form := response_template(tokenizer)) is None:
        return whole
    try:
        found = tokenizer.parse_response(text, form, prefix=prompt, tools=list(tools) if tools else None)
        for call in found.get("tool_calls") or []:
            function = call["function"]
            if "parameters" in function:  # the name that Llama gives to the arguments
                function["arguments"] = function.pop("parameters")
            if not isinstance(function["arguments"], dict | str):
                return whole
        return messages_of([found], "the reply")[0]
    except (ValueError, KeyError, TypeError, AttributeError, RequestError):  # the model broke the format
        return whole


def calls_in_api(message: Json) -> list[Json]:
    """Return the calls of tools in a message in the form of the OpenAI API, with arguments as JSON text."""
    calls = in_api([message])[0].get("tool_calls", [])
    return [call | {"index": number} for number, call in enumerate(calls)]


def remembered(
    new_ids: Sequence[int],
    prompt: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    ended: bool,
    stop: Sequence[str] = (),
) -> Json:
    """Return an answer as a message of a conversation's history: with its special tokens, except the end of turn.

    `new_ids` follow the ids `prompt`; `ended`: whether they end with an end-of-turn token. A text of channels (gpt-oss)
    is parsed, because its template accepts no marks of channels in a message, and so is a text for which the tokenizer
    has a response template. The text ends before the first of the strings `stop`."""
    text = str(tokenizer.decode(list(new_ids[:-1] if ended else new_ids)))
    text = text[: min((text.index(string) for string in stop if string in text), default=len(text))]
    form = response_template(tokenizer)
    if form is not None and (form is CHANNELS or form == getattr(tokenizer, "response_template", None)):
        return reply(text, str(tokenizer.decode(list(prompt))), tokenizer)
    return {"role": "assistant", "content": text}
