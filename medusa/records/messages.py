"""Messages of conversations in one form: that of the OpenAI API, as chat templates of transformers read it.

Records, requests of the server, distillation and the chat all read messages here. Nothing that a message says is
dropped: it is passed to the chat template, or the message is refused by the name of the key."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import cycle
from typing import Any

from medusa.errors import RequestError
from medusa.files import Json

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
ROLES |= {"function": "tool", "function_response": "tool", "function_call": "assistant", "bot": "assistant"}
"""The roles of ShareGPT, Gemma and the older OpenAI API, with their names in chat templates. Other roles are kept."""
SHAREGPT = (*ROLES, "user", "assistant", "system", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names of an answer's reasoning in servers and data; the first is the one that most chat templates read."""
KEYS = {
    "`role`, or `from` (ShareGPT)": "the author, such as `user`, `assistant`, `system` or `tool`; `developer` is "
    "`system` unless the template reads `developer`",
    "`content`, or `value` (ShareGPT)": "a text, or a list of parts of type `text`; null is empty",
    "`reasoning_content`, `reasoning` or `thinking`": "the thought before an answer; the template gets it as "
    "`reasoning_content`, and as `thinking` if it reads that",
    "`tool_calls`": "calls of tools; their `arguments` may be an object or JSON text",
    "`function_call`": "becomes `tool_calls`",
    "`name`, `tool_call_id`": "passed to the template",
    "`weight`": "0 in an answer that is shown, but not taught",
    "`refusal`": "refused unless empty, because no template reads it",
    "`images`, `image`, `audio`, `videos`, `video`, and parts of other types than `text`": "refused unless empty",
}
"""How each key of a message is read. `docs/data.md` shows this table."""
WEIGHT = "weight"
"""The key of OpenAI's fine-tuning that is 0 in an answer that is not taught."""
MEDIA = ("images", "image", "audio", "videos", "video")
"""Keys of a message that hold something else than text."""
UNSAID = {"role", "name", "tool_call_id", "id", WEIGHT}
SAID = {*REASONING, *MEDIA, "tool_calls", "function_call", "refusal"}
"""Keys of a message without a text (`UNSAID`), and keys with which an answer needs no content (`SAID`)."""
REAL_NULLS = ("default", "const")
"""Keys of a JSON schema that may be null by intent."""


def messages_of(found: object, where: str) -> list[Json]:
    """Return a conversation as messages with `role` and `content`; raise RequestError, beginning with `where`.

    `found` is a list of messages with `role` and `content` or with `from` and `value`, a list of texts (question and
    answer in turn), or either as JSON text. Keys that are null are as if absent. Arguments of tool calls become
    objects, reasoning gets one name, `function_call` becomes `tool_calls`."""
    if isinstance(found, str):
        found = parse_json(found, where)
    if not isinstance(found, list) or not found:
        raise RequestError(f'{where} must be a list of {{"role", "content"}}, and not empty')
    if all(isinstance(turn, str) for turn in found):
        roles = cycle(("user", "assistant"))
        return [{"role": role, "content": turn} for role, turn in zip(roles, found, strict=False)]
    return [_message(message, where, number) for number, message in enumerate(found, 1)]


def _message(given: object, where: str, number: int) -> Json:
    """Normalise the message with this number, from 1."""
    where = f"{where}: message {number}"
    message = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    if "role" not in message and "from" in message:
        if str(message["from"]).lower() not in SHAREGPT:
            raise RequestError(f"{where} is from {message['from']!r}; it must be one of {', '.join(SHAREGPT)}")
        message = {"role": message.pop("from")} | message
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if isinstance(role, str) and role.lower() in SHAREGPT:  # some data has `USER` or `Assistant`
        role = role.lower()
    if not isinstance(role, str):
        raise RequestError(
            f'{where} must be an object with role and content, such as {{"role": "user", "content": ""}}'
        )
    asks, others = ROLES.get(role, role) in ("user", "system", "developer"), set(message) - UNSAID
    if isinstance(given, dict) and not {"content", "value"} & set(given) and (asks or others - SAID):
        advice = f"; rename {min(others - SAID, key=str)} to content" if others - SAID else ""
        raise RequestError(f"{where}: a message of the {role} needs content or value{advice}")
    if message.get("function_call") and message.get("tool_calls"):
        raise RequestError(f"{where} has function_call and tool_calls; leave out function_call")
    call = message.pop("function_call", None) or (message.pop("content", None) if role == "function_call" else None)
    if call:
        message["tool_calls"] = [{"type": "function", "function": _parsed(call, where, "function_call")}]
    require_text(message, where)
    message = {key: value for key, value in message.items() if key not in MEDIA}
    if message.get("refusal"):
        raise RequestError(f"{where} has a refusal, which no chat template reads; write it as content")
    message.pop("refusal", None)
    reasoning = [message.pop(key) for key in REASONING if key in message]
    if thought := next(filter(None, reasoning), None):
        message[REASONING[0]] = thought
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _tool_calls(calls, where)
    return message | {"role": ROLES.get(role, role), "content": _content(message.get("content"), where)}


def require_text(found: Json, where: str) -> None:
    """Raise RequestError, beginning with `where`, if a message or record holds something else than text."""
    if (key := next((key for key in MEDIA if found.get(key)), None)) is not None:
        raise RequestError(f"{where} has {key}, and only text can be read; leave out {key}")


def _content(content: object, where: str) -> str | list[Json]:
    """Return a message's content: a text, or text parts. Without content, as in a message with tool calls: empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise RequestError(f"{where}: content is {json.dumps(content, default=str)[:80]}; it must be a text or parts")
    parts = []
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            way_out = "leave the part out"
            raise RequestError(f"{where}: content has a part of type {kind!r}, and only text can be read; {way_out}")
        parts.append({"type": "text", "text": text})
    return parts


def _tool_calls(calls: object, where: str) -> list[Json]:
    """Return tool calls with their arguments as objects, as chat templates need them."""
    if isinstance(calls, str):
        calls = parse_json(calls, f"{where}: tool_calls")
    form = '{"function": {"name", "arguments"}}'
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(f"{where}: tool_calls must be a list of {form}")
    found = []
    for given in calls:
        call = {key: value for key, value in given.items() if value is not None}
        function = call.pop("function", None) or {key: call.pop(key) for key in ("name", "arguments") if key in call}
        function = _parsed(function, where, "tool_calls")
        if not isinstance(function.get("name"), str):
            raise RequestError(f"{where}: tool_calls must be a list of {form}")
        found.append({"type": "function"} | call | {"function": function})
    return found


def _parsed(function: object, where: str, key: str) -> Json:
    """Return a called function with its name and its arguments as an object; both may be given as JSON text."""
    if isinstance(function, str):
        function = parse_json(function, f"{where}: {key}")
    if not isinstance(function, dict):
        raise RequestError(f'{where}: {key} must hold {{"name", "arguments"}}')
    function = {name: value for name, value in function.items() if value is not None}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where}: arguments") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}: the arguments of a tool call must be an object, not {type(arguments).__name__}")
    return function | {"arguments": arguments}


def tools_of(tools: object, where: str) -> list[Json] | None:
    """Return a conversation's tools, a list of JSON schemas that may be given as JSON text; `None` without tools."""
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, f"{where}: tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(f"{where}: tools must be a list of JSON schemas")
    return [without_nulls(tool, kept=REAL_NULLS) for tool in tools]


def without_nulls(value: Any, kept: Collection[str] = ()) -> Any:
    """Remove keys whose value is null from nested objects, except the keys `kept`.

    Arrow gives all rows of a column the same keys, and fills those that a row does not have with nulls."""
    if isinstance(value, dict):
        pairs = ((key, item) for key, item in value.items() if item is not None or key in kept)
        return {key: without_nulls(item, kept) for key, item in pairs}
    return [without_nulls(item, kept) for item in value] if isinstance(value, list) else value


def parse_json(text: str, where: str) -> object:
    """Parse JSON text; raise RequestError that begins with `where` (file and line) if the text is not JSON.

    Raise it, too, for half of a character, which no tokenizer takes: a surrogate without the other one of its pair."""
    try:
        found: object = json.loads(text)
        require_characters(text, found, where)
        return found
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number that is too long, or nested too deeply
        raise RequestError(f"{where}: not JSON ({error})") from None


def require_characters(text: str, found: object, where: str) -> None:
    """Raise RequestError if the content `found` of JSON `text` holds half of a character (a lone surrogate)."""
    if "\\ud" in text.lower():  # only an escape can make one
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise RequestError(f"{where}: {half} is half of a character; repair the text, or leave it out") from None


def in_api(messages: Sequence[Json]) -> list[Json]:
    """Return messages in the form of the OpenAI API: arguments as JSON text, and reasoning by the names of servers."""
    found = []
    for message in messages:
        message = dict(message)
        if thought := message.get(REASONING[0]):
            message["reasoning"] = thought  # the name that vLLM reads
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": arguments_text(call)}} for call in calls
            ]
        found.append(message)
    return found


def arguments_text(call: Json) -> str:
    """Return the arguments of a tool call as JSON text."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def text_of(message: Json) -> str:
    """Return the text of a message, with its text parts on lines of their own."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
