"""The token ids of prompts: plain text, ids, or a conversation through the tokenizer's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from medusa.errors import RequestError
from medusa.records.record import Record

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


def prompt_ids(record: Record, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The ids to continue: a whole text, or a conversation up to the place where the assistant speaks next.

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
    """The ids of `text` after `prompt`, tokenised together: a word's first token may hold the space before it."""
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
        rendered = tokenizer.apply_chat_template(
            messages, tools=record.tools, add_generation_prompt=True, return_dict=True
        )
        return cast("BatchEncoding", rendered)["input_ids"]
    except Exception as error:  # templates are programs that raise errors of any type, all about this record
        raise template_error(record, error) from None


def template_error(record: Record, error: Exception) -> RequestError:
    """The error for a conversation that a chat template does not take."""
    roles = ", ".join(str(message["role"]) for message in record.messages or ())
    return RequestError(
        f"{record.where}: the chat template refuses the messages ({error}); their roles are {roles}: change or leave "
        "out this record (many templates want user and assistant in turn, and some no system message)"
    )
