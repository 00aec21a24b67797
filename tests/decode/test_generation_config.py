"""The options of a checkpoint's generation_config.json: every field of transformers' class, in every way to decode.

The table of cases is drawn from the class itself: a field that a later version adds fails the first test until it is in
a table of `decode.generation_config`, and has a value here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StaticCache, WatermarkingConfig
from transformers.generation import CompileConfig

from decode import generate, medusa_generate
from decode.bench.methods import Method, medusa_method, plain_method, transformers_method
from decode.generation_config import ABOUT, ASSISTED, COMPILED_TEXT, METHODS, PLAIN, SAMPLING, TEXT, TOKENS
from decode.settings import Settings
from decode.strategies.contrastive import Amateur
from medusa.errors import NotCompilableError, RequestError
from tests.helpers import LETTERS, plain, random_heads, random_ids, tiny_model

NEW = 7
PROMPT = random_ids(5, seed=30)  # some of whose tokens are in the text after it
ALL = vars(GenerationConfig())
TAKEN = [name for name in ALL if name in (*TEXT, *TOKENS)]  # by all ways to decode
REFUSED = [name for name in ALL if name in (*METHODS, "output_attentions", "output_hidden_states")]  # by Python
# Without an effect in Python: on the text, or unless another method is chosen.
REST = [name for name in ALL if name in (*PLAIN, *ASSISTED) and name not in REFUSED]
WEAK = {"remove_invalid_values", "renormalize_logits", "forced_bos_token_id"}
WEAK |= {"pad_token_id", "bos_token_id", "decoder_start_token_id"}
"""Options that change no text here: those of numbers that are not there, of one token as the prompt, and others."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def free(model: Any) -> list[int]:
    """The text without any option."""
    return plain(model, PROMPT, max_new_tokens=NEW)


def value_of(name: str, free: list[int]) -> dict[str, Any]:
    """Give a field a value that changes the text `free`, or what `model.generate` does, with the fields it needs."""
    late = {"eos_token_id": free[3]}  # an end, which some options move
    sampled = {"do_sample": True, "top_k": 3}
    values: dict[str, Any] = {
        "repetition_penalty": 3.0,
        "encoder_repetition_penalty": 0.2,
        "no_repeat_ngram_size": 1,
        "encoder_no_repeat_ngram_size": 1,
        "bad_words_ids": [[free[1]], [free[2], free[3]]],
        "suppress_tokens": [free[2]],
        "begin_suppress_tokens": [free[0]],
        "sequence_bias": [[[free[1]], -20.0]],
        "forced_bos_token_id": 7,
        "forced_eos_token_id": (free[-1] + 1) % 60,
        "min_new_tokens": 8,
        "min_length": len(PROMPT) + 7,
        "exponential_decay_length_penalty": [1, 9.0],
        "guidance_scale": 3.0,
        "watermarking_config": WatermarkingConfig(greenlist_ratio=0.25, bias=9.0, context_width=1),
        "remove_invalid_values": True,
        "renormalize_logits": True,
        "stop_strings": [LETTERS[free[4]]],
        "pad_token_id": 60,
        "eos_token_id": [free[5], free[3]],
        "num_return_sequences": 2,
        "max_length": len(PROMPT) + 4,
        "max_new_tokens": 4,
        "max_time": 1e-9,
        "do_sample": True,
        "temperature": 0.4,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.9,
        "top_h": 0.3,
        "typical_p": 0.3,
        "epsilon_cutoff": 0.3,
        "eta_cutoff": 0.3,
        "num_beams": 3,
        "constraints": [1],
        "force_words_ids": [[3]],
        "penalty_alpha": 0.6,
        "dola_layers": "high",
        "cache_implementation": "offloaded",
        "cache_config": {"backend": "quanto"},
        "compile_config": CompileConfig(),
        "use_cache": False,
        "speculation_type": "dflash",
        "num_assistant_tokens_schedule": "constant",
        "assistant_ensemble_weight": 0.5,
        "assistant_confidence_threshold": 0.3,
        "early_stopping": True,
        "length_penalty": 2.0,
        "diversity_penalty": 1.0,
    }
    needed: dict[str, Any] = {}
    if name in ("min_new_tokens", "min_length"):
        needed = late
    elif name == "exponential_decay_length_penalty":
        needed = {"eos_token_id": 9}
    elif name in SAMPLING:
        needed = sampled
    elif name == "num_return_sequences":
        needed = {"do_sample": True, "top_k": 1}  # all copies are greedy
    usual = True if name.startswith(("output_", "return_", "low_", "disable_", "token_", "use_", "is_")) else 2
    return needed | {name: values.get(name, usual)}


def with_options(model: Any, **options: Any) -> Any:
    """Give the model the generation config of a checkpoint with these options."""
    model.generation_config = GenerationConfig()
    for name, value in options.items():  # not by the class, which refuses some combinations
        setattr(model.generation_config, name, value)
    return model


def methods(model: Any, settings: Settings, tokenizer: Any) -> dict[str, Method]:
    return {
        "plain": plain_method(model, settings, tokenizer),
        "transformers": transformers_method(model, settings, tokenizer),
        "medusa": medusa_method(model, random_heads(model), settings, tokenizer, "topk:2,2"),
    }


def test_every_field_has_one_place() -> None:
    """A new field of transformers must be classified: does it change a text, the way to decode, the speed or a form?"""
    places = [*TEXT, *TOKENS, *SAMPLING, *ASSISTED, *PLAIN, *ABOUT]
    assert len(set(places)) == len(places)
    assert set(ALL) <= set(places), "later versions may have fewer"
    assert set(METHODS) <= set(PLAIN)


@pytest.mark.parametrize("name", TAKEN)
def test_methods_of_commands_take_what_decides_a_text(model: Any, free: list[int], tokenizer: Any, name: str) -> None:
    options = value_of(name, free)
    expected = plain(with_options(model, **options), PROMPT, max_new_tokens=NEW, tokenizer=tokenizer)
    assert (expected == free) == (name in WEAK), "without a change, the test has no power"
    for decode in methods(model, Settings(max_new_tokens=NEW), tokenizer).values():
        assert decode([PROMPT])[0].new_ids == expected


def test_methods_of_commands_decode_plainly_whatever_else_the_checkpoint_says(model: Any, free: list[int]) -> None:
    """All other options together change neither a text, nor what is returned, nor the work of the baseline."""
    options, read = dict[str, Any](), list[int]()
    for name in (*SAMPLING, *METHODS, *REST):
        options |= value_of(name, free)
    with_options(model, **options)
    for method, decode in methods(model, Settings(max_new_tokens=NEW), None).items():
        read.clear()
        hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
        (result,) = decode([PROMPT])
        hook.remove()
        assert result.new_ids == free
        assert all(isinstance(token, int) for token in result.new_ids)
        if method == "transformers":
            assert read == [len(PROMPT)] + [1] * (NEW - 1), "each token is read once, and one at a time"


def texts(decode: Any, *args: Any, **options: Any) -> tuple[type, list[list[int]]]:
    """What is returned, and the token ids in it, of a function like `model.generate`, with a seed."""
    torch.manual_seed(0)
    out = decode(*args, torch.tensor([PROMPT]), **options)
    return type(out), (out if isinstance(out, Tensor) else out.sequences).tolist()


@pytest.mark.parametrize("name", [*TAKEN, *SAMPLING, "max_length", "max_new_tokens", "max_time", "use_cache", "rest"])
def test_generate_takes_the_options_of_the_checkpoint(model: Any, free: list[int], tokenizer: Any, name: str) -> None:
    """As `model.generate` does. `rest`: options that change no text, at once."""
    cases = [one for one in REST if not one.startswith(("max_", "num_return", "use_"))] if name == "rest" else [name]
    with_options(model, **{key: value for one in cases for key, value in value_of(one, free).items()})
    given: dict[str, Any] = {"tokenizer": tokenizer}
    given |= {} if name in ("max_length", "max_new_tokens") else {"max_new_tokens": NEW}
    expected = texts(model.generate, **given)
    assert texts(generate, model, random_heads(model), tree="topk:2,2", **given) == expected


def test_generate_makes_the_copies_that_the_checkpoint_asks_for(model: Any, free: list[int]) -> None:
    with_options(model, **value_of("num_return_sequences", free))
    assert texts(generate, model, random_heads(model), max_new_tokens=NEW)[1] == [PROMPT + free] * 2


def test_generate_names_what_it_cannot_do_and_how_to_turn_it_off(model: Any, free: list[int]) -> None:
    heads = random_heads(with_options(model))
    for name in REFUSED:
        with_options(model, **value_of(name, free))
        told = f"generation_config.json of the model sets {name}=.*pass {name}={PLAIN[name]} to turn it off"
        with pytest.raises(RequestError, match=told):
            generate(model, heads, torch.tensor([PROMPT]), max_new_tokens=NEW)
    with_options(model, **{key: value for name in REFUSED for key, value in value_of(name, free).items()})
    off = {name: PLAIN[name] for name in REFUSED}
    assert texts(generate, model, heads, max_new_tokens=NEW, **off)[1] == [PROMPT + free]


@pytest.mark.parametrize("name", [name for name in TEXT if name not in COMPILED_TEXT])
def test_options_that_compiled_steps_cannot_apply_are_named(model: Any, free: list[int], name: str) -> None:
    options = value_of(name, free)
    own = with_options(model, **options).generation_config
    with pytest.raises(
        NotCompilableError, match=f"generation_config.json of the model sets {name}=.*ignore-generation"
    ):
        Settings(compile=True).of_checkpoint(own)
    assert Settings(compile=True, ignore_generation_config=True).of_checkpoint(own).stop == ()
    call: dict[str, Any] = {"max_new_tokens": NEW, "compile": True}
    with pytest.raises(RequestError, match=f"compile is not .* sets {name}=.*pass {name}={TEXT[name]}"):
        generate(model, random_heads(model), torch.tensor([PROMPT]), **call)
    with_options(model, **{other: value for other, value in options.items() if other != name})
    with pytest.raises(RequestError, match=r"compile cannot be combined with \w+, which reads the text"):
        generate(model, random_heads(model), torch.tensor([PROMPT]), **call, **{name: options[name]})


@pytest.mark.usefixtures("as_written")
def test_compiled_steps_end_at_the_stop_strings_of_the_checkpoint(model: Any, free: list[int], tokenizer: Any) -> None:
    with_options(model, **value_of("stop_strings", free))
    settings = Settings(max_new_tokens=NEW, compile=True)
    (result,) = methods(model, settings, tokenizer)["medusa"]([PROMPT])
    assert result.new_ids == free[:5]
    found: Any = generate(
        model, random_heads(model), torch.tensor([PROMPT]), max_new_tokens=NEW, compile=True, tokenizer=tokenizer
    )
    assert found.tolist() == [PROMPT + free[:5]]


@pytest.mark.usefixtures("as_written")
def test_compiled_steps_apply_the_penalty_of_the_checkpoint(model: Any, free: list[int], tokenizer: Any) -> None:
    with_options(model, repetition_penalty=3.0)
    expected, ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW), torch.tensor([PROMPT])
    assert expected.tolist() != [PROMPT + free]
    assert torch.equal(generate(model, random_heads(model), ids, max_new_tokens=NEW, compile=True), expected)
    (result,) = methods(model, Settings(max_new_tokens=NEW, compile=True), tokenizer)["medusa"]([PROMPT])
    assert PROMPT + result.new_ids == expected[0].tolist()


def test_what_the_user_says_comes_before_what_the_checkpoint_says(model: Any, free: list[int], tokenizer: Any) -> None:
    stops = {"stop_strings": [LETTERS[free[2]]], "repetition_penalty": 3.0, "suppress_tokens": [free[0]]}
    with_options(model, **stops)
    own = model.generation_config
    assert Settings().of_checkpoint(own).stop == (LETTERS[free[2]],)
    assert Settings().of_checkpoint(own).repetition_penalty == 3.0
    for settings, kept in (
        (Settings(max_new_tokens=NEW, ignore_generation_config=True), {}),
        (Settings(max_new_tokens=NEW, repetition_penalty=1.0, stop=()), {"suppress_tokens": [free[0]]}),
        (
            Settings(
                max_new_tokens=NEW, repetition_penalty=1.7, stop=(LETTERS[free[4]],), ignore_generation_config=True
            ),
            {"repetition_penalty": 1.7, "stop_strings": [LETTERS[free[4]]]},
        ),
    ):
        expected = plain(with_options(model, **kept), PROMPT, max_new_tokens=NEW, tokenizer=tokenizer)
        with_options(model, **stops)
        for decode in methods(model, settings, tokenizer).values():
            assert decode([PROMPT])[0].new_ids == expected


@pytest.mark.parametrize("other", ["static", "offloaded", "quantized", "offloaded_static", "paged"])
def test_another_cache_is_refused_in_every_door(model: Any, other: str) -> None:
    """It was ignored without a word."""
    heads, ids = random_heads(with_options(model)), torch.tensor([PROMPT])
    told = f"cache_implementation is '{other}'; decoding has KV caches of its own.*leave cache_implementation out"
    with pytest.raises(RequestError, match=told):
        generate(model, heads, ids, max_new_tokens=2, cache_implementation=other)
    if other == "static":  # transformers prepares the other ones before it calls the method, or needs a GPU
        with pytest.raises(RequestError, match=told):
            model.generate(
                ids, custom_generate=medusa_generate, medusa_heads=heads, max_new_tokens=2, cache_implementation=other
            )
    text = [PROMPT + plain(model, PROMPT, max_new_tokens=2)]
    for usual in ("dynamic", "hybrid", None):
        out: Any = generate(model, heads, ids, max_new_tokens=2, cache_implementation=usual)
        assert out.tolist() == text


def test_an_empty_cache_of_another_kind_is_refused(model: Any) -> None:
    heads, ids, config = random_heads(with_options(model)), torch.tensor([PROMPT]), model.config
    static = StaticCache(config=config, max_cache_len=40)
    with pytest.raises(RequestError, match="past_key_values is a StaticCache; decoding has a cache of its own"):
        generate(model, heads, ids, max_new_tokens=2, past_key_values=static)
    out: Any = generate(model, heads, ids, max_new_tokens=2, past_key_values=DynamicCache(config=config))
    assert out.tolist() == [PROMPT + plain(model, PROMPT, max_new_tokens=2)]


def test_stop_strings_of_the_checkpoint_need_a_tokenizer(model: Any, tokenizer: Any, free: list[int]) -> None:
    with_options(model, stop_strings=[LETTERS[free[2]]])
    ids = torch.tensor([PROMPT])
    told = "generation_config.json of the model sets stop_strings.*pass tokenizer=..., or pass stop_strings=None"
    with pytest.raises(RequestError, match=told):
        generate(model, random_heads(model), ids, max_new_tokens=NEW)
    out: Any = generate(model, random_heads(model), ids, max_new_tokens=NEW, stop_strings=None)
    assert out.tolist() == [PROMPT + free]
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        transformers_method(model, Settings())


def test_options_of_the_checkpoint_follow_a_contrast(model: Any, tokenizer: Any) -> None:
    """In `model.generate` they would come before it, and a suppressed token would change what is plausible."""
    settings = Settings(max_new_tokens=NEW, amateur=Amateur(tiny_model("llama", seed=1, num_hidden_layers=1)))
    alone = plain_method(with_options(model), settings, tokenizer)([PROMPT])[0].new_ids
    with_options(model, suppress_tokens=alone[:1], repetition_penalty=1.5, stop_strings=[LETTERS[alone[6]]])
    texts = {name: decode([PROMPT])[0].new_ids for name, decode in methods(model, settings, tokenizer).items()}
    assert texts == dict.fromkeys(texts, texts["plain"])
    assert texts["plain"][0] != alone[0]


def test_the_line_of_what_commands_do_not_use() -> None:
    own = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, num_beams=4)
    line = "options of generation_config.json that are not used: do_sample=True, temperature=0.7, top_k=20, top_p=0.8"
    flags = " (to sample, type --temperature 0.7 --top-k 20 --top-p 0.8)"
    assert Settings().unused_line(own) == f"{line}, num_beams=4{flags}"
    assert Settings().unused_line(own, samples=False) == line.partition(" do_sample")[0] + " num_beams=4"
    same = Settings(temperature=0.7, top_k=20, top_p=0.8)
    assert same.unused_line(own) == line.partition(" do_sample")[0] + " num_beams=4"
    assert "--temperature 1 --top-k 50)" in Settings().unused_line(GenerationConfig(do_sample=True))
    quiet = GenerationConfig(temperature=0.6, top_p=0.9, use_cache=False, max_length=99, eos_token_id=2, min_length=3)
    assert Settings().unused_line(quiet) == "", "it is greedy itself, and the rest is applied or changes no text"


def test_a_generate_from_the_code_of_a_checkpoint_is_no_baseline(
    model: Any, free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers replaces the method `generate` of such a model, if remote code is trusted."""
    with_options(model)
    monkeypatch.setattr(model, "generate", lambda *args, **kwargs: pytest.fail("this is another method"))
    for decode in methods(model, Settings(max_new_tokens=NEW), None).values():
        assert decode([PROMPT])[0].new_ids == free
