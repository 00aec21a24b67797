"""Questions that a chat model writes itself: where they begin and end in a chat template."""

from __future__ import annotations

import pytest

from chat_families import TEMPLATES, byte_tokenizer, family_tokenizer
from medusa.errors import RequestError
from medusa.records.questions import question_form
from medusa.records.record import tokens_of
from medusa.records.template import write

QUESTION = "What is 2 + 2?\nExplain: <b>why</b>, please."


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_question_in_the_template_is_found_again(family: str) -> None:
    """The template itself writes a question, of which every token is one that the model would have to write."""
    tokenizer = family_tokenizer(family)
    form = question_form(tokenizer, family)
    ids = tokens_of(write([{"role": "user", "content": QUESTION}], tokenizer), tokenizer)
    assert ids[: len(form.begin)] == form.begin
    written = ids[len(form.begin) :]
    assert form.question(written, tokenizer, ended=False) == QUESTION, "what follows it is cut off"
    length = next(length for length in range(len(written)) if QUESTION in str(tokenizer.decode(written[:length])))
    assert form.question(written[:length], tokenizer, ended=False) == "", "it was not written to its end"
    assert form.question(written[:length], tokenizer, ended=True) == QUESTION
    assert form.question(written[length:], tokenizer, ended=True) == "", "nothing stands before its end"


def test_a_question_ends_at_plain_text_or_at_a_token_that_only_the_vocabulary_calls_special() -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}USER: {{ m.content }} ASSISTANT:{% endfor %}")
    form = question_form(tokenizer, "it")
    assert (tokenizer.decode(form.begin), form.end) == ("USER:", "ASSISTANT:")
    assert form.question(tokens_of(" Why? ASSISTANT: So", tokenizer), tokenizer, ended=False) == "Why?"
    assert form.question(tokens_of(" Why?<|im_end|> So", tokenizer), tokenizer, ended=False) == "Why?"


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # nothing shows where a question begins
        "{% for m in messages %}<u>{{ m.content }}{% endfor %}",  # or where it ends
        "{% for m in messages %}<u>{{ m.content }}{{ m.content }}</u>{% endfor %}",
        "<u>a fixed text</u>",
    ],
)
def test_a_template_must_show_one_place_for_a_question(template: str | None) -> None:
    with pytest.raises(RequestError, match="give --prompts FILE"):
        question_form(byte_tokenizer(template), "it")
