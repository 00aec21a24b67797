"""Stop strings end a text where `StopStringCriteria` ends it, and are not shown, special tokens included."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

from chat_families import byte_tokenizer
from medusa.records.pieces import StopStrings, TextPiece, TextStream, TokenBytes, joined, text_of
from tests.helpers import FIRST_TRANSFORMERS, left_padded, weekly
from tests.train.templates import merging_tokenizer, sentencepiece_tokenizer

LINES = ["hello bye yes no", " def f():\n    return 1", "You are Qwen.", "\n\nsystem: a curious user\n"]
LINES += [] if FIRST_TRANSFORMERS else ["café, naïve 猫"]  # 5.17 matches letters, not bytes


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama-2's, where a newline is a token of one byte."""
    words = ["▁", *map(chr, range(0x21, 0x7F))]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: index for index, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


TOKENIZERS: list[Callable[[], Any]] = [
    byte_tokenizer,
    merging_tokenizer,
    sentencepiece_tokenizer,
    *weekly(byte_fallback_tokenizer),
]


@pytest.fixture(scope="module", params=TOKENIZERS, ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """With a special token that has no role, as the end of a turn often is, and one that is shown."""
    made = request.param()
    made.add_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<tool>", special=False)])
    return made


def drawn(tokenizer: Any, rng: random.Random) -> tuple[list[int], list[str]]:
    """Lines with special tokens between them, or sometimes random tokens; and stop strings, most of them from there."""
    ids, added = list[int](), [tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "</s>", "<tool>")]
    for _ in range(rng.randint(1, 4)):
        ids += tokenizer(rng.choice(LINES), add_special_tokens=False)["input_ids"]
        ids += rng.choices(added, k=rng.choice([0, 1, 1, 2]))
    if rng.random() < 0.2:
        ids = [rng.randrange(1, len(tokenizer)) for _ in range(20)]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    places = [rng.randrange(len(whole)) for _ in range(2)]
    strings = [whole[place : place + rng.randint(1, 12)] for place in places]
    strings.append(rng.choice(["<|im_end|>", "</s>", "<|im_end|>\n", "\n<|im_end|>", "yes", " "]))
    return ids, [string for string in strings if "\ufffd" not in string][-rng.randint(1, 2) :]


def named(tokenizer: Any, ids: list[int]) -> str:
    """The text with the names of special tokens, and with the space of its first word."""
    before = tokenizer("yes", add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode([*before, *ids], skip_special_tokens=False)
    return str(whole.removeprefix(tokenizer.decode(before)))


def without_names(tokenizer: Any, text: str, end: int) -> str:
    """The first `end` characters of a text, without those of special tokens."""
    names = [name for name, about in tokenizer.added_tokens_encoder.items() if name != "<tool>"]
    hidden = {at for found in re.finditer("|".join(map(re.escape, names)), text) for at in range(*found.span())}
    return "".join(letter for at, letter in enumerate(text[:end]) if at not in hidden)


def test_texts_end_where_transformers_ends_them_and_before_the_string(tokenizer: Any) -> None:
    rng, token_bytes, ended, inside = random.Random(0), TokenBytes(tokenizer), 0, 0
    for _ in range(100):
        ids, strings = drawn(tokenizer, rng)
        texts = left_padded([ids[:count] for count in range(1, len(ids) + 1)], pad=10**6)["input_ids"]
        expected = StopStringCriteria(tokenizer, strings)(texts, None).tolist()  # type: ignore[arg-type]
        assert StopStrings(token_bytes, strings, 0)(texts, None).tolist() == expected, (ids, strings)  # type: ignore[arg-type]
        if True not in expected:
            continue
        ids, ended = ids[: expected.index(True) + 1], ended + 1
        shown, text = text_of(ids, tokenizer, strings), named(tokenizer, ids)
        if "\ufffd" in text:  # an invalid byte hides all bytes beside it
            continue
        begin = min(text.index(string) for string in strings if string in text)
        assert shown.lstrip(" ") == without_names(tokenizer, text, begin).lstrip(" "), (ids, strings)
        assert str(tokenizer.decode(ids, skip_special_tokens=True)).startswith(shown), (ids, strings)
        inside += without_names(tokenizer, text, begin) != text[:begin]
        stream, pieces, rest = TextStream(tokenizer, strings), list[TextPiece](), list(ids)
        while rest:
            length = rng.randint(1, 4)
            pieces += stream.step(rest[:length])
            assert shown.startswith(joined(pieces)), (ids, strings)
            rest = rest[length:]
        assert joined([*pieces, *stream.end()]) == shown, (ids, strings)
    assert ended > 50
    assert inside > 5


def test_a_string_that_begins_in_the_prompt_does_not_count(tokenizer: Any) -> None:
    """It does for `StopStringCriteria`, but not in the OpenAI API."""
    prompt, new = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("hello", "yes"))
    text, string = torch.tensor([prompt + new]), named(tokenizer, prompt)[-1:] + named(tokenizer, new)
    assert StopStringCriteria(tokenizer, string)(text, None).all()  # type: ignore[arg-type]
    for start, ends in ((len(prompt) - 1, True), (len(prompt), False)):
        assert bool(StopStrings(TokenBytes(tokenizer), [string], start)(text, None)) == ends  # type: ignore[arg-type]
