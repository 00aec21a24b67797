"""Which tokens of a conversation are the assistant's: what it says and the end of its turn, and nothing else.

The answer is found in the text that the chat template writes, and then carried over to tokens:

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
                                                          |-----taught----|

1. If the template itself marks what the assistant says ({% generation %}), these marks are used.
2. Otherwise the template writes the conversation up to the turn and up to its end: the difference is the turn.
3. Some templates write a turn differently if others follow, for example without its thinking. They write the
   conversation again with another answer in this turn: what both texts have in common is not the turn.
If none of these is certain, the conversation is an error; a guess could teach what the user says.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from medusa.errors import RequestError
from medusa.records.record import Record, template_error

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PRIVATE = [chr(code) for code in range(0xE000, 0xE010)]  # private-use characters: no text holds all of them
Places = list[tuple[int, int]]
"""Start and end of each token in a text, in characters."""


class Span(NamedTuple):
    """A turn of the assistant in the text, in characters."""

    start: int
    said: int
    """Known end of the answer; the turn ends with the first special token after it."""
    end: int
    ended: bool
    """Whether this special token must come before `end`; otherwise it may also follow directly."""


def conversation(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Ids [T] of a conversation as the tokenizer's template writes it, and True [T] for those that are taught.

    Raises:
        RequestError: no chat template, a template that rejects the messages, or one whose turns cannot be found.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            f"{record.where}: a conversation needs a chat template, and this tokenizer has none; train on text, or put "
            "the model's chat_template.jinja next to its tokenizer"
        )
    written = _Written(record, tokenizer)
    spans = written.spans()
    ids, mask = _to_tokens(written.text, spans, tokenizer, record.where)
    if spans and not any(mask):
        raise RequestError(f"{record.where}: the chat template writes nothing of what the assistant says; use another")
    return _cut_off(ids, mask, tokenizer) if record.unfinished and spans else (ids, mask)


class _Written:
    """A conversation as text, as its template writes it."""

    def __init__(self, record: Record, tokenizer: PreTrainedTokenizerBase) -> None:
        self.record, self.tokenizer, self.messages = record, tokenizer, record.messages or []
        try:
            self.template = tokenizer.get_chat_template(None, record.tools)
            self.text = self._write(self.messages)
        except Exception as error:  # templates are programs and raise any exception; all are about this record
            raise template_error(record, error) from None

    def _write(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        settings: Any = {"tools": self.record.tools, "tokenize": False, "add_generation_prompt": prompt}
        return str(self.tokenizer.apply_chat_template(messages, **settings))

    def spans(self) -> list[Span]:
        """The assistant's turns that are taught, in order."""
        turns = [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"]
        if self.record.teach_last:
            turns = turns[-1:]
        elif turns and (marked := self._marked(len(turns))):
            return marked
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: int) -> Span:
        whole, answer = self._by_difference(turn), self._by_exchange(turn)
        if whole and answer:
            start = whole[0]
            if "add_generation_prompt" not in self.template:
                # Only the answer shows the end of the turn's header; a space between header and answer is the answer's.
                start = max(start, len(self.text[: answer[0]].rstrip(" ")))
            return Span(start, answer[1], whole[1], ended=True)
        if found := whole or answer:
            return Span(found[0], said=found[1], end=found[1], ended=found is whole)
        raise RequestError(
            f"{self.record.where}: the chat template writes message {turn + 1} differently if others follow, so the "
            "assistant's answer cannot be found in the text; mark answers in the template with {% generation %}, or "
            "end the conversation with this message"
        )

    def _marked(self, turns: int) -> list[Span] | None:
        """The turns that the template marks; `None` unless it marks all of them."""
        if not GENERATION.search(self.template):
            return None
        messages = [{key: value for key, value in m.items() if value is not None} for m in self.messages]
        # Not `apply_chat_template(return_assistant_tokens_mask=True)`: where a marked text ends in a space that belongs
        # to no token's offsets, its mask runs on to the end of the conversation.
        given: Any = {"tools": self.record.tools, **self.tokenizer.special_tokens_map}
        texts, places = cast(
            tuple[list[str], list[Places]],
            render_jinja_template([messages], chat_template=self.template, return_assistant_tokens_mask=True, **given),
        )
        found = [Span(start, end, end, ended=False) for start, end in places[0] if start < end]
        return found if texts[0] == self.text and len(found) >= turns else None

    def _by_difference(self, turn: int) -> tuple[int, int] | None:
        """Start and end of the turn, as the difference between the texts without and with it."""
        try:
            before = self._write(self.messages[:turn], prompt=True)
            after = self._write(self.messages[: turn + 1])
        except Exception:  # a template may refuse a part of a conversation that it accepts as a whole
            return None
        holds = self.text.startswith(after) and after.startswith(before)
        return (len(before), len(after)) if holds else None

    def _by_exchange(self, turn: int) -> tuple[int, int] | None:
        """Start and end of the answer, as the part of the text that changes with another answer."""
        other = next(character for character in PRIVATE if character not in self.text)
        exchanged = [*self.messages[:turn], {"role": "assistant", "content": other}, *self.messages[turn + 1 :]]
        try:
            head, *tail = self._write(exchanged).split(other)
        except Exception:  # as above
            return None
        if len(tail) != 1 or not (self.text.startswith(head) and self.text.endswith(tail[0])):
            return None
        start, end = len(head), len(self.text) - len(tail[0])
        return (start, end) if start <= end else None


def _to_tokens(
    text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[bool]]:
    """Ids [T] of a text, and True [T] for tokens that hold a character of a span, up to the end-of-turn token."""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids: list[int] = encoded["input_ids"]
    places: Places = encoded["offset_mapping"] if tokenizer.is_fast else _places(ids, text, tokenizer, where)
    mask = [False] * len(ids)
    for span in spans:
        first = next((at for at, (_, end) in enumerate(places) if end > span.start), len(ids))
        said, last = (_first_after(places, first, at) for at in (span.said, span.end))
        last = _end_of_turn(ids, first, said, last, span.ended, tokenizer)
        mask[first:last] = [True] * (last - first)
    return ids, mask


def _first_after(places: Places, first: int, at: int) -> int:
    """Index of the first token, from `first` on, that lies after character `at`.

    Byte-level tokenizers leave leading spaces out of a token's place. A token of spaces alone therefore has an empty
    place after the spaces, and belongs to the text before it.
    """
    return next((k for k in range(first, len(places)) if places[k][0] >= at and places[k][1] > at), len(places))


def _places(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase, where: str) -> Places:
    """Places of tokens in a text, from decoded pieces: for tokenizers without offsets (those with remote code)."""
    places: Places = []
    for at in range(len(ids)):
        piece = str(tokenizer.decode(ids[len(places) : at + 1]))
        start = places[-1][1] if places else 0
        if text.startswith(piece, start):  # otherwise these are only some of a character's bytes
            places += [(start, start + len(piece))] * (at + 1 - len(places))
    if len(places) < len(ids):
        raise RequestError(f"{where}: the tokenizer does not give the places of its tokens in a text; give input_ids")
    return places


def _end_of_turn(
    ids: list[int], first: int, said: int, last: int, ended: bool, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Move the end of a turn to directly after its end-of-turn token.

    The backbone never generates what the template writes after that token (a newline in ChatML). If only the answer was
    marked, the end-of-turn token comes next.
    """
    for at in range(said, last):
        if _is_special(ids[at], tokenizer):
            return at + 1
    end = last
    while end > first and _text(ids[end - 1], tokenizer).isspace():
        end -= 1
    if end > first and _is_special(ids[end - 1], tokenizer):
        return end
    return last + 1 if not ended and last < len(ids) and _is_special(ids[last], tokenizer) else last


def _cut_off(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Cut an unfinished conversation after its last answer: the template's end of turn was never generated."""
    end = len(mask) - mask[::-1].index(True)
    if _is_special(ids[end - 1], tokenizer):
        end -= 1
    return ids[:end], mask[:end]


def _is_special(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    return _text(token, tokenizer) != "" == str(tokenizer.decode([token], skip_special_tokens=True))


def _text(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([token]))
