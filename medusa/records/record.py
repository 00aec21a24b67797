"""Records of prompts and training text: parsing of their JSON forms, and the token ids of a record's prompt.

The JSON object of a record contains one of these keys, and optionally a `category` and the `tools` of a conversation:

    prompt, question, text    a string; `text` is a whole document
    input_ids                 a list of token ids
    messages                  [{"role", "content"}, ...]
    conversations             [{"from", "value"}, ...], as in ShareGPT
    turns                     a list of questions, as in MT-bench; the first one is the prompt

If the tokenizer has a chat template, it formats prompts, questions, turns, messages and conversations. A `text` and
`input_ids` are never formatted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from medusa.errors import RequestError
from medusa.files import Json

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import BatchEncoding, PreTrainedTokenizerBase

TEXTS = ("prompt", "question", "text")  # the keys whose value is a string
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
SHAREGPT_ROLES |= {"system": "system", "tool": "tool", "observation": "tool"}  # and their roles in chat templates


@dataclass
class Record:
    """A prompt, a document or a conversation: exactly one of `text`, `input_ids` and `messages` is not `None`."""

    where: str  # the file and line of the record, for error messages
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[Json] | None = None
    is_prompt: bool = False  # a prompt or question to continue, rather than a whole document
    prompt_tokens: int = 0  # how many `input_ids` at the start are the prompt, which does not count in the loss
    category: str | None = None  # such as `math`, for results by category
    tools: list[Json] | None = None  # JSON schemas for the chat template
    turns: list[str] = field(default_factory=list)  # all questions of an MT-bench record; `messages` has the first one
    teach_last: bool = False  # only the last answer counts in the loss: other records contain the earlier ones
    unfinished: bool = False  # the last answer was cut off, so that no end token follows it
    raw_prompt: bool | None = None  # of a distilled answer: whether its prompt was plain text; `None`: not recorded

    @property
    def is_document(self) -> bool:
        """Whether the record is a whole document: text or token ids of which no part is marked as the prompt."""
        return self.messages is None and not self.is_prompt and not self.prompt_tokens

    @property
    def question(self) -> str:
        """The text of a prompt; of several turns, the first one."""
        return str(self.messages[0]["content"]) if self.messages else self.text or ""

    def as_text(self) -> Record:
        """Return a prompt as the beginning of a text, which no chat template formats; other records unchanged."""
        if not self.is_prompt:
            return self
        return replace(self, text=self.question, messages=None, turns=[], is_prompt=False)

    def opening(self) -> Record:
        """Return a conversation up to its first user message, and any other record unchanged."""
        roles = [message["role"] for message in self.messages or ()]
        if self.is_prompt or "user" not in roles:
            return self
        return replace(self, messages=(self.messages or [])[: roles.index("user") + 1])


@contextmanager
def naming(where: str, advice: str = "") -> Iterator[None]:
    """Name the record at `where` in each RequestError inside the context, and add `advice`."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{where}: {error}{advice}") from None


def parse_record(row: object, where: str) -> Record:
    """Make a record from a JSON object; RequestError, beginning with `where`, if it has none of the known forms."""
    if not isinstance(row, dict):
        example = '{"prompt": "Why is the sky blue?"}'
        raise RequestError(f"{where}: a record is a JSON object, not {type(row).__name__}; write it as {example}")
    category, raw = row.get("category"), row.get("raw_prompt")
    record = Record(where, category=None if category is None else str(category), tools=_tools(row.get("tools"), where))
    record.raw_prompt = raw if isinstance(raw, bool) else None
    record.teach_last, record.unfinished = row.get("teach") == "last", row.get("finish_reason") == "length"
    if row.get("messages") is not None:
        messages = row["messages"]
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and "role" in m for m in messages)
        ):
            raise RequestError(f'{where}: messages must be a list of {{"role", "content"}}')
        record.messages = [_with_parsed_arguments(message, where) for message in messages]
    elif row.get("conversations") is not None:
        record.messages = _sharegpt_messages(row["conversations"], where)
    elif row.get("input_ids") is not None:
        ids, prompt = row["input_ids"], row.get("prompt_tokens")
        prompt = 0 if prompt is None else prompt
        if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise RequestError(f"{where}: input_ids must be a list of whole numbers of at least 0")
        if isinstance(prompt, bool) or not isinstance(prompt, int) or not 0 <= prompt <= len(ids):
            raise RequestError(f"{where}: prompt_tokens is {prompt!r}; it must be a count of at most all input_ids")
        record.input_ids, record.prompt_tokens = ids, prompt
    elif row.get("turns") is not None:
        if not isinstance(row["turns"], list) or not row["turns"]:
            raise RequestError(f"{where}: turns must be a list of texts, and not empty")
        record.turns = [str(turn) for turn in row["turns"]]
        record.messages, record.is_prompt = [{"role": "user", "content": record.turns[0]}], True
    else:
        key = next((key for key in TEXTS if isinstance(row.get(key), str)), None)
        if key is None:
            raise _without_text(row, where)
        record.text, record.is_prompt = row[key], key != "text"
    return record


def _without_text(row: Json, where: str) -> RequestError:
    """Make the error for a record without any of the known keys, or with a value that is no text."""
    if (wrong := next((key for key in TEXTS if key in row), None)) is not None:
        return RequestError(f"{where}: {wrong} is {json.dumps(row[wrong], default=str)[:80]}; it must be a text")
    known = "prompt, text, input_ids, messages, conversations, turns, question"
    advice = "rename the key of the question or instruction to prompt"
    return RequestError(f"{where}: none of {known} in {{{', '.join(map(str, row))}}}; {advice}")


def parse_json(text: str, where: str) -> object:
    """Parse JSON text; raise RequestError that begins with `where` (file and line) if the text is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number that is too long, or nested too deeply
        raise RequestError(f"{where}: not JSON ({error})") from None


def _sharegpt_messages(turns: object, where: str) -> list[Json]:
    if not isinstance(turns, list):
        raise RequestError(f'{where}: conversations must be a list of {{"from", "value"}}')
    for turn in turns:
        if not isinstance(turn, dict) or str(turn.get("from")) not in SHAREGPT_ROLES or "value" not in turn:
            raise RequestError(f"{where}: a conversation's turn needs a value and from: {', '.join(SHAREGPT_ROLES)}")
    return [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in turns]


def _with_parsed_arguments(message: Json, where: str) -> Json:
    """Return a message with its tool calls' arguments parsed from JSON text to objects, as chat templates need them."""
    if not message.get("tool_calls"):
        return message
    try:
        calls = [dict(call) for call in message["tool_calls"]]
        for call in calls:
            function = call["function"] = dict(call.get("function") or {})
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f'{where}: tool_calls must be a list of {{"function": {{"name", "arguments"}}}}') from None
    return message | {"tool_calls": calls}


def _tools(tools: object, where: str) -> list[Json] | None:
    """Return a record's list of tools, which some datasets store as JSON text; `None` without tools."""
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, f"{where}: tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(f"{where}: tools must be a list of JSON schemas")
    return tools


def prompt_ids(record: Record, tokenizer: PreTrainedTokenizerBase | None, raw: bool = False) -> list[int]:
    """Return the token ids of a record's prompt.

    A prompt is one user message in the tokenizer's chat template; with `raw`, or without a template, it is plain text.
    A document is its whole text. A conversation goes through the template without its last answer. Of `input_ids`, the
    first `record.prompt_tokens` are the prompt (0: all). Raise RequestError if the tokenizer or its chat template is
    missing, the template rejects the messages, or the prompt is empty."""
    if record.input_ids is not None:
        ids = record.input_ids[: record.prompt_tokens or None]
    elif tokenizer is None:
        raise RequestError(f"{record.where}: the backbone has no tokenizer; give input_ids")
    elif record.is_prompt and not record.question:
        ids = []
    elif record.is_prompt and (raw or tokenizer.chat_template is None):
        ids = tokenizer(record.question)["input_ids"]
    elif record.is_prompt:
        ids = _conversation_ids(record, [{"role": "user", "content": record.question}], tokenizer)
    elif record.text is not None:
        ids = tokenizer(record.text)["input_ids"] if record.text else []
    else:
        ids = _conversation_ids(record, record.messages or [], tokenizer)
    if not ids:
        raise RequestError(f"{record.where}: the prompt is empty; give at least one token")
    return ids


def continuation_ids(prompt: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of `text`, tokenised together with `prompt`, or alone if this would change the prompt's ids."""
    whole = tokenizer(str(tokenizer.decode(prompt)) + text, add_special_tokens=False)["input_ids"]
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _conversation_ids(record: Record, messages: list[Json], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Remove the last answer from a record's messages, apply the chat template, and return the token ids."""
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if tokenizer.chat_template is None:
        raise RequestError(f"{record.where}: a conversation needs a chat template, and this tokenizer has none")
    if not asked:
        raise RequestError(f"{record.where}: the conversation has no question; its last answer needs one before it")
    try:
        tools = cast("list[dict[str, object] | Callable[..., object]] | None", record.tools)
        rendered = tokenizer.apply_chat_template(asked, tools=tools, add_generation_prompt=True, return_dict=True)
        return cast("BatchEncoding", rendered)["input_ids"]
    except Exception as error:  # templates are programs and raise errors of many types
        raise template_error(record, error) from None


def template_error(record: Record, error: Exception) -> RequestError:
    """Make the error for a conversation that the chat template rejects."""
    roles = ", ".join(str(message["role"]) for message in record.messages or ())
    wanted = "many templates want user and assistant in turn, and some no system message"
    refused = f"the chat template refuses the messages ({error}); their roles are {roles}"
    return RequestError(f"{record.where}: {refused}: change or leave out this record ({wanted})")
