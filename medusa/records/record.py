"""Records of prompts and training text: parsing of their JSON forms, and the token ids of a record's prompt.

The JSON object of a record contains the keys of one of the `LAYOUTS`, and optionally a `category`, the `tools` of a
conversation and its `chat_template_kwargs`. If the tokenizer has a chat template, it formats prompts, turns and
conversations. A `text` and `input_ids` are never formatted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from medusa.errors import RequestError
from medusa.files import Json
from medusa.records.messages import messages_of, parse_json, require_text, text_of, tools_of, without_nulls
from medusa.records.template import write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVERSATIONS = ("messages", "conversations", "conversation", "data")
QUESTIONS, INPUTS = ("prompt", "question", "instruction"), ("input", "context")
SYSTEM = ("system", "system_prompt")
ANSWERS = ("completion", "response", "answer", "output", "chosen")
LAYOUTS = {
    "`messages`, `conversations` or `conversation`": "a conversation: a list of `role` and `content`, or of `from` and "
    "`value` (ShareGPT), also as JSON text",
    "`data`": "a list of texts, question and answer in turn (UltraChat)",
    "`prompt`, `question` or `instruction`": "a question as text, or the messages before an answer; an `input` "
    "(Alpaca) or `context` (Dolly) follows its `instruction`",
    "and `completion`, `response`, `answer`, `output` or `chosen`": "its answer, as text or as messages (TRL, Alpaca, "
    "GSM8K), which only training reads",
    "`system` or `system_prompt`": "the system message of a question or conversation that has none",
    "`turns`": "a list of questions, answered in turn (MT-bench); other commands read the first one",
    "`text`": "a whole document, of which heads learn every token",
    "`input_ids`": "token ids, of which the first `prompt_tokens` are the prompt",
}
"""The layouts of a record: the keys, and what they hold. `docs/data.md` shows this table."""
ENDED = (None, "eos", "stop", "tool_calls", "function_call", "end_turn", "eos_token")
"""The values of `finish_reason` after which the model has written its end-of-turn token."""


@dataclass
class Record:
    """A prompt, a document or a conversation: exactly one of `text`, `input_ids` and `messages` is not `None`."""

    where: str  # the file and line of the record, for error messages
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[Json] | None = None
    is_prompt: bool = False  # a prompt or question to continue, rather than a whole document
    answer: str | None = None  # the answer to a prompt
    prompt_tokens: int = 0  # how many `input_ids` at the start are the prompt, which does not count in the loss
    category: str | None = None  # such as `math`, for results by category
    tools: list[Json] | None = None  # JSON schemas for the chat template
    turns: list[str] = field(default_factory=list)  # all questions of an MT-bench record; `messages` has the first one
    first_taught: int = 0  # answers in earlier messages do not count in the loss: other records contain them
    unfinished: bool = False  # the last answer was cut off, so that no end-of-turn token follows it
    raw_prompt: bool | None = None  # of a distilled answer: whether its prompt was plain text; `None`: not recorded
    template_options: Json = field(default_factory=dict)  # the record's own options of the chat template

    @property
    def is_document(self) -> bool:
        """Whether the record is a whole document: text or token ids of which no part is marked as the prompt."""
        return self.messages is None and not self.is_prompt and not self.prompt_tokens

    @property
    def question(self) -> str:
        """The text of a prompt; of a conversation, the first question of the user."""
        messages = self.messages or []
        return text_of(next((m for m in messages if m["role"] == "user"), messages[0])) if messages else self.text or ""

    @property
    def is_answered(self) -> bool:
        """Whether the record holds something to learn: a document, or an answer of the assistant."""
        if self.messages is not None:
            return any(message["role"] == "assistant" for message in self.messages[self.first_taught :])
        return not self.is_prompt or self.answer is not None

    def as_text(self) -> Record:
        """Return a prompt as the beginning of a text, which no chat template formats; other records unchanged."""
        if not self.is_prompt:
            return self
        return replace(self, text=self.question, messages=None, turns=[], is_prompt=False, answer=None)

    def as_conversation(self) -> Record:
        """Return a prompt as a conversation: one question of the user, and the answer if there is one."""
        if not self.is_prompt:
            return self
        answers = [] if self.answer is None else [{"role": "assistant", "content": self.answer}]
        asked: list[Json] = [{"role": "user", "content": self.question}]
        return replace(self, text=None, messages=asked + answers, is_prompt=False, answer=None)

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


def parse_record(row: object, where: str, arrow: bool = False) -> Record:
    """Make a record from a JSON object; RequestError, beginning with `where`, if it has none of the known layouts.

    `arrow`: the object comes from an Arrow table, whose nulls stand for keys that the object does not have."""
    if not isinstance(row, dict):
        example = '{"prompt": "Why is the sky blue?"}'
        raise RequestError(f"{where}: a record is a JSON object, not {type(row).__name__}; write it as {example}")
    given, row = row, without_nulls(row) if arrow else {key: item for key, item in row.items() if item is not None}
    record = _content_of(row, where)
    if record is None:
        raise _without_layout(given, where)
    if record.messages is not None or record.is_prompt:
        require_text(row, where)
        record = _with_system(record, next((row[key] for key in SYSTEM if isinstance(row.get(key), str)), ""))
    record.category = str(row["category"]) if "category" in row else None
    record.tools = tools_of(row.get("tools"), where)
    if record.messages is not None and record.tools is None:  # the older OpenAI API has functions
        functions = tools_of(row.get("functions"), where) or ()
        record.tools = [{"type": "function", "function": function} for function in functions] or None
    record.raw_prompt = row["raw_prompt"] if isinstance(row.get("raw_prompt"), bool) else None
    record.template_options = _options(row.get("chat_template_kwargs"), where)
    distilled = row.get("teach") == "last"  # whose `finish_reason` is `eos` unless a string has stopped the answer
    stopped = row.get("finish_reason") == "stop" and (distilled or isinstance(row.get("stop_reason"), str))
    record.unfinished = stopped or row.get("finish_reason") not in ENDED
    if distilled and record.messages:
        record.first_taught = len(record.messages) - 1
    return record


def _content_of(row: Json, where: str) -> Record | None:
    """Read the prompt, document or conversation of a row; return `None` if it has none of the known keys."""
    for key in CONVERSATIONS:
        found = row.get(key)
        if found is not None and (key != "data" or _is_list_of(found, str)):
            return Record(where, messages=messages_of(found, f"{where}: {key}"))
    if "input_ids" in row:
        return _ids(row, where)
    if "turns" in row:
        if not isinstance(row["turns"], list) or not row["turns"]:
            raise RequestError(f"{where}: turns must be a list of texts, and not empty")
        if not _is_list_of(row["turns"], str):
            return Record(where, messages=messages_of(row["turns"], f"{where}: turns"))
        asked: list[Json] = [{"role": "user", "content": row["turns"][0]}]
        return Record(where, messages=asked, turns=row["turns"], is_prompt=True)
    said = [key for key in QUESTIONS if _is_said(row.get(key))]
    if said:
        return _question(row, next((key for key in said if row[key]), said[0]), where)
    answer = next((row[key] for key in ANSWERS if _is_list_of(row.get(key), dict)), None)
    if answer is not None:  # the whole conversation, as in preference data without a prompt
        return Record(where, messages=messages_of(answer, where))
    if isinstance(row.get("text"), str):
        return Record(where, text=row["text"])
    return None


def _with_system(record: Record, system: str) -> Record:
    """Return a record whose conversation begins with the system message of its row, unless it has one."""
    roles = [message["role"] for message in record.messages or ()]
    if not system.strip() or {"system", "developer"} & set(roles[:1]):
        return record
    record, begin = record.as_conversation(), [{"role": "system", "content": system}]
    return replace(record, messages=begin + (record.messages or []), first_taught=record.first_taught + 1)


def _question(row: Json, key: str, where: str) -> Record:
    """Read a question, `row[key]`, with its answer if the row has one; each is a text or a list of messages."""
    answers = {name: said for name in ANSWERS if (said := _as_answer(row.get(name))) is not None}
    name = next((name for name, said in answers.items() if said), next(iter(answers), None))
    question, answer = row[key], answers.get(name or "")
    given = next((row[key] for key in INPUTS if isinstance(row.get(key), str) and row[key].strip()), "")
    if isinstance(question, str) and given:
        question = f"{question}\n\n{given}"
    if isinstance(question, str) and not isinstance(answer, list):
        return Record(where, text=question, is_prompt=True, answer=answer)
    replies = messages_of(answer, f"{where}: {name}") if isinstance(answer, list) else []
    if replies and replies[0]["role"] != "assistant":  # the whole conversation, as in preference data
        return Record(where, messages=replies)
    if isinstance(answer, str):
        replies = [{"role": "assistant", "content": answer}]
    before: list[Json] = [{"role": "user", "content": question}]
    if isinstance(question, list):
        before = messages_of(question, f"{where}: {key}")
    return Record(where, messages=before + replies, first_taught=len(before))


def _ids(row: Json, where: str) -> Record:
    ids, prompt = row["input_ids"], row.get("prompt_tokens", 0)
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise RequestError(f"{where}: input_ids must be a list of whole numbers of at least 0")
    if isinstance(prompt, bool) or not isinstance(prompt, int) or not 0 <= prompt <= len(ids):
        raise RequestError(f"{where}: prompt_tokens is {prompt!r}; it must be a count of at most all input_ids")
    return Record(where, input_ids=ids, prompt_tokens=prompt)


def _as_answer(found: object) -> str | list[Json] | None:
    """Return an answer as text or as messages, of which it may be one; `None` for something else.

    A number may be the number of a choice, and a list may hold several right answers."""
    if isinstance(found, dict) and "content" in found:
        return [found]
    return cast("str | list[Json]", found) if _is_said(found) else None


def _is_said(found: object) -> bool:
    """Whether a value is a text or a list of messages."""
    return isinstance(found, str) or _is_list_of(found, dict)


def _is_list_of(found: object, kind: type) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(item, kind) for item in found)


def _options(found: object, where: str) -> Json:
    """Return a record's options of the chat template, which some datasets store as JSON text."""
    found = parse_json(found, f"{where}: chat_template_kwargs") if isinstance(found, str) and found else found or {}
    if not isinstance(found, dict):
        raise RequestError(f'{where}: chat_template_kwargs must be an object such as {{"enable_thinking": false}}')
    return found


def _without_layout(row: Json, where: str) -> RequestError:
    """Make the error for a record without any of the known keys, or with a value of another type."""
    known = (*QUESTIONS, "text", *CONVERSATIONS, "turns", "input_ids")
    if (wrong := next((key for key in known if key in row), None)) is not None:
        allowed = "a text, or a list of messages" if wrong in QUESTIONS else "a text"
        allowed = "a list of texts, question and answer in turn" if wrong == "data" else allowed
        return RequestError(f"{where}: {wrong} is {json.dumps(row[wrong], default=str)[:80]}; it must be {allowed}")
    texts = [key for key, value in row.items() if isinstance(value, str) and value]
    advice = "rename the key of the question to prompt, and that of the answer to completion"
    if lists := [key for key, value in row.items() if _is_list_of(value, dict)]:
        advice = f"rename {lists[0]} to messages"
    elif not texts and (lists := [key for key, value in row.items() if _is_list_of(value, str)]):
        advice = f"rename {lists[0]} to data if it holds question and answer in turn"
    elif numbers := [key for key, value in row.items() if _is_list_of(value, int)]:
        advice = f"rename {numbers[0]} to input_ids"
    elif texts:
        answer = next((key for key in ANSWERS if key in texts), None)
        question = next((key for key in texts if key not in (answer, "rejected")), None)
        advice = f"rename {question} to prompt, or to text if it is a whole document" if question else advice
    return RequestError(f"{where}: none of {', '.join(known)} in {{{', '.join(map(str, row))}}}; {advice}")


def prompt_ids(
    record: Record,
    tokenizer: PreTrainedTokenizerBase | None,
    raw: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a record's prompt.

    A prompt is one user message in the tokenizer's chat template; with `raw`, or without a template, it is plain text.
    A document is its whole text. A conversation goes through the template without its last answer. Of `input_ids`, the
    first `record.prompt_tokens` are the prompt (0: all). `options` are those of the template; the record's own come
    first. Raise RequestError if the tokenizer or its chat template is missing, the template rejects the messages, or
    the prompt is empty."""
    if record.input_ids is not None:
        ids = record.input_ids[: record.prompt_tokens or None]
    elif tokenizer is None:
        raise RequestError(f"{record.where}: the backbone has no tokenizer; give input_ids")
    elif record.is_prompt and not record.question:
        ids = []
    elif record.is_prompt and (raw or tokenizer.chat_template is None):
        ids = text_ids(record.question, tokenizer)
    elif record.text is not None and not record.is_prompt:
        ids = text_ids(record.text, tokenizer) if record.text else []
    else:
        ids = tokens_of(prompt_text(record.as_conversation(), tokenizer, options), tokenizer)
    if not ids:
        raise RequestError(f"{record.where}: the prompt is empty; give at least one token")
    return ids


def prompt_text(
    record: Record,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any] | None = None,
    turn: int | None = None,
) -> str:
    """Return the text that a model is shown before it writes message `turn` of a conversation, by default the last.

    By default, the last answers are left out, if there are any. Raise RequestError as `prompt_ids` does."""
    asked = (record.messages or [])[:turn]
    while turn is None and asked and asked[-1]["role"] == "assistant":
        asked = asked[:-1]
    if not asked:
        raise RequestError(f"{record.where}: the conversation has no question; its last answer needs one before it")
    return conversation_text(asked, record, tokenizer, options)


def conversation_text(
    messages: list[Json],
    record: Record,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any] | None = None,
    *,
    prompt: bool = True,
    continued: bool = False,
) -> str:
    """Return `messages` as the chat template writes them with the record's tools and options (`write`).

    Raise RequestError, beginning with the record's place, if there is no template or it rejects the messages."""
    if tokenizer.chat_template is None:
        advice = "give text, or put the model's chat_template.jinja next to the tokenizer"
        raise RequestError(f"{record.where}: a conversation needs a chat template, and there is none; {advice}")
    chosen = dict(options or {}) | record.template_options
    try:
        return write(messages, tokenizer, record.tools, chosen, prompt=prompt, continued=continued)
    except RequestError as error:
        raise RequestError(f"{record.where}: {error}") from None


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text that a model continues: with BOS where the tokenizer adds it, but not twice.

    An EOS that the tokenizer adds is left out, because the model would continue a text that has ended."""
    ids, begin, end = _encoded(text, tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id
    if end not in (None, begin) and ids[-1:] == [end] and ids.count(end) > tokens_of(text, tokenizer).count(end):
        ids = ids[:-1]
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text and of no other tokens, such as a BOS that a chat template has written already."""
    return _encoded(text, tokenizer, add_special_tokens=False)


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase, **options: bool) -> list[int]:
    """Encode a text; raise RequestError for bytes that are no UTF-8, as a terminal or a pipe may give them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 20, 0) : error.end]
        raise RequestError(f"the text is not UTF-8 after {around!a}; convert it, as with iconv") from None
    return tokenizer(text, **options)["input_ids"]


def continuation_ids(prompt: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of `text`, tokenised together with `prompt`, or alone if this would change the prompt's ids.

    Tokenizers such as Llama 2's write a space before a text that stands alone, and before one that follows a BOS. If
    the text got a space of its own, it is tokenised after a newline instead."""
    begin = [prompt[:1]] if prompt[:1] == [tokenizer.bos_token_id] else []
    for start in ([], *begin):
        whole = start + tokens_of(str(tokenizer.decode(prompt[len(start) :])) + text, tokenizer)
        if whole[: len(prompt)] == prompt:
            return whole[len(prompt) :]
    alone, line, after = (tokens_of(part, tokenizer) for part in (text, "\n", f"\n{text}"))
    wanted = str(tokenizer.decode(prompt)) + text
    others = [after[len(line) :]] if after[: len(line)] == line else []
    return next((ids for ids in (alone, *others) if tokenizer.decode(prompt + ids) == wanted), alone)
