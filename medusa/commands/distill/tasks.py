"""The tasks of `medusa distill`: texts to continue, and conversations whose questions are answered one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medusa.files import Json
from medusa.records.record import Record, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Task:
    """One record: `ids` to continue, or `questions` to answer in turn."""

    index: int
    where: str
    ids: list[int] | None = None
    questions: list[list[Json]] = field(default_factory=list)
    """The new messages before each answer: a system message and a question, then one question each."""
    tools: list[Json] | None = None
    category: str | None = None

    @property
    def turns(self) -> int:
        return len(self.questions) or 1

    def messages(self, answers: list[str]) -> list[Json]:
        """The conversation up to the question after the backbone's `answers`."""
        messages: list[Json] = []
        for turn, question in enumerate(self.questions[: len(answers) + 1]):
            messages += question
            if turn < len(answers):
                messages.append({"role": "assistant", "content": answers[turn]})
        return messages

    def prompt(self, answers: list[str], tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
        """The ids to continue after `answers`.

        Raises:
            RequestError: the chat template refuses the conversation."""
        if self.ids is not None:
            return self.ids
        return prompt_ids(Record(self.where, messages=self.messages(answers), tools=self.tools), tokenizer)

    def line(self, prompt: list[int], new_ids: list[int], answer: str, reason: str) -> Json:
        """The output line of one answer as ids."""
        line = {"input_ids": prompt + new_ids, "prompt_tokens": len(prompt), "answer": answer, "finish_reason": reason}
        return line if self.category is None else line | {"category": self.category}


def tasks_of(
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase | None,
    prefix_tokens: int | None = None,
    max_turns: int | None = None,
) -> list[Task]:
    """A task for each record.

    Args:
        prefix_tokens: use only the first tokens of a text.

    Raises:
        RequestError: text without a tokenizer, a conversation that the template refuses, or an empty prompt."""
    templated = tokenizer is None or tokenizer.chat_template is not None
    tasks = []
    for index, record in enumerate(records):
        task = Task(index, record.where, tools=record.tools, category=record.category)
        if record.messages is not None and (templated or not record.is_prompt) and prefix_tokens is None:
            task.questions = _questions(record)[:max_turns]
        else:  # without a template, the question of a conversation is plain text
            task.ids = prompt_ids(record, tokenizer)[:prefix_tokens]
        tasks.append(task)
    return tasks


def _questions(record: Record) -> list[list[Json]]:
    messages = record.messages or []
    if record.turns:
        return [[{"role": "user", "content": turn}] for turn in record.turns]
    if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        # A tool's reply belongs to the recorded call: the backbone's own call would get another reply.
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return [messages]
    questions: list[list[Json]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            questions[-1].append(message)
        if message["role"] == "user":
            questions.append([])
    return questions[:-1] or questions


def digest(records: Iterable[Record]) -> str:
    """A hash of the prompts, so that a resumed run does not answer other prompts under the same indices."""
    found = hashlib.sha256()
    for record in records:
        content = [record.text, record.input_ids, record.messages, record.turns, record.tools]
        found.update(json.dumps(content, default=str).encode())
    return found.hexdigest()[:16]
