"""Questions that a chat model writes itself, after the text that precedes a user's question in its chat template.

Chat models are trained on conversations, so one that is given the beginning of a user's message goes on with a question
(Magpie: Xu et al., 2024, arXiv 2406.08464)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa.errors import RequestError
from medusa.records.record import tokens_of
from medusa.records.template import PROBE, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class QuestionForm(NamedTuple):
    """Where a question begins and ends in a chat template."""

    begin: list[int]  # the token ids before it
    end: str  # the first line of the text after it

    def question(
        self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, ended: bool, stop: Sequence[str] = ()
    ) -> str:
        """Return the question in the generated token `ids`; "" if it is empty, or did not end.

        A special token ends it, and so does the text after a question, or a string of `stop`. `ended`: the ids end by
        an EOS token or a stop string, and not at a number of tokens."""
        from medusa.records.pieces import special_ids  # which imports torch

        special = special_ids(tokenizer)
        length = next((place for place, number in enumerate(ids) if number in special), len(ids))
        text = str(tokenizer.decode(list(ids[:length])))
        ends = [place for mark in (self.end, *stop) if (place := text.find(mark)) >= 0]
        return text[: min(ends, default=None)].strip() if ended or ends or length < len(ids) else ""


def question_form(
    tokenizer: PreTrainedTokenizerBase | None, backbone: str, options: Mapping[str, Any] | None = None
) -> QuestionForm:
    """Find where the chat template of `backbone`, with its `options`, puts a question.

    Raise RequestError if there is no chat template, or if it does not show the question as it is, once."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise RequestError(f"--questions needs a chat template, and {backbone} has none; give --prompts FILE")
    text = write([{"role": "user", "content": PROBE}], tokenizer, options=options)
    before, *after = text.split(PROBE)
    if len(after) != 1 or not before.strip() or not after[0].strip():
        raise RequestError(
            f"the chat template of {backbone} does not show where a question begins and ends; give --prompts FILE"
        )
    # A space before a word is part of the word's token.
    return QuestionForm(tokens_of(before.rstrip(" "), tokenizer), after[0].strip().splitlines()[0])
