"""The tasks of `medusa distill`: texts to continue, conversations whose questions are answered, questions to write."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medusa.commands.prompting import PromptForm
from medusa.errors import RequestError
from medusa.files import Json
from medusa.records.questions import QuestionForm
from medusa.records.record import Record, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Task:
    """The task of one record: token ids to continue (`ids`), or the `questions` of a conversation to answer.

    With `asks`, the continued text is a question that the model writes."""

    index: int
    where: str
    ids: list[int] | None = None
    questions: list[list[Json]] = field(default_factory=list)
    """The new messages before each answer: one question, and before the first question possibly a system message."""
    tools: list[Json] | None = None
    category: str | None = None
    raw_prompt: bool | None = None
    """Whether the prompt is plain text, not in a chat template; `None` for `text`, `input_ids` and self-talk."""
    template_options: Json = field(default_factory=dict)
    """The options of the chat template, if it formats the prompt."""
    asks: QuestionForm | None = None

    @property
    def turns(self) -> int:
        """The number of answers to generate: one per question, or one for a text to continue."""
        return len(self.questions) or 1

    def messages(self, answers: list[Json]) -> list[Json]:
        """Return the messages of the conversation, with the `answers` generated so far, up to the next question."""
        messages = list(self.questions[0])
        for answer, question in zip(answers, self.questions[1:], strict=False):
            messages += [answer, *question]
        return messages

    def prompt(self, answers: list[Json], tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
        """Return the next prompt's token ids; raise RequestError if the chat template rejects the conversation."""
        if self.ids is not None:
            return self.ids
        asked = Record(self.where, messages=self.messages(answers), tools=self.tools)
        return prompt_ids(asked, tokenizer, options=self.template_options)


def tasks_of(
    records: list[Record],
    tokenizer: PreTrainedTokenizerBase | None,
    form: PromptForm,
    prefix_tokens: int | None,
    max_turns: int | None,
) -> list[Task]:
    """Make a task from each record: a text to continue, or a conversation to answer. `form` is the form of prompts.

    Only the first `max_turns` questions of a conversation are answered (`None`: all). With `prefix_tokens`, only the
    first `prefix_tokens` tokens of each text or conversation are kept, and are continued.

    Raise RequestError if a needed tokenizer is missing, a prompt is empty, or a conversation has no question; with
    `prefix_tokens`, also if the template rejects it."""
    tasks = []
    for index, record in enumerate(records):
        task = Task(index, record.where, tools=record.tools, category=record.category)
        task.raw_prompt = form.of(record)
        if task.raw_prompt is False and prefix_tokens is None:
            task.questions = _questions(record)[:max_turns]
            task.template_options = form.options | record.template_options
        else:  # of several turns, the first question is text to continue
            task.ids = prompt_ids(record, tokenizer, form.raw, form.options)[:prefix_tokens]
        tasks.append(task)
    return tasks


def _questions(record: Record) -> list[list[Json]]:
    """Return the new messages before each answer; with tool calls, one list: all messages before the last answer."""
    messages = record.messages or []
    if record.is_prompt:
        if not record.question:
            raise RequestError(f"{record.where}: the prompt is empty; give at least one token")
        return [[{"role": "user", "content": turn}] for turn in record.turns or [record.question]]
    if record.turns:  # after a system message
        return [messages, *([{"role": "user", "content": turn}] for turn in record.turns[1:])]
    if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        # The recorded reply of a tool does not fit a call that the backbone generates, so the recorded calls stay.
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return [messages]
    questions: list[list[Json]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            questions[-1].append(message)
        if message["role"] == "user":
            questions.append([])
    found = questions[:-1] or questions
    if not any(found):
        raise RequestError(f"{record.where}: the conversation has no question; give a message with the role user")
    return found


def digest(records: list[Record]) -> str:
    """Return a hash of the prompts, by which a continued run checks that its prompts are those of the earlier run."""
    found = hashlib.sha256()
    for record in records:
        content: list[object] = [record.text, record.input_ids, record.messages, record.turns, record.tools]
        content += [record.template_options] if record.template_options else []
        content += ["text"] if record.is_document else [record.prompt_tokens] * bool(record.prompt_tokens)
        found.update(json.dumps(content, default=str).encode())
    return found.hexdigest()[:16]
