"""Which tokens of a conversation are the assistant's: what it says and the end of its turn, and nothing else.

The answer is looked for in the text that the chat template writes, and then carried over to tokens:

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
                                                          |-----taught----|

1. Where the template marks the assistant's words itself ({% generation %}), those are taken.
2. Else the template is asked for the conversation up to and after the turn: what the second has more is the turn.
3. Templates that write a turn otherwise once others follow (they drop its thinking) are asked for the conversation with
   another answer in that place: what both have in common is not the turn.
Where none of these is certain the conversation is refused; a guess would teach the user's words.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from medusa.errors import RequestError
from medusa.records import Record, refusal

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
STRANGERS = [chr(code) for code in range(0xE000, 0xE010)]  # private-use letters: no text holds all of them

Messages = list[dict[str, Any]]


class Span(NamedTuple):
    """Where the assistant speaks, in characters."""

    start: int
    said: int
    """Where its words end, as far as that is known: behind them its turn ends with the first special token."""
    end: int
    ended: bool
    """Whether such a token must come before `end`, or may stand right behind it."""


def conversation(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Ids [T] of a conversation as the tokenizer's template writes it, and which of them are taught [T].

    Raises:
        RequestError: no chat template, one that refuses the messages, or one whose turns cannot be told apart.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            f"{record.where}: a conversation needs a chat template, and this tokenizer has none; train on text, or put "
            "the model's chat_template.jinja beside its tokenizer"
        )
    rendered = _Rendered(record, tokenizer)
    spans = rendered.spans()
    ids, mask = _to_tokens(rendered.text, spans, tokenizer, record.where)
    if spans and not any(mask):
        raise RequestError(f"{record.where}: the chat template writes nothing of what the assistant says; use another")
    return _cut_off(ids, mask, tokenizer) if record.unfinished and spans else (ids, mask)


class _Rendered:
    """A conversation as text, and where in it the assistant speaks."""

    def __init__(self, record: Record, tokenizer: PreTrainedTokenizerBase) -> None:
        self.record, self.tokenizer = record, tokenizer
        self.messages: Messages = record.messages or []
        try:
            self.template = tokenizer.get_chat_template(None, record.tools)
            self.text = self._render(self.messages)
        except Exception as error:  # templates are programs: they raise what they like, and it is about this record
            raise refusal(record, error) from None

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=self.record.tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def spans(self) -> list[Span]:
        """Where the assistant speaks, in order."""
        turns = [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"]
        if self.record.teach_last:
            turns = turns[-1:]
        elif turns and (tagged := self._tagged(len(turns))):
            return tagged
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: int) -> Span:
        whole, words = self._by_difference(turn), self._by_exchange(turn)
        if whole and words:
            start = whole[0]
            if "add_generation_prompt" not in self.template:
                # Nothing tells the turn's header from its words but the words; a space between belongs to them.
                start = max(start, len(self.text[: words[0]].rstrip(" ")))
            return Span(start, words[1], whole[1], ended=True)
        if found := whole or words:
            return Span(found[0], said=found[1], end=found[1], ended=found is whole)
        raise RequestError(
            f"{self.record.where}: the chat template writes message {turn + 1} otherwise when others follow, and what "
            "the assistant says in it cannot be told apart; mark it in the template with {% generation %}, or end the "
            "conversation there"
        )

    def _tagged(self, turns: int) -> list[Span] | None:
        if not GENERATION.search(self.template):
            return None
        messages = [{key: value for key, value in m.items() if value is not None} for m in self.messages]
        # Not `apply_chat_template(return_assistant_tokens_mask=True)`: where a marked text ends in a space that belongs
        # to no token's offsets, its mask runs on to the end of the conversation.
        told: dict[str, Any] = {"tools": self.record.tools, **self.tokenizer.special_tokens_map}
        texts, spans = cast(
            tuple[list[str], list[list[tuple[int, int]]]],
            render_jinja_template([messages], chat_template=self.template, return_assistant_tokens_mask=True, **told),
        )
        found = [Span(start, end, end, ended=False) for start, end in spans[0] if start < end]
        return found if texts[0] == self.text and len(found) >= turns else None

    def _by_difference(self, turn: int) -> tuple[int, int] | None:
        try:
            before = self._render(self.messages[:turn], add_generation_prompt=True)
            after = self._render(self.messages[: turn + 1])
        except Exception:  # a template may refuse a part of a conversation whose whole it takes: this way is closed
            return None
        holds = self.text.startswith(after) and after.startswith(before)
        return (len(before), len(after)) if holds else None

    def _by_exchange(self, turn: int) -> tuple[int, int] | None:
        stranger = next(letter for letter in STRANGERS if letter not in self.text)
        other = {"role": "assistant", "content": stranger}
        try:
            head, *tail = self._render([*self.messages[:turn], other, *self.messages[turn + 1 :]]).split(stranger)
        except Exception:  # as above
            return None
        if len(tail) != 1 or not (self.text.startswith(head) and self.text.endswith(tail[0])):
            return None
        start, end = len(head), len(self.text) - len(tail[0])
        return (start, end) if start <= end else None


def _to_tokens(
    text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[bool]]:
    """Ids, and as taught the tokens that hold a character of a span, up to the token that ends its turn."""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids: list[int] = encoded["input_ids"]
    places = encoded["offset_mapping"] if tokenizer.is_fast else _places(ids, text, tokenizer, where)
    mask = [False] * len(ids)
    for span in spans:
        first = next((at for at, (_, end) in enumerate(places) if end > span.start), len(ids))
        said, last = (_first_behind(places, first, at) for at in (span.said, span.end))
        last = _end_of_turn(ids, first, said, last, span.ended, tokenizer)
        mask[first:last] = [True] * (last - first)
    return ids, mask


def _first_behind(places: list[tuple[int, int]], first: int, at: int) -> int:
    """The first token, from `first`, that lies behind character `at`.

    Byte-level tokenizers leave leading spaces out of a token's place, so one of spaces alone has an empty place that
    stands behind them: such a token belongs to what it ends with.
    """
    return next((k for k in range(first, len(places)) if places[k][0] >= at and places[k][1] > at), len(places))


def _places(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase, where: str) -> list[tuple[int, int]]:
    """Where tokens lie in `text`, from their own texts: for tokenizers that do not say (those with remote code)."""
    places: list[tuple[int, int]] = []
    for at in range(len(ids)):
        piece = str(tokenizer.decode(ids[len(places) : at + 1]))
        start = places[-1][1] if places else 0
        if text.startswith(piece, start):  # else these are but some of the bytes of a letter
            places += [(start, start + len(piece))] * (at + 1 - len(places))
    if len(places) < len(ids):
        raise RequestError(f"{where}: the tokenizer does not say where in a text its tokens lie; give input_ids")
    return places


def _end_of_turn(
    ids: list[int], first: int, said: int, last: int, ended: bool, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Move the end of a turn to just behind its end token.

    What the template writes after that token (ChatML: a newline) the backbone never says: its turn is over. And where
    only the answer itself was marked, the token that ends it comes next.
    """
    for at in range(said, last):
        if _is_special(ids[at], tokenizer):
            return at + 1
    behind = last
    while behind > first and _text(ids[behind - 1], tokenizer).isspace():
        behind -= 1
    if behind > first and _is_special(ids[behind - 1], tokenizer):
        return behind
    return last + 1 if not ended and last < len(ids) and _is_special(ids[last], tokenizer) else last


def _cut_off(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """A conversation whose last answer was cut off ends with it: the template's end of turn was never said."""
    end = len(mask) - mask[::-1].index(True)
    if _is_special(ids[end - 1], tokenizer):
        end -= 1
    return ids[:end], mask[:end]


def _is_special(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    return _text(token, tokenizer) != "" == _text(token, tokenizer, skip_special_tokens=True)


def _text(token: int, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> str:
    return str(tokenizer.decode([token], **kwargs))
