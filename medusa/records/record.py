"""One record of a file of prompts or training text, and the JSON forms that it can have.

A JSON object holds one of `{"prompt"}`, `{"question"}`, `{"text"}`, `{"input_ids"}`,
`{"messages": [{"role", "content"}]}`, ShareGPT's `{"conversations": [{"from", "value"}]}` and MT-bench's
`{"turns": [...]}`, of which the first turn is used. A `category` and the `tools` of a conversation are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from medusa.errors import RequestError
from medusa.files import Json

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass
class Record:
    """One record: exactly one of `text`, `input_ids` and `messages` is set."""

    where: str
    """File and line, for messages to the user."""
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[Json] | None = None
    is_prompt: bool = False
    """Whether the text is a prompt or question to be continued, and not a whole document."""
    prompt_tokens: int = 0
    """Number of `input_ids` that the backbone did not write; heads are not taught them."""
    category: str | None = None
    tools: list[Any] | None = None
    """JSON schemas of the tools in a conversation; chat templates write them out."""
    turns: list[str] = field(default_factory=list)
    """All questions of an MT-bench record; `messages` holds the first."""
    teach_last: bool = False
    """Teach only the last answer of a conversation: the earlier ones are in records of their own."""
    unfinished: bool = False
    """The last answer was cut off: its text does not end there."""


def parse_record(row: object, where: str) -> Record:
    """The record in a JSON object.

    Raises:
        RequestError: none of the known forms, or a value of the wrong type; the message begins with `where`.
    """
    if not isinstance(row, dict):
        raise RequestError(f"{where}: a record is a JSON object, not {type(row).__name__}")
    category = row.get("category")
    record = Record(where, category=None if category is None else str(category), tools=_tools(row.get("tools"), where))
    record.teach_last, record.unfinished = row.get("teach") == "last", row.get("finish_reason") == "length"
    take = next((take for key, take in FORMS.items() if row.get(key) is not None), None)
    if take is None and row.get("turns"):
        take = _take_turns
    if take is not None:
        take(record, row)
        return record
    key = next((key for key in ("prompt", "question", "text") if isinstance(row.get(key), str)), None)
    if key is None:
        raise RequestError(
            f"{where}: none of prompt, text, input_ids, messages, conversations, turns, question in "
            f"{{{', '.join(map(str, row))}}}"
        )
    record.text, record.is_prompt = row[key], key != "text"
    return record


def parse_json(text: str, where: str) -> object:
    """Parse JSON; the message of the error begins with `where`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None


def _take_messages(record: Record, row: Json) -> None:
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise RequestError(f'{record.where}: messages must be a list of {{"role", "content"}}')
    record.messages = [_with_parsed_arguments(message, record.where) for message in messages]


def _take_conversations(record: Record, row: Json) -> None:
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise RequestError(f'{record.where}: conversations must be a list of {{"from", "value"}}')
    for turn in turns:
        if not isinstance(turn, dict) or turn.get("from") not in SHAREGPT_ROLES or "value" not in turn:
            known = ", ".join(SHAREGPT_ROLES)
            raise RequestError(f"{record.where}: a conversation's turn needs a value and from: {known}")
    record.messages = [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in turns]


def _take_ids(record: Record, row: Json) -> None:
    ids, given = row["input_ids"], row.get("prompt_tokens", 0)
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise RequestError(f"{record.where}: input_ids must be a list of whole numbers of at least 0")
    if not isinstance(given, int) or not 0 <= given <= len(ids):
        raise RequestError(f"{record.where}: prompt_tokens is {given!r}; it must be a count of at most all input_ids")
    record.input_ids, record.prompt_tokens = ids, given


def _take_turns(record: Record, row: Json) -> None:
    if not isinstance(row["turns"], list):
        raise RequestError(f"{record.where}: turns must be a list of texts")
    record.turns = [str(turn) for turn in row["turns"]]
    record.messages = [{"role": "user", "content": record.turns[0]}]
    record.is_prompt = True


FORMS: dict[str, Callable[[Record, Json], None]] = {
    "messages": _take_messages,
    "conversations": _take_conversations,
    "input_ids": _take_ids,
}
"""The keys that decide the form of a record, in this order; after them come `turns` and the keys of plain text."""


def _with_parsed_arguments(message: Json, where: str) -> Json:
    """A message whose tool calls have their arguments as objects: OpenAI keeps them as JSON text, templates do not."""
    if not message.get("tool_calls"):
        return message
    try:
        calls = [dict(call) for call in message["tool_calls"]]
        for call in calls:
            function = call["function"] = dict(call.get("function") or {})
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
    except (TypeError, ValueError):
        raise RequestError(f'{where}: tool_calls must be a list of {{"function": {{"name", "arguments"}}}}') from None
    return message | {"tool_calls": calls}


def _tools(tools: object, where: str) -> list[Any] | None:
    """A list of tools, which some data sets keep as JSON text."""
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, f"{where}: tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(f"{where}: tools must be a list of JSON schemas")
    return tools
