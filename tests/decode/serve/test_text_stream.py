"""The pieces of a stream are the whole text, for any tokens and stop strings, with byte and word tokenizers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa.loading import load_tokenizer
from medusa.records.pieces import TextPiece, TextStream, text_of

TEXT = "Häuser, 猫 and 👩‍👩‍👧: a story. The end? No! The end. 🐙"


@pytest.fixture(scope="module")
def demo() -> Any:
    """Byte-level: letters beyond ASCII are several tokens."""
    return load_tokenizer("demo")


def fast(model: Any, decoder: Any, **settings: Any) -> PreTrainedTokenizerFast:
    inner = Tokenizer(model)
    inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>", **settings)


def vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(["<unk>", "<s>", *tokens])}


def of_kind(kind: str) -> PreTrainedTokenizerFast:
    """A tiny tokenizer of a usual kind; most random sequences of its tokens are no text."""
    if kind == "SentencePiece":  # a space belongs to the word after it, and a text does not begin with a space
        words = models.WordLevel(vocabulary(["▁The", "▁end", ".", "▁", "s"]), unk_token="<unk>")
        return fast(words, decoders.Metaspace())
    if kind == "byte fallback":  # Llama-2, Mistral, Gemma
        found = [f"<0x{byte:02X}>" for byte in (0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xFF, 0x41)]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        return fast(models.BPE(vocabulary([*found, "▁", "▁the", "e", "猫"]), []), decoders.Sequence(steps))
    if kind.startswith("WordPiece"):  # BERT
        words = ["the", "do", "n", "t", "##t", "m", "s", "re", "ve", ".", ",", "?", "!", "'", "##s", "n't", "'s", "ab"]
        cleans = kind != "WordPiece"
        model = models.WordPiece(vocabulary(words), unk_token="<unk>")
        return fast(model, decoders.WordPiece(cleanup=cleans), clean_up_tokenization_spaces=cleans)
    tokens = [*"ÃâĤ¬©ÿaĠ", "Ġthe", "âĤ"]  # bytes as GPT-2 writes them
    return fast(models.BPE(vocabulary(tokens), []), decoders.ByteLevel())


def streamed(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = (), seed: int = 0) -> list[list[TextPiece]]:
    """In steps of random length."""
    rng, stream, out, rest = random.Random(seed), TextStream(tokenizer, stop), [], list(ids)
    while rest:
        length = rng.randint(1, 4)
        out.append(stream.step(rest[:length]))
        rest = rest[length:]
    return [*out, stream.end()]


def joined(steps: list[list[TextPiece]]) -> str:
    return "".join(piece.text for step in steps for piece in step)


@pytest.mark.parametrize("stop", [(), ("The end.",), ("猫",), ("end?", " No!"), ("nowhere", "The X")])
def test_pieces_are_the_text_before_the_stop_string(demo: Any, stop: tuple[str, ...]) -> None:
    ids = [*demo(TEXT)["input_ids"], demo.eos_token_id]
    for seed in range(4):
        assert joined(streamed(demo, ids, stop, seed)) == text_of(ids, demo, stop)


@pytest.mark.parametrize("kind", ["SentencePiece", "byte fallback", "byte level", "WordPiece", "WordPiece, clean-up"])
def test_pieces_of_random_tokens_are_the_whole_text(kind: str) -> None:
    """Also of tokens that are no text: invalid UTF-8, words in no order, special tokens between bytes."""
    tokenizer, rng = of_kind(kind), random.Random(0)
    for seed in range(150):
        ids = [rng.randrange(1, len(tokenizer)) for _ in range(rng.randint(1, 30))]
        stop = ("the",) if seed % 5 == 0 else ()
        assert joined(streamed(tokenizer, ids, stop, seed)) == text_of(ids, tokenizer, stop), ids


def test_pieces_come_before_the_end_of_a_text_with_clean_up() -> None:
    tokenizer = of_kind("WordPiece, clean-up")
    stream = TextStream(tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("the", "ab", "do", ".", "ab", "n", "'", "t", "the")]
    found = ["".join(piece.text for piece in stream.step([token])) for token in ids]
    assert found == ["", "the", " ab", "", " do.", " ab", "", "", "n't"]
    assert stream.end() == [TextPiece(" the", False, 8)]


def test_no_piece_ends_within_a_character(demo: Any) -> None:
    ids = demo(TEXT)["input_ids"]
    assert len(ids) > len(TEXT.split())
    for step in streamed(demo, ids):
        assert not any("\ufffd" in piece.text for piece in step)


def test_incomplete_characters_are_returned_at_the_end(demo: Any) -> None:
    ids = demo("猫")["input_ids"][:-1]
    stream = TextStream(demo)
    assert stream.step(ids) == []
    assert "".join(piece.text for piece in stream.end()) == text_of(ids, demo) != ""


def test_the_first_token_of_a_step_is_a_root_and_the_others_were_drafted(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    assert stream.step([1, 2, 3]) == [TextPiece("b", False), TextPiece("c", True), TextPiece("d", True)]
    assert stream.step([4]) == [TextPiece("e", False, 1)]


def test_a_possible_stop_string_is_held_back(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, stop=("def",))
    assert joined([stream.step([1, 2, 3])]) == "bc"  # the d waits
    assert joined([stream.step([4])]) == ""
    assert joined([stream.step([6])]) == "deg"  # it was no stop string
    assert joined([stream.step([3, 4, 5, 1])]) == ""
    assert stream.ended
    assert stream.step([1]) == stream.end() == []


def test_a_held_back_beginning_of_a_stop_string_is_returned_at_the_end(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, stop=("bcd",))
    assert stream.step([1, 2]) == []
    assert stream.end() == [TextPiece("b", False), TextPiece("c", True)]


def test_a_continued_text_keeps_its_leading_space() -> None:
    assert joined([TextStream(of_kind("SentencePiece")).step([3])]) == "end"
    assert joined([TextStream(of_kind("SentencePiece"), before=[1, 2]).step([3])]) == " end"


def test_a_continued_text_of_byte_tokens_has_whole_characters() -> None:
    """Bytes are decoded together, so the earlier ones must not begin within a character."""
    tokenizer = of_kind("byte fallback")
    euro = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    for count in range(1, 6):
        stream = TextStream(tokenizer, before=[1, *euro * count])
        assert joined([stream.step(euro), stream.step([tokenizer.convert_tokens_to_ids("▁the")])]) == "€ the"


@pytest.mark.parametrize("before", [[], [1], [2], [1, 2]])
def test_a_stop_string_may_begin_with_the_space_of_the_first_token(before: list[int]) -> None:
    """The space is not shown if nothing but special tokens precedes it."""
    tokenizer = of_kind("SentencePiece")
    assert joined([TextStream(tokenizer, (" end",), before).step([3, 3])]) == ""
