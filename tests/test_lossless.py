"""Tree decoding writes the text of `model.generate`, token for token, in the expected number of steps.

Drafts come from random heads, or from a `ScriptedDrafter` with a scripted number of correct tokens. So the tests reach
every branch of the loop without trained weights.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import GenerationConfig, StoppingCriteriaList

from decode import generate, request, steps
from decode.bench.methods import plain_method
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.settings import Settings
from decode.texts import Decoding, stepper_for
from medusa import Tree
from tests.helpers import (
    FAMILIES,
    LETTERS,
    VOCAB,
    ScriptedDrafter,
    decode_with,
    left_padded,
    plain,
    random_heads,
    random_ids,
    random_tree,
    shared_model,
    tiny_model,
    weekly,
)

TREES = {
    "random": random_tree(15, seed=1),
    "chain": Tree.chain(4),
    "wide": Tree.top_k([20, 2]),
    "deep": Tree.from_paths([[0] * d for d in range(1, 6)] + [[0] * d + [1] for d in range(5)]),
    "root alone": Tree.chain(0),
}
NEW = 16
PROMPTS = [random_ids(9, seed=1), random_ids(4, seed=2), random_ids(6, seed=3)]


def scripted(
    model: Any, prompt: list[int], tree: Tree, script: Any, new: int = NEW, seed: int = 0, **kwargs: Any
) -> tuple[Any, list[Any], list[int]]:
    """Decode one prompt with a drafter built from the plain text; returns session, steps and the plain text."""
    text = plain(model, prompt, max_new_tokens=new, **kwargs)
    drafter = ScriptedDrafter(tree, [text], script, seed=seed)
    session, taken = decode_with(model, drafter, [prompt], max_new_tokens=new, **{"do_sample": False} | kwargs)
    return session, taken, text


def ids_of(taken: list[Any], row: int = 0) -> list[int]:
    return [token for step in taken for token in step.ids.get(row, [])]


# Greedy


# float64 excludes rounding.
@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        *((family, "random", torch.float32) for family in FAMILIES),
        *((family, name, torch.float32) for family in ("llama", "gemma3_text") for name in TREES if name != "random"),
        *((family, "random", torch.float64) for family in ("llama", "gpt2")),
    ],
)
def test_greedy_equals_plain_greedy(family: str, name: str, dtype: torch.dtype) -> None:
    """The drafts hold a random number of correct tokens in every step, at random nodes of the tree."""
    model, tree, rng = shared_model(family, dtype=dtype), TREES[name], random.Random(0)
    session, taken, text = scripted(model, random_ids(7), tree, lambda step: rng.randint(0, tree.max_depth), new=18)
    assert session.sequences.new_ids[0] == text
    assert ids_of(taken) == text
    if tree.max_depth > 1:
        assert len({step.lengths[0] for step in taken}) > 1, "all steps were alike: no power"


@pytest.mark.parametrize(("block", "lm_head"), [("square", "shared"), ("mlp", "own")])
def test_greedy_with_random_heads(llama: Any, block: str, lm_head: str) -> None:
    heads, prompt = random_heads(llama, 5, block=block, lm_head=lm_head), random_ids(5)
    for tree in (*TREES.values(), random_tree(20, 10)):
        out = generate(llama, heads, torch.tensor([prompt]), tree=tree, max_new_tokens=NEW, do_sample=False)
        assert out[0, len(prompt) :].tolist() == plain(llama, prompt, max_new_tokens=NEW)


@pytest.mark.parametrize("seed", range(3))
def test_step_lengths_follow_the_script(llama: Any, seed: int) -> None:
    """With random trees and a random script, every uncut step writes 1 + the number of correct drafted tokens."""
    rng, tree = random.Random(seed), random_tree(12, seed)
    script = [rng.randint(0, tree.max_depth) for _ in range(NEW)]
    _, taken, text = scripted(llama, random_ids(4, seed), tree, script.__getitem__, seed=seed)
    written = 0
    for step, right in zip(taken, script, strict=False):
        left = NEW - written
        # The drafter knows no token beyond the text's end; a last root needs no forward.
        assert step.lengths[0] == (1 if left == 1 else 1 + min(right, left - 1))
        assert len(step.ids[0]) == min(1 + right, left)
        written += len(step.ids[0])
    assert written == NEW == len(text)


def test_permuted_token_ids_give_the_permuted_text() -> None:
    """With permuted embedding and LM head rows the text is permuted in the same way.

    The original failed here when token 0 was an ordinary token (docs/original D1), so the text contains 0 on purpose.
    """
    seed, model, other = 0, shared_model(), tiny_model("llama")
    prompt = random_ids(6, seed)
    often = Counter(plain(model, prompt, max_new_tokens=NEW)).most_common(1)[0][0]
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed)).tolist()
    at = order.index(0)  # `often` becomes 0
    order[at], order[often] = order[often], order[at]
    new_of = torch.tensor(order)
    assert order[often] == 0
    with torch.no_grad():
        other.get_input_embeddings().weight[new_of] = model.get_input_embeddings().weight
        other.get_output_embeddings().weight[new_of] = model.get_output_embeddings().weight
    for name, tree in TREES.items():
        rng = random.Random(seed)
        script = [rng.randint(0, tree.max_depth) for _ in range(NEW)]
        _, plain_steps, text = scripted(model, prompt, tree, script.__getitem__)
        _, taken, relabelled = scripted(other, new_of[prompt].tolist(), tree, script.__getitem__, seed=1)
        assert relabelled == new_of[text].tolist()
        assert 0 in relabelled
        assert ids_of(taken) == relabelled, name
        assert [step.lengths for step in taken] == [step.lengths for step in plain_steps], name


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [9, 36]]},
        {"min_new_tokens": 2, "eos_token_id": list(range(0, 61, 2))},
        {"min_length": 12, "eos_token_id": list(range(0, 61, 2))},
        {"forced_eos_token_id": 5, "eos_token_id": 5},
        {"suppress_tokens": [9, 36], "begin_suppress_tokens": list(range(40))},
        {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_greedy_with_processors(llama: Any, options: dict) -> None:
    """Processors see each node's own path as the prefix, and no padding, which would shift those that count from the
    prompt's end."""
    for prompts in (PROMPTS, [random_ids(8)]):
        texts = [plain(llama, prompt, max_new_tokens=NEW, **options) for prompt in prompts]
        drafter, given = ScriptedDrafter(TREES["random"], texts, lambda step: step % 4), left_padded(prompts)
        session, taken = decode_with(llama, drafter, **given, max_new_tokens=NEW, do_sample=False, **options)
        assert session.sequences.new_ids == texts == [ids_of(taken, row) for row in range(len(prompts))]


TILT = torch.linspace(0, 9, VOCAB)


def change(model: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the logits of the whole model, as users do."""
    forward = type(model).forward

    def tilted(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = out.logits + TILT
        return out

    def other_ids(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"input_ids": (kwargs["input_ids"] + 1) % VOCAB}

    if how == "forward hook":
        model.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits + TILT))
    elif how == "pre-hook":
        model.register_forward_pre_hook(other_ids, with_kwargs=True)
    elif how == "forward of the model":
        model.forward = MethodType(tilted, model)
    else:
        monkeypatch.setattr(type(model), "forward", tilted)


@pytest.mark.parametrize("how", ["forward hook", "pre-hook", *weekly("forward of the model"), "forward of the class"])
def test_changes_of_the_whole_model_are_honoured(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In most models the base and the LM head run apart, which would leave out hooks on the whole model."""
    model, prompts = tiny_model("llama"), [random_ids(9, seed=1), random_ids(4, seed=2)]
    heads, options = random_heads(model), {"max_new_tokens": NEW, "do_sample": False}
    before = [plain(model, prompt, **options) for prompt in prompts]
    generate(model, heads, torch.tensor(prompts[:1]), **options)  # the model is known before it is changed
    change(model, how, monkeypatch)
    expected = [plain(model, prompt, **options) for prompt in prompts]
    assert expected != before, "the change has no effect: no power"
    out = generate(model, heads, **left_padded(prompts), tree="topk:3,2", **options)
    assert out[:, 9:].tolist() == expected
    found = plain_method(model, Settings(max_new_tokens=NEW))(prompts)
    assert [result.new_ids for result in found] == expected


# Sampling

SAMPLING = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "repetition": {"repetition_penalty": 1.6},
    "ngrams": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 10, "eos_token_id": list(range(20))},
    "bad_words": {"bad_words_ids": [[3], [9, 36]]},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_one_seed_gives_the_same_text_as_plain_sampling(llama: Any, options: dict) -> None:
    """With one draw per token, in order, the sample itself equals that of `model.generate`."""
    options = {"do_sample": True, "top_k": 0} | options
    prompt = random_ids(6)
    torch.manual_seed(0)
    text = plain(llama, prompt, max_new_tokens=NEW, **options)
    drafter = ScriptedDrafter(TREES["random"], [text], lambda step: step % 4)
    torch.manual_seed(0)
    session, taken = decode_with(llama, drafter, [prompt], max_new_tokens=NEW, **options)
    assert ids_of(taken) == text == session.sequences.new_ids[0]
    assert len(taken) < len(text), "nothing was accepted: no power"


@pytest.mark.parametrize(("kind", "draft"), [("medusa", "topk"), ("markov", "sample"), *weekly(("medusa", "sample"))])
def test_sampled_texts_have_the_models_distribution(kind: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare all texts of three tokens (vocabulary of seven) with the model, for both forms of rejection.

    A chi-square test compares the counts in 3000 rows of one batch with the products of the model's probabilities.
    Cells with fewer than five expected counts are pooled. A correct sampler fails with probability 1e-5.
    """
    words, rows, prompt = 7, 3000, [1, 2, 3]
    model = tiny_model("llama", vocab_size=words, initializer_range=0.15)
    heads = random_heads(model, 2, kind=kind)

    def p(texts: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            scores = model(input_ids=torch.tensor(texts)).logits[:, -1].double() / 0.8
        return scores.masked_fill(scores < scores.topk(5).values[:, -1:], -torch.inf).softmax(-1)

    expected = {(): 1.0}
    for _ in range(3):
        table = p([prompt + list(text) for text in expected])
        expected = {
            (*text, word): chance * float(table[index, word])
            for index, (text, chance) in enumerate(expected.items())
            for word in range(words)
            if table[index, word] > 0
        }
    # The rows are equal; preparing each of them would take most of the time.
    prepare_row, prepared = request._prepare_row, []
    monkeypatch.setattr(
        request, "_prepare_row", lambda *args: prepared or prepared.extend(prepare_row(*args)) or prepared
    )
    torch.manual_seed(0)
    out = generate(
        model,
        heads,
        torch.tensor([prompt]),
        tree=replace(Tree.top_k([3, 2]), shortlist=4),  # markov heads draw from four of the seven tokens
        draft=draft,
        num_return_sequences=rows,
        do_sample=True,
        temperature=0.8,
        top_k=5,
        max_new_tokens=3,
    )
    counts = Counter(map(tuple, out[:, len(prompt) :].tolist()))
    assert set(counts) <= set(expected)
    large = [text for text, chance in expected.items() if chance * rows >= 5]
    observed, wanted = [counts[text] for text in large], [expected[text] * rows for text in large]
    observed.append(rows - sum(observed))
    wanted.append(rows - sum(wanted))
    assert len(large) > 40
    assert stats.chisquare(observed, wanted).pvalue > 1e-5


# Batches


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2", "deepseek_v3"])
def test_each_row_of_a_ragged_batch_equals_its_text_alone(family: str) -> None:
    model, tree, rng = shared_model(family), TREES["random"], random.Random(0)
    texts = [plain(model, prompt, max_new_tokens=18) for prompt in PROMPTS]
    drafter = ScriptedDrafter(tree, texts, lambda step: rng.randint(0, 4))
    session, taken = decode_with(model, drafter, max_new_tokens=18, do_sample=False, **left_padded(PROMPTS))
    assert session.sequences.new_ids == texts
    assert [ids_of(taken, row) for row in range(3)] == texts


def test_max_time_ends_a_text_like_transformers(llama: Any) -> None:
    """The limit is zero seconds: the criterion is checked after every token, so exactly one token is written."""
    heads, ids = random_heads(llama), torch.tensor([random_ids(5)])
    out = generate(llama, heads, ids, max_time=1e-9, max_new_tokens=20, do_sample=False)
    assert torch.equal(out, llama.generate(ids, max_time=1e-9, max_new_tokens=20, do_sample=False))
    assert out.shape[1] == 6


@pytest.mark.parametrize("draft", ["topk", "sample"])
def test_a_seeded_row_is_the_same_in_every_batch(llama: Any, draft: str) -> None:
    """Each row has its own random stream: batches of 1, 3 and 8, in another order, with rows that end early."""
    heads, prompts = random_heads(llama), [random_ids(3 + 2 * i, seed=i) for i in range(8)]
    options = {"tree": "topk:3,2", "draft": draft, "do_sample": True, "top_k": 20, "max_new_tokens": 12}
    options |= {"eos_token_id": [3, 14, 15], "pad_token_id": 0}

    def texts(rows: list[int]) -> list[list[int]]:
        inputs = left_padded([prompts[row] for row in rows])
        out = generate(llama, heads, **inputs, seeds=[100 + row for row in rows], **options)
        return [line[inputs["input_ids"].shape[1] :].tolist() for line in out]

    def cut(ids: list[int]) -> list[int]:
        return next((ids[: at + 1] for at, token in enumerate(ids) if token in (3, 14, 15)), ids)

    alone = [cut(texts([row])[0]) for row in range(8)]
    assert len({len(text) for text in alone}) > 2, "all rows end together: no power"
    for rows in ([5, 3, 7], list(reversed(range(8)))):
        assert [cut(text) for text in texts(rows)] == [alone[row] for row in rows]
    if draft == "topk":  # one draw a token, in order: the sample is that of `model.generate`
        torch.manual_seed(104)
        kwargs = {name: value for name, value in options.items() if name not in ("tree", "draft")}
        assert cut(plain(llama, prompts[4], **kwargs)) == alone[4]


def test_an_unseeded_batch_uses_the_global_generator(llama: Any) -> None:
    heads, inputs = random_heads(llama), left_padded([random_ids(5)] * 3)
    options = {"do_sample": True, "max_new_tokens": 12}
    torch.manual_seed(1)
    first = generate(llama, heads, **inputs, **options)
    second = generate(llama, heads, **inputs, **options)
    torch.manual_seed(1)
    assert torch.equal(generate(llama, heads, **inputs, **options), first)
    assert not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) == 3, "rows with one prompt are different samples"


def test_rows_of_a_batch_end_independently(llama: Any) -> None:
    """One row ends at an EOS, later another row does, the third reaches the limit; ended rows take part in no step."""
    texts = [plain(llama, prompt, max_new_tokens=30) for prompt in PROMPTS]
    eos = [texts[0][4], texts[1][13]]
    texts = [plain(llama, prompt, max_new_tokens=30, eos_token_id=eos) for prompt in PROMPTS]
    assert len(set(map(len, texts))) > 1
    drafter = ScriptedDrafter(TREES["random"], texts, lambda step: step % 4)
    session, taken = decode_with(
        llama, drafter, max_new_tokens=30, do_sample=False, eos_token_id=eos, **left_padded(PROMPTS)
    )
    assert session.sequences.new_ids == texts
    for row, text in enumerate(texts):
        assert session.sequences.finish_reason[row] == ("eos" if text[-1] in eos else "length")
        took_part = [row in step.ids for step in taken]
        assert took_part == sorted(took_part, reverse=True), "a row that has ended came back"
        assert all(step.ids[row] for step in taken if row in step.ids)


def test_a_padded_row_is_penalised_for_its_whole_prompt(llama: Any) -> None:
    """transformers passes the padding's end to the repetition penalty; in an unpadded row that position is text."""
    options = {"repetition_penalty": 3.0, "do_sample": False, "max_new_tokens": 12}
    for seed in range(3):
        prompt = random_ids(6, seed)
        padded = {"input_ids": torch.tensor([[0] * 5 + prompt]), "attention_mask": torch.tensor([[0] * 5 + [1] * 6])}
        taken = list(steps(llama, random_heads(llama), tree=TREES["wide"], **padded, **options))
        assert ids_of(taken) == plain(llama, prompt, **options)


def test_a_constraint_gets_its_row_index(llama: Any) -> None:
    """`prefix_allowed_tokens_fn(batch_id, ids)` may allow different tokens for each prompt."""

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        return list(range(20 * batch_id, 20 * batch_id + 20))

    batch = torch.tensor([random_ids(5, seed=row) for row in range(3)])
    options = {"prefix_allowed_tokens_fn": allowed, "do_sample": False, "max_new_tokens": 8}
    expected = llama.generate(batch, **options)
    assert torch.equal(generate(llama, random_heads(llama), batch, **options), expected)


@torch.no_grad()
def test_the_drafter_gets_the_hidden_state_before_each_root() -> None:
    """Heads read the state at the path's end (docs/decoding.md). Another node's state would change only the speed,
    so the other tests would not detect the error. The rows are ragged, and one ends early; then one decodes alone.
    """
    model = tiny_model("llama", dtype=torch.float64)
    texts = [plain(model, prompt, max_new_tokens=24) for prompt in PROMPTS]
    seen: list[tuple[int, int, torch.Tensor]] = []

    class Watching(ScriptedDrafter):
        def propose(self, frontier: Any) -> Any:
            live = [row for row, reason in enumerate(self.sequences.finish_reason) if reason is None]
            for index, row in enumerate(live):
                seen.append((row, len(self.sequences.new_ids[row]), frontier.hidden[index].clone()))
            return super().propose(frontier)

    drafter = Watching(TREES["random"], texts, lambda step: step % 4)
    eos = next(token for token in texts[1][5:] if token not in texts[0] + texts[2])
    decode_with(model, drafter, max_new_tokens=24, eos_token_id=eos, do_sample=False, **left_padded(PROMPTS))
    drafter = Watching(TREES["random"], texts, lambda step: step % 4)
    decode_with(model, drafter, PROMPTS[:1], max_new_tokens=24, do_sample=False)
    hidden = [model.model(torch.tensor([p + t])).last_hidden_state[0] for p, t in zip(PROMPTS, texts, strict=True)]
    assert len(seen) > 15
    for row, written, state in seen:
        # float64, but norms are float32 inside transformers: 1e-6; another position's state differs by order 1.
        before_root = len(PROMPTS[row]) + written - 2
        torch.testing.assert_close(state, hidden[row][before_root], rtol=1e-4, atol=1e-4)


# Ends


def first_at(text: list[int], at: int) -> bool:
    """Whether the token at `at` does not occur before `at`."""
    return text[at] not in text[:at]


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_eos_anywhere_in_a_path_ends_the_text_there(llama: Any, right: int) -> None:
    """EOS is the last token returned; step lengths stay uncut. The original kept up to four tokens after EOS (D7)."""
    prompt = random_ids(6)
    free = plain(llama, prompt, max_new_tokens=NEW)
    places = [at for at in range(NEW) if first_at(free, at)]
    assert {0, 1, 2} <= set(places)
    assert len({at % 5 for at in places}) == 5, "an EOS at every place of a step of five"
    for at in places:
        eos = [free[at], *({free[-1]} - set(free[:at]))]
        text = plain(llama, prompt, max_new_tokens=NEW, eos_token_id=eos)
        assert text == free[: at + 1]
        drafter = ScriptedDrafter(TREES["chain"], [free], lambda step: right)
        session, taken = decode_with(llama, drafter, [prompt], max_new_tokens=NEW, do_sample=False, eos_token_id=eos)
        assert session.sequences.new_ids[0] == ids_of(taken) == text
        assert session.sequences.finish_reason == ["eos"]
        assert len(taken) == -(-len(text) // (right + 1))


def test_several_eos_tokens_of_the_generation_config(llama: Any) -> None:
    prompt = random_ids(6)
    free = plain(llama, prompt, max_new_tokens=NEW)
    late, early = [at for at in range(3, NEW) if first_at(free, at)][:2][::-1]
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=[free[late], free[early]], max_new_tokens=20)
    out = generate(model, random_heads(model), torch.tensor([prompt]), do_sample=False)
    assert out[0, len(prompt) :].tolist() == free[: early + 1]
    assert torch.equal(out, model.generate(torch.tensor([prompt]), do_sample=False))


@pytest.mark.parametrize("new", range(1, 12))
def test_max_new_tokens_anywhere_in_a_path(llama: Any, new: int) -> None:
    prompt = random_ids(6)
    free = plain(llama, prompt, max_new_tokens=NEW)
    drafter = ScriptedDrafter(TREES["chain"], [free], lambda step: 4)  # always right about 4
    session, taken = decode_with(llama, drafter, [prompt], max_new_tokens=new, do_sample=False)
    assert session.sequences.new_ids[0] == ids_of(taken) == free[:new]
    assert len(taken) == -(-new // 5)
    assert [step.lengths[0] for step in taken[:-1]] == [5] * (len(taken) - 1)
    assert taken[-1].lengths[0] == (1 if new % 5 == 1 else 5), "uncut, unless a last root needed no forward"


@pytest.mark.parametrize("right", [0, 1, 4])
@pytest.mark.parametrize("words", [1, 2, 3])
def test_stop_strings_over_one_or_several_tokens(llama: Any, tokenizer: Any, words: int, right: int) -> None:
    prompt = random_ids(6)
    free = plain(llama, prompt, max_new_tokens=NEW)
    for at in (2, 7, 11):
        stop = "".join(LETTERS[token] for token in free[at : at + words])
        options = {"stop_strings": [stop, "nowhere"], "tokenizer": tokenizer, "max_new_tokens": NEW}
        text = plain(llama, prompt, **options)
        assert len(text) < NEW
        drafter = ScriptedDrafter(TREES["chain"], [free], lambda step: right)
        session, taken = decode_with(llama, drafter, [prompt], do_sample=False, **options)
        assert session.sequences.new_ids[0] == ids_of(taken) == text
        assert session.sequences.finish_reason == ["stop"]


def test_a_custom_criterion_is_called_after_every_token(llama: Any) -> None:
    seen: list[int] = []

    def criterion(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.shape[1])
        return torch.tensor([ids.shape[1] >= 6 + 13])

    prompt = random_ids(6)
    free = plain(llama, prompt, max_new_tokens=NEW)
    drafter = ScriptedDrafter(TREES["chain"], [free], lambda step: 3)
    options = {"max_new_tokens": NEW, "stopping_criteria": StoppingCriteriaList([criterion])}
    session, _ = decode_with(llama, drafter, [prompt], do_sample=False, **options)
    assert session.sequences.new_ids[0] == free[:13]
    assert seen == list(range(7, 20))


# The end of the context


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "opt"])
def test_the_context_is_filled_to_its_last_position(family: str, name: str) -> None:
    """Trees reach the context's end before the text; learned positions (gpt2, opt) have no row beyond the end."""
    context, tree = 32, TREES[name]
    model = shared_model(family, max_position_embeddings=context)
    for length in (20, 27, 30, 31):
        prompt, rng = random_ids(length), random.Random(length)
        room = context - length
        text = plain(model, prompt, max_new_tokens=room)
        assert len(text) == room
        drafter = ScriptedDrafter(tree, [text], lambda step, rng=rng: rng.randint(0, tree.max_depth))
        session, taken = decode_with(model, drafter, [prompt], max_new_tokens=room + 50, do_sample=False)
        assert session.sequences.new_ids[0] == ids_of(taken) == text
        assert session.sequences.finish_reason == ["length"]


def test_a_ragged_batch_at_the_end_of_the_context() -> None:
    model = tiny_model("gpt2", max_position_embeddings=32)
    prompts = [random_ids(31, seed=1), random_ids(25, seed=2), random_ids(10, seed=3)]
    texts = [plain(model, prompt, max_new_tokens=32 - len(prompt)) for prompt in prompts]
    drafter = ScriptedDrafter(TREES["random"], texts, lambda step: step % 4)
    session, _ = decode_with(model, drafter, max_new_tokens=40, do_sample=False, **left_padded(prompts))
    assert session.sequences.new_ids == texts


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prompt_that_fills_the_context_gives_no_tokens(family: str) -> None:
    model = tiny_model(family, max_position_embeddings=16)
    prompt = torch.tensor([random_ids(16)])
    heads = random_heads(model)
    assert list(steps(model, heads, prompt, max_new_tokens=5, do_sample=False)) == []
    assert torch.equal(generate(model, heads, prompt, max_new_tokens=5, do_sample=False), prompt)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [6.0] * 4,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=lambda scaling: scaling["rope_type"])
def test_rotary_scaling_that_depends_on_the_longest_position(scaling: dict) -> None:
    """`longrope` chooses its frequencies by the deepest position of a forward (docs/transformers 1.5).

    In a tree that crosses the boundary (here 16), all nodes would be rotated differently than in plain decoding.
    """
    model = tiny_model("llama", rope_parameters=scaling, max_position_embeddings=32)
    for seed in range(2):
        _, taken, text = scripted(model, random_ids(10, seed), TREES["chain"], lambda step: step % 3, new=22)
        assert ids_of(taken) == text, f"prompt {seed}"


@pytest.mark.parametrize("family", ["phi3, longrope", *weekly("phimoe, longrope")])
def test_models_that_read_the_text_again_at_the_longrope_boundary(family: str) -> None:
    """Phi-3's own `generate` drops its cache at the boundary, since its keys were rotated by the short factors."""
    model = tiny_model(family)  # boundary 32
    short = random_ids(29, 29)
    if plain(model, short, max_new_tokens=NEW) != plain(model, short, max_new_tokens=NEW, use_cache=False):
        pytest.skip("in this version of transformers its own `generate` drops the cache and reads the last token only")
    heads = random_heads(model, 4)
    for length in (20, 31, 32, 40):
        prompt, rng = random_ids(length, length), random.Random(length)
        session, taken, text = scripted(model, prompt, TREES["random"], lambda step, rng=rng: rng.randint(0, 4))
        assert session.sequences.new_ids[0] == ids_of(taken) == text, f"{length} tokens"
        assert len(taken) < NEW
        options = {"max_new_tokens": NEW, "do_sample": False}
        for door in (
            steps(model, heads, torch.tensor([prompt]), tree=TREES["wide"], **options),
            plain_steps(model, prompt),
        ):
            assert ids_of(list(door)) == text, f"{length} tokens"


def plain_steps(model: Any, prompt: list[int]) -> Any:
    """Steps of the package's plain decoding."""
    requests = prepare(model, [prompt], max_new_tokens=NEW, do_sample=False)
    return iter(Decoding(stepper_for(model, None, requests, AcceptanceRule("greedy"))))


@pytest.mark.parametrize("family", ["llama", "olmo2", "phi"])
def test_dynamic_rope_keeps_its_frequencies_within_the_context(family: str) -> None:
    """Its frequencies depend on a forward's longest position beyond the context, and no tree node is placed there."""
    model = tiny_model(family, rope_parameters=DYNAMIC, max_position_embeddings=32)
    rotary = next(module for module in model.modules() if hasattr(module, "max_seq_len_cached"))
    before = rotary.inv_freq.clone()
    for name, tree in TREES.items():
        for length in (20, 31):
            script = lambda step, deepest=tree.max_depth: min(step % 4, deepest)  # noqa: E731
            _, taken, text = scripted(model, random_ids(length), tree, script, new=32 - length)
            assert ids_of(taken) == text, f"{name}, {length} tokens"
            assert len(text) == 32 - length
            assert torch.equal(rotary.inv_freq, before)
    model(torch.tensor([random_ids(33)]))
    assert not torch.equal(rotary.inv_freq, before), "nothing would turn it: no power"


# Side effects


def test_two_generators_on_one_model_are_independent(llama: Any) -> None:
    """The original kept one cache and one mask on the model (D6)."""
    heads, prompts = random_heads(llama), PROMPTS[:2]
    alone = [
        [step.ids[0] for step in steps(llama, heads, torch.tensor([p]), max_new_tokens=NEW, do_sample=False)]
        for p in prompts
    ]
    running = [steps(llama, heads, torch.tensor([p]), max_new_tokens=NEW, do_sample=False) for p in prompts]
    together: list[list[list[int]]] = [[], []]
    while running != [None, None]:
        for index, generator in enumerate(running):
            step = next(generator, None) if generator is not None else None
            if step is None:
                running[index] = None  # type: ignore[call-overload]
            else:
                together[index].append(step.ids[0])
    assert together == alone


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_decoding_leaves_plain_forwards_unchanged(family: str) -> None:
    model = tiny_model(family)
    heads, ids = random_heads(model), torch.tensor([random_ids(12)])
    before = model(input_ids=ids).logits
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    list(steps(model, heads, ids, max_new_tokens=NEW, do_sample=False))
    next(steps(model, heads, ids, max_new_tokens=NEW, do_sample=False))  # and one that is left half done
    assert torch.equal(model(input_ids=ids).logits, before)
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("enabled", [True, False])
def test_the_callers_grad_mode_is_kept(llama: Any, enabled: bool) -> None:
    """A generator may switch gradients off only during its steps."""
    weight = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(enabled):
        for _ in steps(llama, random_heads(llama), torch.tensor([PROMPTS[0]]), max_new_tokens=6, do_sample=False):
            assert torch.is_grad_enabled() == enabled
            assert not torch.is_inference_mode_enabled()
            assert (weight * 2).requires_grad == enabled
        assert torch.is_grad_enabled() == enabled


@pytest.mark.parametrize("options", [{}, {"rope_parameters": LONGROPE}], ids=["llama", "longrope"])
def test_the_model_can_be_trained_afterwards(options: dict) -> None:
    """Tensors made in inference mode that stay on a module (rotary caches) would break a later backward."""
    model = tiny_model("llama", **options)
    ids = torch.tensor([PROMPTS[0]])
    list(steps(model, random_heads(model), ids, max_new_tokens=6, do_sample=False))
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.get_output_embeddings().weight.grad.abs().sum() > 0
