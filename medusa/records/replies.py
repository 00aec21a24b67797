"""What a model wrote, as a message: its text, its thought and its calls of tools.

transformers parses the text by a response template. Tokenizers may bring one; for others, the marks in the chat
template tell which of the known formats the model writes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from medusa.errors import RequestError
from medusa.files import Json
from medusa.records.messages import messages_of
from medusa.records.template import source_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHT_KEY, CALLS = "reasoning_content", "tool_calls"
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


class ReplyReader:
    """Turns the text of one answer, with its special tokens, into deltas of the OpenAI API.

    A call is given as a whole when it is complete. Text that breaks the format is content."""

    def __init__(
        self, form: Json, prompt: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Json] | None = None
    ) -> None:
        """Read an answer to the text `prompt` in the format `form`, a response template of transformers.

        With `tools`, arguments get the types of the tools' schemas."""
        self.parser = tokenizer.get_response_parser(form, prefix=prompt, tools=list(tools) if tools else None)
        self.start = len(self.parser._buffer)  # of the prompt; no public attribute tells how far a text is read
        calls = form["fields"].get(CALLS, {})
        self.shows_its_end = calls.get("content") == "json" or not {"close", "close_pattern"} & calls.keys()
        """Whether a call that the end of the text closes, and not its mark, is known to be whole."""
        self.calls = 0
        self.text = ""  # as far as it is fed
        self.given = 0  # the end of what deltas gave; what follows may be the beginning of a call
        self.in_call = False
        self.broken = False  # whether the text has left its format
        self.spoken = False  # whether there was content yet, before which spaces are left out

    def feed(self, text: str) -> Iterator[Json]:
        """Yield the deltas that new text gives, with neighbouring texts of one kind as one delta."""
        last: Json = {}
        for delta in self._letters(text):
            (key,) = delta
            if key != CALLS and key in last:
                last = {key: last[key] + delta[key]}
                continue
            if last:
                yield last
            last = delta
        if last:
            yield last

    def _letters(self, text: str) -> Iterator[Json]:
        for letter in text:  # one by one, so that a call that is broken off can be given as content
            if self.broken:
                yield from self._content(letter)
                continue
            self.text += letter
            try:
                events = self.parser.feed(letter)
            except (ValueError, RecursionError):  # of JSON, possibly nested too deeply
                yield from self._break_off()
                continue
            yield from self._deltas(events)

    def end(self) -> Iterator[Json]:
        """Yield the deltas that the end of the text gives."""
        if self.broken:
            return
        read = self._read
        try:
            _, events = self.parser.finalize()
        except (ValueError, RecursionError):
            yield from self._break_off()
            return
        opens = any(event["type"] == "region_open" and event["field"] == CALLS for event in events)
        read += sum(len(event["text"]) for event in events if event["type"] == "region_chunk")
        cut = not self.shows_its_end and (opens or (self.in_call and read >= len(self.text)))
        yield from self._break_off() if cut else self._deltas(events)
        if self.text[max(self.given, 0) :].strip() and not self.calls and not self.broken:  # of no part of the format
            yield from self._content(self.text[max(self.given, 0) :])

    @property
    def _read(self) -> int:
        """The number of letters that the parser has read; negative while it keeps some of the prompt's."""
        return self.parser._pos - self.start

    def _deltas(self, events: Sequence[Json]) -> Iterator[Json]:
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_chunk" and field != CALLS:
                self.given += len(event["text"])
                yield from self._content(event["text"]) if field == "content" else [{THOUGHT_KEY: event["text"]}]
            elif kind == "region_open" and field == CALLS:
                self.in_call = True
            elif kind == "region_close" and field == CALLS:
                self.in_call = False
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                try:
                    calls = [_call(value) for value in values]
                except RequestError:
                    yield from self._break_off()
                    return
                for call in calls:
                    yield {CALLS: [{"index": self.calls} | call]}
                    self.calls += 1
        if events and not self.in_call:  # without events, the text belongs to no part of the format
            self.given = self._read

    def _content(self, text: str) -> Iterator[Json]:
        text = text if self.spoken else text.lstrip()
        if text:
            self.spoken = True
            yield {"content": text}

    def _break_off(self) -> Iterator[Json]:
        self.broken = True
        yield from self._content(self.text[max(self.given, 0) :])


def message_of(deltas: Sequence[Json]) -> Json:
    """Join the deltas of an answer to its message."""
    content, thought = ("".join(delta.get(key, "") for delta in deltas) for key in ("content", THOUGHT_KEY))
    calls = [{key: call[key] for key in call if key != "index"} for delta in deltas for call in delta.get(CALLS, ())]
    message: Json = {"role": "assistant", "content": content or (None if calls else "")}
    message |= {THOUGHT_KEY: thought} if thought else {}
    return message | ({CALLS: calls} if calls else {})


def _call(found: Json) -> Json:
    """Return a call that transformers has parsed in the form of the OpenAI API; raise RequestError if it is none."""
    function = dict(found["function"]) if isinstance(found.get("function"), dict) else {}
    arguments = function.get("arguments", function.get("parameters"))  # the second is Llama's name
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise RequestError("the reply calls no function with arguments")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError) as error:  # NaN, half of a character, or nested too deeply
        raise RequestError(f"the arguments of the reply's call are no JSON ({error})") from None
    # The id has nine letters and digits, as Mistral's template asks for.
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": {"name": function["name"], "arguments": text}}


def reply(text: str, prompt: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Json] | None = None) -> Json:
    """Return what a model wrote after a prompt as a message of the OpenAI API.

    Both texts hold their special tokens. A text of no known format is the message's content."""
    if (form := response_template(tokenizer)) is None:
        return {"role": "assistant", "content": text}
    reader = ReplyReader(form, prompt, tokenizer, tools)
    return message_of([*reader.feed(text), *reader.end()])


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
        return messages_of([reply(text, str(tokenizer.decode(list(prompt))), tokenizer)], "the answer")[0]
    return {"role": "assistant", "content": text}
