"""The places of the assistant's turns in the text that a chat template writes for a conversation.

A turn is what the assistant says, up to and including the token that ends the turn. Three methods find it:

1. The template may mark what the assistant says, with {% generation %}. The marks are then used.
2. Otherwise the template writes the conversation up to the turn's start, and up to its end. The turn is the difference.
3. Some templates write a turn differently if others follow, for example without its reasoning. For these, the
   conversation is written again with another answer in this turn. The part of the text that changes is the answer.

If no method is certain, the conversation is refused, because the user's tokens could otherwise count in the loss."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from medusa.errors import RequestError
from medusa.records.record import Record, template_error

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Span(NamedTuple):
    """The place of an assistant's turn in the text, in characters, and whether it includes the end-of-turn token."""

    start: int  # of the turn
    answer_end: int  # end of the answer; the same as `end` if it is not known
    end: int  # of the turn; the first special token from `answer_end` to `end`, if any, is the end-of-turn token
    ended: bool  # True: the end-of-turn token, if any, lies before `end`; False: it lies there or directly after `end`


class ConversationText:
    """The text of a conversation, as the tokenizer's chat template writes it."""

    def __init__(self, record: Record, tokenizer: PreTrainedTokenizerBase) -> None:
        self.record, self.tokenizer, self.messages = record, tokenizer, record.messages or []
        try:
            self.template = tokenizer.get_chat_template(None, record.tools)
            self.text = self._write(self.messages)
        except Exception as error:  # a template is a program and may raise any exception
            raise template_error(record, error) from None

    def _write(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        settings: Any = {"tools": self.record.tools, "tokenize": False, "add_generation_prompt": prompt}
        return str(self.tokenizer.apply_chat_template(messages, **settings))

    def spans(self) -> list[Span]:
        """Find the assistant's turns that count in the loss, in order; raise RequestError if one cannot be located."""
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
                # Only the answer shows where the turn's header ends. A space between them counts as part of the answer.
                start = max(start, len(self.text[: answer[0]].rstrip(" ")))
            return Span(start, answer[1], whole[1], ended=True)
        if found := whole or answer:
            return Span(found[0], answer_end=found[1], end=found[1], ended=found is whole)
        changed = f"the chat template writes message {turn + 1} differently if others follow, which hides its answer"
        way_out = "mark answers in the template with {% generation %}, or end the conversation there"
        raise RequestError(f"{self.record.where}: {changed}; {way_out}")

    def _marked(self, turns: int) -> list[Span] | None:
        """Find the assistant's `turns` turns by the template's {% generation %} marks; `None` if marks are missing."""
        if not GENERATION.search(self.template):
            return None
        messages = [{key: value for key, value in m.items() if value is not None} for m in self.messages]
        # `apply_chat_template(return_assistant_tokens_mask=True)` fails if a marked text ends in a space outside all
        # tokens' offsets: its mask then extends to the end of the conversation.
        given: Any = {"tools": self.record.tools, **self.tokenizer.special_tokens_map}
        given |= {"chat_template": self.template, "return_assistant_tokens_mask": True}
        texts, places = cast(tuple[list[str], list[list[tuple[int, int]]]], render_jinja_template([messages], **given))
        found = [Span(start, end, end, ended=False) for start, end in places[0] if start < end]
        return found if texts[0] == self.text and len(found) >= turns else None

    def _by_difference(self, turn: int) -> tuple[int, int] | None:
        """Find start and end of message `turn`: the text of the messages before it ends where it starts.

        Return the lengths of the texts without and with it; `None` unless each is the start of the next longer text."""
        try:
            before = self._write(self.messages[:turn], prompt=True)
            after = self._write(self.messages[: turn + 1])
        except Exception:  # a template may reject a part of a conversation that it accepts as a whole
            return None
        holds = self.text.startswith(after) and after.startswith(before)
        return (len(before), len(after)) if holds else None

    def _by_exchange(self, turn: int) -> tuple[int, int] | None:
        """Find start and end of the answer in message `turn` by changing it; `None` if other text changes."""
        other = next(c for c in map(chr, range(0xE000, 0xE010)) if c not in self.text)  # a private-use character
        exchanged = [*self.messages[:turn], {"role": "assistant", "content": other}, *self.messages[turn + 1 :]]
        try:
            head, *tail = self._write(exchanged).split(other)
        except Exception:  # a template may reject the other answer
            return None
        if len(tail) != 1 or not (self.text.startswith(head) and self.text.endswith(tail[0])):
            return None
        start, end = len(head), len(self.text) - len(tail[0])
        return (start, end) if start <= end else None
