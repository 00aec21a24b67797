"""Log-probabilities in the API equal those of transformers' own forward over the whole text."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from decode.serve.logprobs import LOWEST, PIECE, ScoredToken, chat_json, completion_json, scored
from decode.texts import TextGenerator
from medusa.backbone import Backbone
from medusa.loading import load_tokenizer
from tests.decode.serve.server_tools import PROMPTS, ask, choices_of, expected
from tests.helpers import random_ids, shared_model, weekly
from tests.train.templates import sentencepiece_tokenizer


def of_forward(model: Any, ids: list[int]) -> torch.Tensor:
    """The log-probabilities [T - 1, V] after each token but the last, by one forward of transformers."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", *weekly("mistral", "gpt2", "llama4_text")])
def test_scores_are_those_of_the_models_own_forward(family: str) -> None:
    """The text has three pieces, and the models include those that scale or cap their logits."""
    model, ids = shared_model(family, max_position_embeddings=1024), random_ids(2 * PIECE + 40)
    log_p = of_forward(model, ids)
    for start in (0, 1, PIECE, PIECE + 1, len(ids)):
        found = scored(Backbone(model), ids, start, 3)
        assert [token.id for token in found] == ids[start:]
        if start == 0:
            assert found[0][1:] == (None, [])
        for place, token in enumerate(found, start):
            if place:
                top = log_p[place - 1].topk(3)
                assert token.log_p == pytest.approx(float(log_p[place - 1, ids[place]]), abs=1e-4)
                assert [log for _, log in token.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_impossible_tokens_have_a_finite_score() -> None:
    model = shared_model()
    masked = Backbone(model)
    masked.splits, masked.head = True, copy.deepcopy(masked.head)
    masked.head.register_forward_hook(lambda head, args, out: out.index_fill(-1, torch.tensor([5]), -torch.inf))
    assert scored(masked, [1, 5], 1, 1)[0].log_p == LOWEST


def test_bytes_of_tokens_are_those_of_the_text() -> None:
    """Clients join them where a character has several tokens, each of which is no text."""
    tokenizer, text = load_tokenizer("demo"), "a café, 猫"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = [ScoredToken(token, -1.0, [(token, -1.0)]) for token in ids]
    content: Any = chat_json(tokens, tokenizer)["content"]
    assert any("\ufffd" in one["token"] for one in content)
    for found in (content, [one["top_logprobs"][0] for one in content]):
        assert bytes(itertools.chain.from_iterable(one["bytes"] for one in found)).decode() == text
    offsets: Any = completion_json(tokens, tokenizer, [1])["text_offset"]
    first = ids.index(tokenizer("猫", add_special_tokens=False)["input_ids"][-1])
    assert offsets[first] == text.index("猫") == max(offsets)


@pytest.mark.parametrize("before", [[], [1], None])
def test_tokens_stand_at_their_places_in_the_text(before: list[int] | None) -> None:
    """Also where ▁ stands for a space: a text of its own does not begin with one, and one that goes on does."""
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer("yes, hello no hello")["input_ids"][bool(before) :]
    before = ids if before is None else before
    text = tokenizer.decode([*before, *ids], skip_special_tokens=True)
    text = text[len(tokenizer.decode(before, skip_special_tokens=True)) :]
    found: Any = completion_json([ScoredToken(token, -1.0, []) for token in ids], tokenizer, before)
    shown = [pair for pair in zip(found["tokens"], found["text_offset"], strict=True) if pair[0] != "<s>"]
    assert any(token.startswith(" ") for token, _ in shown)
    for number, (token, place) in enumerate(shown):
        own = token if number or text.startswith(" ") else token.lstrip()
        assert text[place:].startswith(own), (token, place)


def test_completions_echo_and_score_the_prompt(url: str, generator: TextGenerator) -> None:
    """As lm-eval asks for the likelihood of a text: its prompts are ids, and one token more is written."""
    tokenizer = generator.tokenizer
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 2, "echo": True, "temperature": 0}
    status, answer = ask(url, "/v1/completions", body)
    assert status == 200, answer
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        log_p = of_forward(generator.model, prompt)
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(prompt) + 1
        assert "".join(found["tokens"]) == "<|endoftext|>" + choice["text"]
        assert found["text_offset"] == [0, 0, *itertools.accumulate(map(len, found["tokens"][1:-1]))]
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        own = log_p.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert found["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-4)
        for at, top in enumerate(found["top_logprobs"][1:-1]):
            assert max(top.values()) == pytest.approx(float(log_p[at].max()), abs=1e-4)
            assert found["token_logprobs"][at + 1] in top.values()
            assert 2 <= len(top) <= 3
        assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())  # the greedy token


def test_max_tokens_0_scores_the_prompt_and_writes_nothing(url: str) -> None:
    body = {"prompt": PROMPTS[0], "echo": True, "logprobs": 1}
    _, one = ask(url, "/v1/completions", body | {"max_tokens": 1})
    status, none = ask(url, "/v1/completions", body | {"max_tokens": 0})
    assert status == 200, none
    assert (none["choices"][0]["text"], none["choices"][0]["finish_reason"]) == (PROMPTS[0], "length")
    assert none["usage"]["completion_tokens"] == 0
    given, more = (answer["choices"][0]["logprobs"] for answer in (none, one))
    assert {name: values[:-1] for name, values in more.items()} == given


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_scores_of_new_tokens_ignore_the_temperature(url: str, generator: TextGenerator, temperature: float) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 8, "logprobs": True, "temperature": temperature, "seed": 3}
    _, answer = ask(url, "/v1/chat/completions", body | {"top_logprobs": 2})
    choice, tokenizer = answer["choices"][0], generator.tokenizer
    found = choice["logprobs"]["content"]
    assert len(found) == answer["usage"]["completion_tokens"] == 8
    assert "".join(one["token"] for one in found) == choice["message"]["content"]
    assert all(bytes(one["bytes"]).decode() == one["token"] and len(one["top_logprobs"]) == 2 for one in found)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = [*prompt, *tokenizer(choice["message"]["content"], add_special_tokens=False)["input_ids"]]
    log_p = of_forward(generator.model, ids)[len(prompt) - 1 :]
    assert len(log_p) == 8, "the text has other tokens when it is read again; choose another seed"
    own = log_p.gather(1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0].tolist()
    assert [one["logprob"] for one in found] == pytest.approx(own, abs=1e-4)
    assert (temperature == 0) == all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in found)


def test_a_stream_ends_with_the_scores(url: str, generator: TextGenerator) -> None:
    body = {"prompt": PROMPTS[:2], "max_tokens": 8, "logprobs": 0, "echo": True}
    _, whole = ask(url, "/v1/completions", body)
    _, text = ask(url, "/v1/completions", body | {"stream": True})
    for index in (0, 1):
        own = [choice for choice in choices_of(text) if choice["index"] == index]
        assert "".join(chunk["text"] for chunk in own) == PROMPTS[index] + expected(generator, PROMPTS[index])
        assert all(chunk["logprobs"] is None for chunk in own[:-1])
        assert own[-1]["logprobs"] == whole["choices"][index]["logprobs"]
