"""What `medusa distill` asks a backbone: to go on with a text, or the questions of a conversation, one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from medusa.records.record import Record, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]


@dataclass
class Task:
    """One record. Either `ids` are to be continued, or each of `questions` is to be answered in its turn."""

    index: int
    where: str
    ids: list[int] | None = None
    questions: list[Messages] = field(default_factory=list)
    """What is said before each answer, beyond what came before: a system message and a question, a question, ..."""
    tools: list[Any] | None = None
    category: str | None = None

    @property
    def turns(self) -> int:
        return len(self.questions) or 1

    def messages(self, answers: list[str]) -> Messages:
        """The conversation up to the turn after `answers`, which are the backbone's own."""
        out: Messages = []
        for turn, question in enumerate(self.questions[: len(answers) + 1]):
            out += question
            if turn < len(answers):
                out.append({"role": "assistant", "content": answers[turn]})
        return out

    def prompt(self, answers: list[str], tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
        """The ids to continue in the turn after `answers`.

        Raises:
            RequestError: the chat template refuses the conversation."""
        if self.ids is not None:
            return self.ids
        return prompt_ids(Record(self.where, messages=self.messages(answers), tools=self.tools), tokenizer)


def tasks_of(
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    prefix_tokens: int | None = None,
    max_turns: int | None = None,
) -> list[Task]:
    """A task for every record; with `prefix_tokens` only the first tokens of a text are given, the rest is forgotten.

    Raises:
        RequestError: text without a tokenizer, a refused conversation or an empty prompt, named by file and line.
    """
    templated = tokenizer is None or tokenizer.chat_template is not None
    out = []
    for index, record in enumerate(records):
        task = Task(index, record.where, tools=record.tools, category=record.category)
        if record.messages is not None and (templated or not record.is_prompt) and prefix_tokens is None:
            task.questions = _questions(record)[:max_turns]
        else:  # the question of a conversation to a base model is text
            task.ids = prompt_ids(record, tokenizer)[:prefix_tokens]
        out.append(task)
    return out


def _questions(record: Record) -> list[Messages]:
    messages = record.messages or []
    if record.turns:
        return [[{"role": "user", "content": turn}] for turn in record.turns]
    if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        # What a tool answered belongs to the call before it: the backbone's own call would have got another answer.
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return [messages]
    out: list[Messages] = []
    waiting: Messages = []
    for message in messages:
        if message["role"] != "assistant":
            waiting.append(message)
        if message["role"] == "user":
            out.append(waiting)
            waiting = []
    return out or [waiting]


def digest(records: Iterable[Record]) -> str:
    """What tells one set of prompts from another: a resumed run must not answer other questions under old numbers."""
    found = hashlib.sha256()
    for record in records:
        said = [record.text, record.input_ids, record.messages, record.turns, record.tools]
        found.update(json.dumps(said, default=str).encode())
    return found.hexdigest()[:16]
