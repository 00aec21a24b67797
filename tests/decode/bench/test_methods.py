"""The methods that a benchmark compares: the content of their results, and that all write the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.bench.measure import log_likelihood
from decode.bench.methods import left_padded, medusa_method, plain_method, transformers_method
from decode.settings import Settings
from decode.texts import Result, tau
from medusa import MedusaConfig, MedusaHeads
from medusa.backbone import Backbone
from tests.helpers import HIDDEN, VOCAB, plain, random_heads, random_ids, tiny_model

PROMPTS = [random_ids(length, seed=length) for length in (5, 2, 9)]


def methods(model: Any, settings: Settings, tokenizer: Any = None) -> dict[str, Any]:
    return {
        "plain": plain_method(model, settings, tokenizer),
        "transformers": transformers_method(model, settings, tokenizer),
        "medusa": medusa_method(model, random_heads(model), settings, tokenizer, "topk:2,2"),
    }


NAMES = ["plain", "transformers", "medusa"]


def test_padding_is_on_the_left_and_masked() -> None:
    padded = left_padded([[7, 0], [5, 6, 7]], torch.device("cpu"))
    assert padded["input_ids"].tolist() == [[0, 7, 0], [5, 6, 7]]
    assert padded["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("name", NAMES)
def test_every_method_writes_the_backbones_text_with_and_without_a_batch(llama: Any, name: str) -> None:
    method = methods(llama, Settings(max_new_tokens=10))[name]
    together, alone = method(PROMPTS, None), [method([prompt], None)[0] for prompt in PROMPTS]
    for result, single, prompt in zip(together, alone, PROMPTS, strict=True):
        assert result.input_ids == prompt
        assert result.new_ids == single.new_ids == plain(llama, prompt, max_new_tokens=10)
        assert sum(result.step_lengths) == len(result.new_ids)
        assert len(result.step_lengths) == len(result.uncut_lengths)
        assert all(cut <= whole for cut, whole in zip(result.step_lengths, result.uncut_lengths, strict=True))
        assert result.finish_reason == "length"
        assert result.seconds > 0
        assert result.hidden is None, "nobody asked for the states"


@pytest.mark.parametrize("name", ["plain", "medusa"])
def test_each_step_calls_on_step(llama: Any, name: str) -> None:
    heard: dict[int, list[int]] = {}
    results = methods(llama, Settings(max_new_tokens=10))[name](
        PROMPTS, lambda row, ids: heard.setdefault(row, []).extend(ids)
    )
    assert heard == {row: result.new_ids for row, result in enumerate(results)}


# gemma2 scales and caps: it runs whole, with a hook
@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.8), ("gemma2", 0.0)])
@pytest.mark.parametrize("name", ["plain", "medusa"])
def test_kept_hidden_states_equal_those_of_a_forward_over_the_text(family: str, temperature: float, name: str) -> None:
    """The tolerance is rounding: float32, sums of some dozen terms in another order (1e-6), times a few layers."""
    model = tiny_model(family)
    heads, settings = random_heads(model), Settings(max_new_tokens=10, temperature=temperature)
    decode = (
        plain_method(model, settings, keep_hidden=True)
        if name == "plain"
        else medusa_method(model, heads, settings, None, "topk:2,2", keep_hidden=True)
    )
    for result in decode(PROMPTS, None, [3, 4, 5]):
        ids = result.input_ids + result.new_ids
        fresh = Backbone(model).hidden_states(torch.tensor([ids]), use_cache=False)[0]
        assert result.hidden is not None
        assert len(ids) - 1 <= len(result.hidden) <= len(ids), "a last root needs no forward"
        torch.testing.assert_close(result.hidden, fresh[: len(result.hidden)], atol=1e-5, rtol=1e-5)


def test_the_last_step_is_cut_in_the_text_and_counts_fully_in_tau() -> None:
    """A backbone that repeats one token, and heads that always guess this token: every step gives four tokens."""
    model = tiny_model("llama")
    model.model.embed_tokens.weight.data[:] = model.model.embed_tokens.weight.data[
        0
    ]  # all tokens have the same embedding
    heads = MedusaHeads(MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=3, lm_head="shared"))
    decode = medusa_method(model, heads, Settings(max_new_tokens=6), tree="chain", keep_hidden=True)
    (result,) = decode([[1, 2, 3]], None)
    assert len(set(result.new_ids)) == 1
    assert (result.step_lengths, result.uncut_lengths) == ([4, 2], [4, 4])
    assert result.hidden is not None
    assert len(result.hidden) == 3 + 6, "the states of tokens after the cut are not part of the text"
    assert tau([result]) == 4.0


@pytest.fixture
def ending(llama: Any) -> Any:
    """A copy of the backbone for which the sixth token that it writes after the first prompt is EOS."""
    model = tiny_model("llama")
    model.load_state_dict(llama.state_dict())
    text = plain(llama, PROMPTS[0], max_new_tokens=6)
    model.generation_config.eos_token_id = [text[5]]
    model.generation_config.pad_token_id = text[5]
    return model


@pytest.mark.parametrize("name", NAMES)
def test_eos_ends_a_text_and_is_its_last_token(llama: Any, ending: Any, name: str) -> None:
    (eos,) = ending.generation_config.eos_token_id
    results = methods(ending, Settings(max_new_tokens=12))[name](PROMPTS, None)
    for result, prompt in zip(results, PROMPTS, strict=True):
        whole = plain(llama, prompt, max_new_tokens=12)
        expected = whole[: whole.index(eos) + 1] if eos in whole else whole
        assert result.new_ids == expected
        assert result.finish_reason == ("eos" if eos in whole else "length")
    assert results[0].finish_reason == "eos"


@pytest.mark.parametrize("name", NAMES)
def test_eos_can_be_ignored(llama: Any, ending: Any, name: str) -> None:
    result = methods(ending, Settings(max_new_tokens=12, ignore_eos=True))[name](PROMPTS[:1], None)[0]
    assert result.new_ids == plain(llama, PROMPTS[0], max_new_tokens=12)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "with_eos"), [(1, False), (3, True)], ids=["alone, no EOS", "batch, EOS"])
def test_a_stop_string_ends_a_text_also_in_a_batch(
    llama: Any, tokenizer: Any, name: str, batch: int, with_eos: bool
) -> None:
    """`generate` continues rows that stop early in a batch; their texts end at the stop string."""
    wholes = [plain(llama, prompt, max_new_tokens=12) for prompt in PROMPTS]
    stop = tokenizer.decode(wholes[0][3:5])
    model = tiny_model("llama")
    model.load_state_dict(llama.state_dict())
    if with_eos:
        unused = next(token for token in range(60, 0, -1) if not any(token in whole for whole in wholes))
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = unused
    results = methods(model, Settings(max_new_tokens=12, stop=(stop,)), tokenizer)[name](PROMPTS[:batch], None)
    for result, whole in zip(results, wholes, strict=False):
        text = tokenizer.decode(whole)
        end = text.index(stop) + len(stop) if stop in text else len(text)  # a token is a letter
        assert result.new_ids == whole[:end]
        assert result.finish_reason == ("stop" if end < 12 else result.finish_reason)
    assert results[0].finish_reason == "stop"


@pytest.mark.parametrize("name", NAMES)
def test_texts_end_at_the_end_of_the_context(name: str) -> None:
    """Each for itself in a batch; a prompt that fills the context gets no tokens."""
    model = tiny_model("llama", max_position_embeddings=20)
    prompts = [random_ids(17, seed=1), random_ids(12, seed=2), random_ids(20)]
    for result, prompt in zip(methods(model, Settings(max_new_tokens=30))[name](prompts, None), prompts, strict=True):
        left = 20 - len(prompt)
        assert result.new_ids == (plain(model, prompt, max_new_tokens=left) if left else [])
        assert result.finish_reason == "length"
        assert sum(result.step_lengths) == left


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
@torch.no_grad()
def test_the_likelihood_of_a_text_is_that_of_the_whole_model(family: str) -> None:
    """Gemma 2 caps its LM head's logits, and the others scale them."""
    more = {"gemma2": {"final_logit_softcapping": 3.0}, "granite": {"logits_scaling": 8.0}}
    model, results = tiny_model(family, **more.get(family, {})), [Result(ids) for ids in PROMPTS]
    for result, length in zip(results, (70, 0, 3), strict=True):
        result.new_ids = random_ids(length, seed=7)
    found, each = log_likelihood(Backbone(model), results, 0.7), []
    for result in results:
        log_p = (model(torch.tensor([result.input_ids + result.new_ids])).logits[0] / 0.7).log_softmax(-1)
        each += [log_p[len(result.input_ids) + n - 1, token] for n, token in enumerate(result.new_ids)]
    assert found == pytest.approx(float(torch.stack(each).mean()), abs=1e-5)
