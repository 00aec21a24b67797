"""Texts that follow a grammar: masks of each path, and the texts of `model.generate` with the same processor."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, LogitsProcessorList, PreTrainedTokenizerFast

pytest.importorskip("llguidance", reason="needs the extra structured")
pytest.importorskip("jsonschema", reason="comes with the extra dev")

import jsonschema

from chat_families import byte_tokenizer
from decode import generate
from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.serve.batch import RunningBatch
from decode.strategies.grammar import Grammar, GrammarProcessor, Grammars, json_schema_source, lark_source
from decode.texts import stepper_for
from medusa.errors import RequestError
from medusa.loading import load_backbone
from medusa.records.pieces import text_of
from tests.helpers import LETTERS, left_padded, random_heads, random_ids, shared_model

END = LETTERS.index("8")
LETTERS_GRAMMAR = "start: /[a-c]{1,3}(x|yz)/"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "toys": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 2},
    },
    "required": ["name", "age", "toys"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def letters() -> Grammars:
    """Each token is one letter."""
    model = shared_model(eos_token_id=END)
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return Grammars(model, PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="8"))


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_backbone("demo")


@pytest.fixture(scope="module")
def demo_json(demo: Any) -> Grammar:
    return Grammars(demo.model, demo.tokenizer).compiled(json_schema_source(SCHEMA))


def test_a_mask_depends_only_on_the_text(letters: Grammars) -> None:
    """One processor that is asked about nodes of a tree in any order gives what a new one gives."""
    grammar = letters.compiled(lark_source(LETTERS_GRAMMAR))
    texts = ["", "a", "ab", "abc", "abcx", "abcx8", "abcy", "abcyz8", "b", "bx", "by", "byz", "cc", "ccy"]
    allowed = {
        "": "abc",
        "a": "abcxy",
        "abc": "xy",
        "abcx": "8",
        "abcx8": "8",
        "abcy": "z",
        "byz": "8",
        "abcyz8": "8",
        "ccy": "z",
        "aQ": "8",
        "Q": "8",
    }
    asked = random.Random(0).choices([*texts, "aQ", "Q"], k=300)
    processor = grammar.processor([5, 5])
    for text in asked:
        ids = torch.tensor([[5, 5, *map(LETTERS.index, text)]])
        scores = torch.randn(1, len(LETTERS))
        found, alone = processor(ids, scores), grammar.processor([5, 5])(ids, scores)
        assert torch.equal(found, alone)
        kept = found > -torch.inf
        assert torch.equal(found[kept], scores[kept])
        if text in allowed:
            assert {LETTERS[i] for i in kept[0].nonzero()[:, 0].tolist()} == set(allowed[text])


def test_a_grammar_begins_after_the_thought_that_the_prompt_opens(demo: Any, demo_json: Grammar) -> None:
    tokenizer, size = demo.tokenizer, demo_json.vocab_size
    prompt = tokenizer("Say it.<think>\n", add_special_tokens=False)["input_ids"]
    processor = demo_json.processor(prompt)
    begin, ends = demo_json.processor(prompt[:1]).allowed([]), set(demo_json.ends)
    assert 0 < int(begin.sum()) < 10
    for text, thinks in (("", True), ("{ hm <", True), ("hm</think>", False), ("hm", True), ("</think>", False)):
        allowed = processor.allowed(tokenizer(text, add_special_tokens=False)["input_ids"])
        if thinks:
            assert set((~allowed).nonzero()[:, 0].tolist()) == ends, text
        else:
            assert torch.equal(allowed, begin), text
    assert size == len(begin)


def test_a_tree_follows_a_grammar_that_begins_in_the_text(letters: Grammars) -> None:
    model, compiled = shared_model(eos_token_id=END), letters.compiled(lark_source(LETTERS_GRAMMAR))
    changed = 0
    for seed in range(3):
        prompt = random_ids(6, seed=seed)
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": END, "pad_token_id": END}
        free = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
        mark = LETTERS[free[len(prompt) + 3]]  # the text would write it anyway, and the grammar begins there

        def processors(mark: str = mark) -> LogitsProcessorList:
            return LogitsProcessorList([GrammarProcessor(compiled, 6, mark)])

        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=processors(), **options)
        heads = random_heads(model)
        assert torch.equal(
            generate(model, heads, ids, tree="topk:4,3,2", logits_processor=processors(), **options), wanted
        )
        changed += wanted[0].tolist() != free
    assert changed > 1


@pytest.mark.parametrize("drafter", [None, "lookahead"])
def test_a_free_text_and_texts_of_two_grammars_share_a_running_batch(letters: Grammars, drafter: str | None) -> None:
    """Texts join and leave at any step; greedy and sampled ones keep the texts that they have alone."""
    model = shared_model(eos_token_id=END)
    context = DrafterContext(model) if drafter else DrafterContext(model, random_heads(model), "topk:4,3,2")
    factory = drafter_factory(drafter, context)
    grammars = [letters.compiled(lark_source(text)) for text in (LETTERS_GRAMMAR, "start: /([a-d]{2}x)*[e-h]/")]
    asked, running, found = list(range(6)), dict[int, int](), dict[int, list[int]]()
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": END, "pad_token_id": END, "temperature": 1.2}

    def kwargs(number: int) -> dict[str, Any]:
        return options | {"do_sample": number % 2 == 1, "top_k": 0}

    batch = RunningBatch(lambda requests: stepper_for(model, factory, requests, AcceptanceRule("rejection")))
    while asked or running:
        if asked and len(running) < 3:
            number = asked.pop(0)
            grammar = None if number % 3 == 1 else grammars[number % 3 // 2]
            requests = prepare(model, [random_ids(3 + number)], [number], grammar, **kwargs(number))
            running[batch.join(requests)[0]] = number
        batch.step()
        for row in set(running) - set(batch.rows):
            found[running.pop(row)] = batch.sequences.new_ids[row]
    for number, text in found.items():
        prompt, processors = random_ids(3 + number), LogitsProcessorList()
        if number % 3 != 1:
            processors.append(grammars[number % 3 // 2].processor(prompt))
        ids = torch.tensor([prompt])
        torch.manual_seed(number)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=processors, **kwargs(number))
        assert text == out[0, len(prompt) :].tolist(), number
        assert len(text) == 12 or text[-1] == END
    assert {len(text) for text in found.values()} >= {12}


def test_drawn_drafts_follow_the_masked_distribution(letters: Grammars) -> None:
    """The judge walks down all texts of the grammar with the model's own forwards. With drafts that are not drawn, each
    text is that of `model.generate`, as the test above shows."""
    model = shared_model(eos_token_id=END)
    grammar = letters.compiled(lark_source("start: /[a-c]{1,2}(x|yz)/"))
    prompt, exact = random_ids(5, seed=1), {}

    def walk(text: str, p: float) -> None:
        if text.endswith(("x", "z")):
            exact[text] = p
            return
        count = len(text) if set(text) <= set("abc") else None
        fits = "z" if count is None else "abc" * (count < 2) + "xy" * (count > 0)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *map(LETTERS.index, text)]])).logits[0, -1]
        chosen = torch.tensor([LETTERS.index(letter) for letter in fits])
        for letter, share in zip(fits, logits[chosen].double().softmax(-1).tolist(), strict=True):
            walk(text + letter, p * share)

    walk("", 1.0)
    assert sum(exact.values()) == pytest.approx(1)
    draws = 250
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    options |= {"eos_token_id": END, "pad_token_id": END, "num_return_sequences": draws, "seeds": range(draws)}
    heads, inputs = random_heads(model), left_padded([prompt])
    out = generate(model, heads, **inputs, tree="topk:3,2,2", draft="sample", grammar=grammar, **options)
    found = Counter("".join(LETTERS[i] for i in row if i != END) for row in out[:, len(prompt) :].tolist())
    assert set(found) <= set(exact)
    likely = [text for text, p in exact.items() if p * draws >= 5]
    rest = 1 - sum(exact[text] for text in likely)
    seen, wanted = [found[text] for text in likely], [exact[text] * draws for text in likely]
    if rest * draws >= 1:
        seen, wanted = [*seen, draws - sum(seen)], [*wanted, rest * draws]
    assert chisquare(seen, wanted, sum_check=False).pvalue > 1e-3


@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (1.5, {"draft": "sample"}),
        (1.5, {"acceptance": "typical-sampled"}),
        (0.0, {"acceptance": "topk:4"}),
        (0.0, {"acceptance": "distance:9"}),
    ],
)
def test_json_is_always_valid(temperature: float, options: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    model = shared_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    rows = [tokenizer(text)["input_ids"] for text in ("A", "As JSON: ")]
    sampling = {"do_sample": True, "temperature": temperature, "seeds": range(2)} if temperature else {}
    out = generate(
        model,
        random_heads(model),
        **left_padded(rows, pad=tokenizer.eos_token_id),
        grammar=Grammars(model, tokenizer).compiled(json_schema_source(SCHEMA)),
        max_new_tokens=90,
        **sampling,
        **options,
    )
    width = max(map(len, rows))
    for row in out[:, width:].tolist():
        jsonschema.validate(json.loads(text_of(row, tokenizer)), SCHEMA)
        assert tokenizer.eos_token_id in row


def test_a_call_without_the_ends_of_a_grammar_is_refused(demo: Any, demo_json: Grammar) -> None:
    """Its text could not end, and wrote end tokens up to the limit."""
    for eos in (5, None):
        with pytest.raises(RequestError, match=f"a text of the grammar ends with 0, and eos_token_id is {eos}"):
            generate(demo.model, drafter="ngram", input_ids=torch.tensor([[5]]), grammar=demo_json, eos_token_id=eos)


def test_wrong_grammars_are_named(letters: Grammars) -> None:
    with pytest.raises(RequestError, match="the JSON schema is invalid: Invalid type: objekt"):
        json_schema_source({"type": "objekt"})
    with pytest.raises(RequestError, match="the JSON schema is invalid: Expecting object schema"):
        json_schema_source([1])
    with pytest.raises(RequestError, match=r'the grammar is invalid: .*unknown name: "foo"') as error:
        lark_source("start: foo")
    assert "\n" not in str(error.value)
    with pytest.raises(RequestError, match="only fast tokenizers, and this is a ByT5Tokenizer"):
        Grammars(shared_model(eos_token_id=END), ByT5Tokenizer())
    assert letters.compiled(lark_source(LETTERS_GRAMMAR)) is letters.compiled(lark_source(LETTERS_GRAMMAR))
