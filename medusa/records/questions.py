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

    def question(self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, ended: bool) -> str:
        """Return the question in the generated token `ids`; "" if it is empty, or did not end.

        A special token ends it, and so does the text after a question. `ended`: these ids ended by an EOS token."""
        special = {*tokenizer.all_special_ids, *_special_ids(tokenizer)}
        stop = next((place for place, number in enumerate(ids) if number in special), len(ids))
        text, mark, _ = str(tokenizer.decode(list(ids[:stop]))).partition(self.end)
        return text.strip() if ended or mark or stop < len(ids) else ""


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


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of added tokens that are marked as special, which `all_special_ids` need not have."""
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
