"""Token ids of a conversation, of which the assistant's turns and their end-of-turn tokens count in the loss.

`train.data.turns` finds these turns in the text that the chat template writes. This module marks their tokens:

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
                                                          |--in the loss--|
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from medusa.records.record import Record
from train.data.turns import ConversationText, Span

Offsets = list[tuple[int, int]]  # the start and the end of each token of a text, in characters


def conversation(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Tokenise a conversation by the chat template. Return its token ids, and for each whether it counts in the loss.

    The tokens of the assistant's turns count. Raise RequestError if there is no chat template, if it rejects the
    messages, or if the assistant's turns cannot be found."""
    if tokenizer.chat_template is None:
        advice = "train on text, or put the model's chat_template.jinja next to the tokenizer"
        raise RequestError(f"{record.where}: a conversation needs a chat template, and there is none; {advice}")
    written = ConversationText(record, tokenizer)
    spans = written.spans()
    ids, mask = _to_tokens(written.text, spans, tokenizer, record.where)
    if spans and not any(mask):
        raise RequestError(f"{record.where}: the chat template writes nothing of what the assistant says; use another")
    if not record.unfinished or not spans:
        return ids, mask
    end = len(mask) - mask[::-1].index(True)
    if _is_special(ids[end - 1], tokenizer):  # the template ends the turn, but the model was stopped before it did
        end -= 1
    return ids[:end], mask[:end]


def _to_tokens(
    text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation's `text`, and for each whether it belongs to an assistant's turn.

    The turns lie at `spans`, each with any end-of-turn token that follows. `where` is the text's file and line."""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids: list[int] = encoded["input_ids"]
    offsets: Offsets = encoded["offset_mapping"] if tokenizer.is_fast else _offsets(ids, text, tokenizer, where)
    mask = [False] * len(ids)
    for span in spans:
        first = next((at for at, (_, end) in enumerate(offsets) if end > span.start), len(ids))
        answer_end, last = (_first_after(offsets, first, at) for at in (span.answer_end, span.end))
        last = _end_of_turn(ids, first, answer_end, last, span.ended, tokenizer)
        mask[first:last] = [True] * (last - first)
    return ids, mask


def _first_after(offsets: Offsets, first: int, at: int) -> int:
    """Index of the first token that starts at or after character position `at`, not counting tokens before `first`.

    A token with start = end = `at` is skipped, because its text lies before `at`. Byte-level tokenizers may report a
    token of spaces like this, with both its start and its end at the end of the spaces."""
    return next((k for k in range(first, len(offsets)) if offsets[k][0] >= at and offsets[k][1] > at), len(offsets))


def _offsets(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase, where: str) -> Offsets:
    """Compute where each token of a text starts and ends, in characters, for tokenizers that do not report offsets."""
    offsets: Offsets = []
    for at in range(len(ids)):
        piece = str(tokenizer.decode(ids[len(offsets) : at + 1]))
        start = offsets[-1][1] if offsets else 0
        if text.startswith(piece, start):  # otherwise the tokens end within a character
            offsets += [(start, start + len(piece))] * (at + 1 - len(offsets))
    if len(offsets) < len(ids):
        raise RequestError(f"{where}: the tokenizer does not give the places of its tokens in a text; give input_ids")
    return offsets


def _end_of_turn(
    ids: list[int], first: int, answer_end: int, last: int, ended: bool, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Find where the loss ends in a turn: the index after the end-of-turn token, or `last` if there is no such token.

    The backbone never generates what a template writes after that token, such as a newline. Token indices: `first` is
    where the turn starts; `answer_end` comes after the answer, and `last` after the turn's `Span`. With `ended`, the
    end-of-turn token lies inside the `Span`. Otherwise it may lie there, be the token at `last`, or be missing."""
    for at in range(answer_end, last):
        if _is_special(ids[at], tokenizer):
            return at + 1
    end = last
    while end > first and str(tokenizer.decode([ids[end - 1]])).isspace():
        end -= 1
    if end > first and _is_special(ids[end - 1], tokenizer):
        return end
    return last + 1 if not ended and last < len(ids) and _is_special(ids[last], tokenizer) else last


def _is_special(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.decode([token]) != "" == tokenizer.decode([token], skip_special_tokens=True)
