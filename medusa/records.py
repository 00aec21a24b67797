"""Prompts and training text as people keep them: JSONL, JSON, text, Parquet, folders, Hub datasets.

A JSON line is one of `{"prompt"}`, `{"text"}`, `{"input_ids"}`, `{"messages": [{"role", "content"}]}`, ShareGPT's
`{"conversations": [{"from", "value"}]}`, MT-bench's `{"turns": [...]}` (its first turn) or `{"question"}`; a `category`
is kept, and so are the `tools` of a conversation. All but JSON arrays are read as they are needed, line by line, so a
file may be larger than the memory. Errors name file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
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
DOCUMENT_SEPARATOR = "<|endoftext|>"
SETTINGS, FAILED = ".settings.json", ".failed.jsonl"  # what `medusa distill` writes beside its data
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class Record:
    """One line of a file: exactly one of `text`, `input_ids` and `messages` is set."""

    where: str
    """File and line, for messages to the user."""
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    is_prompt: bool = False
    """Whether the text asks for a continuation (a prompt, a question), as opposed to a whole document."""
    prompt_tokens: int = 0
    """How many of `input_ids` somebody else wrote; heads are not taught those."""
    category: str | None = None
    tools: list[Any] | None = None
    """JSON schemas of what a conversation's assistant may call; chat templates write them out."""
    turns: list[str] = field(default_factory=list)
    """All questions of an MT-bench record; `messages` holds the first."""
    teach_last: bool = False
    """Of a conversation, teach the last answer only: the earlier ones are in records of their own."""
    unfinished: bool = False
    """The last answer was cut off: its text does not end there."""


def read_records(
    source: str, *, split: str = "train", subset: str | None = None, separator: str | None = None
) -> Iterator[Record]:
    """Records of a file, of all files in a folder, or of a Hub dataset.

    Args:
        split, subset: of a Hub dataset.
        separator: how documents are told apart in a `.txt` file; `None`: every line is a prompt.

    Raises:
        RequestError: no such source, nothing in it, or a line that is not one of the known forms.
    """
    path, count = Path(source), 0
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and not f.name.endswith((SETTINGS, FAILED)))
        if not files:
            raise RequestError(f"{source} holds no data; files end in {', '.join(SUFFIXES)}")
    elif path.is_file():
        files = [path]
    elif path.suffix in SUFFIXES or (path.parent.is_dir() and len(path.parts) > 2) or not HUB_ID.fullmatch(source):
        raise RequestError(f"no data at {source}: give a file ({', '.join(SUFFIXES)}), a folder or a Hub dataset id")
    else:
        files = []
    records = (r for file in files for r in _read_file(file, separator)) if files else _read_hub(source, split, subset)
    for record in records:
        count += 1
        yield record
    if not count:
        raise RequestError(f"{source} is empty; it must hold at least one record")


def _read_file(path: Path, separator: str | None) -> Iterator[Record]:
    if path.suffix == ".parquet":
        yield from (_parse(row, f"{path}, row {number}") for number, row in enumerate(_parquet_rows(path), 1))
    elif path.suffix == ".jsonl":
        for number, line in _lines(path):
            if line.strip():
                yield _parse(_json(line, f"{path}:{number}"), f"{path}:{number}")
    elif path.suffix == ".json":
        yield from (_parse(row, f"{path}, record {number}") for number, row in enumerate(_json_array(path), 1))
    elif path.suffix == ".txt" and separator is not None:
        yield from _documents(path, separator)
    elif path.suffix == ".txt":
        for number, line in _lines(path):
            if line.strip():
                yield Record(f"{path}:{number}", text=line, is_prompt=True)
    else:
        raise RequestError(f"{path}: files end in {', '.join(SUFFIXES)}")


def _parquet_rows(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        for batch in ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise RequestError(f"{path} is damaged or no Parquet file ({_first_line(error)})") from None


def _json_array(path: Path) -> list[Any]:
    try:
        content = json.loads("\n".join(line for _, line in _lines(path)))
    except json.JSONDecodeError as error:
        hint = "; a file with one record a line is named .jsonl" if error.msg == "Extra data" else ""
        raise RequestError(f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno}){hint}") from None
    if not isinstance(content, list):
        raise RequestError(f"{path} must hold a JSON array of records")
    return content


def _documents(path: Path, separator: str) -> Iterator[Record]:
    """The separator is a line of its own, so it never becomes a token of the text."""
    lines: list[str] = []
    start = 1
    for number, line in chain(_lines(path), [(0, separator)]):
        if line.rstrip(" \t") != separator:
            lines.append(line)
            continue
        document = "\n".join(lines)
        if document.strip():
            yield Record(f"{path}:{start}", text=document.strip("\n"))
        lines, start = [], number + 1


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines. Only a newline ends one: text holds U+2028 and the like, unescaped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            try:
                yield number, line.decode("utf-8").rstrip("\n").rstrip("\r")
            except UnicodeDecodeError as error:
                raise RequestError(
                    f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line is {line[error.start]:#04x}); "
                    "convert the file, for example with iconv"
                ) from None


def _read_hub(name: str, split: str, subset: str | None) -> Iterator[Record]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split, streaming=True, **({"name": subset} if subset else {}))
    except Exception as error:  # datasets raises many types; all mean that there is no such dataset to be had
        raise RequestError(
            f"no data at {name}: neither a file nor a dataset on the Hub ({_first_line(error)})"
        ) from None
    yield from (_parse(row, f"{name}, row {number}") for number, row in enumerate(rows, 1))


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _parse(row: Any, where: str) -> Record:
    if not isinstance(row, dict):
        raise RequestError(f"{where}: a record is a JSON object, not {type(row).__name__}")
    category = row.get("category")
    record = Record(where, category=None if category is None else str(category), tools=_tools(row.get("tools"), where))
    record.teach_last, record.unfinished = row.get("teach") == "last", row.get("finish_reason") == "length"
    if row.get("messages") is not None:
        record.messages = _checked_messages(row["messages"], where)
    elif row.get("conversations") is not None:
        if not isinstance(row["conversations"], list):
            raise RequestError(f'{where}: conversations must be a list of {{"from", "value"}}')
        record.messages = [_from_sharegpt(turn, where) for turn in row["conversations"]]
    elif row.get("input_ids") is not None:
        record.input_ids = _checked_ids(row["input_ids"], where)
        given = row.get("prompt_tokens", 0)
        if not isinstance(given, int) or not 0 <= given <= len(record.input_ids):
            raise RequestError(f"{where}: prompt_tokens is {given!r}; it must be a count of at most all input_ids")
        record.prompt_tokens = given
    elif row.get("turns"):
        if not isinstance(row["turns"], list):
            raise RequestError(f"{where}: turns must be a list of texts")
        record.turns = [str(turn) for turn in row["turns"]]
        record.messages = [{"role": "user", "content": record.turns[0]}]
        record.is_prompt = True
    else:
        key = next((key for key in ("prompt", "question", "text") if isinstance(row.get(key), str)), None)
        if key is None:
            raise RequestError(
                f"{where}: none of prompt, text, input_ids, messages, conversations, turns, question in "
                f"{{{', '.join(map(str, row))}}}"
            )
        record.text, record.is_prompt = row[key], key != "text"
    return record


def _checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise RequestError(f'{where}: messages must be a list of {{"role", "content"}}')
    return [_with_arguments(message, where) for message in messages]


def _with_arguments(message: dict[str, Any], where: str) -> dict[str, Any]:
    """OpenAI keeps the arguments of a tool call as JSON text; templates write out objects."""
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


def _tools(tools: Any, where: str) -> list[Any] | None:
    """Data sets keep tools as a list, or as the JSON text of one."""
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, f"{where}: tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(f"{where}: tools must be a list of JSON schemas")
    return tools


def _from_sharegpt(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or turn.get("from") not in SHAREGPT_ROLES or "value" not in turn:
        raise RequestError(f"{where}: a conversation's turn needs a value and from: {', '.join(SHAREGPT_ROLES)}")
    return {"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


def _checked_ids(ids: Any, where: str) -> list[int]:
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise RequestError(f"{where}: input_ids must be a list of whole numbers of at least 0")
    return ids


def prompt_ids(record: Record, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The ids to continue: of a text as it is, of a conversation up to where the assistant speaks next.

    Raises:
        RequestError: text without a tokenizer, a conversation without a chat template, or an empty prompt.
    """
    if record.input_ids is not None:
        ids = record.input_ids[: record.prompt_tokens or None]
    elif tokenizer is None:
        raise RequestError(f"{record.where}: the backbone has no tokenizer; give input_ids")
    elif record.text is not None:
        ids = tokenizer(record.text)["input_ids"] if record.text else []
    else:
        ids = _conversation_ids(record, tokenizer)
    if not ids:
        raise RequestError(f"{record.where}: the prompt is empty; give at least one token")
    return ids


def continuation_ids(prompt: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of `text` behind `prompt`: tokenised with it, as a word's first token may hold the space before it."""
    whole = tokenizer(str(tokenizer.decode(prompt)) + text, add_special_tokens=False)["input_ids"]
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _conversation_ids(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = list(record.messages or ())
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if tokenizer.chat_template is None:
        if len(messages) == 1 and record.is_prompt:
            return tokenizer(messages[0]["content"])["input_ids"]  # a base model: the question itself is the prompt
        raise RequestError(f"{record.where}: a conversation needs a chat template, and this tokenizer has none")
    try:
        rendered: Any = tokenizer.apply_chat_template(
            messages, tools=record.tools, add_generation_prompt=True, return_dict=True
        )
        return rendered["input_ids"]
    except Exception as error:  # templates are programs: they raise what they like, and it is about this record
        raise refusal(record, error) from None


def refusal(record: Record, error: Exception) -> RequestError:
    """What to say where a chat template does not take a conversation."""
    roles = ", ".join(str(message["role"]) for message in record.messages or ())
    return RequestError(
        f"{record.where}: the chat template refuses the messages ({error}); their roles are {roles}: change or leave "
        "out this record (many templates want user and assistant in turn, and some no system message)"
    )
