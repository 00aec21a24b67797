"""decode/strategies/contrastive.py: the article's figures, and texts that do not depend on the drafter."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from decode import generate
from decode.bench.losslessness.cases import RULES, passes
from decode.bench.losslessness.experiment import Experiment
from decode.bench.losslessness.verify import compare_greedy
from decode.bench.methods import medusa_method, plain_method, transformers_method
from decode.draft import NoDraft
from decode.drafters.trained_heads import TrainedHeads
from decode.loop import Stepper, Timer, run
from decode.request import prepare
from decode.rules import IMPLAUSIBLE, AcceptanceRule
from decode.session import Session
from decode.settings import Settings
from decode.strategies.contrastive import Amateur, Contrast, ContrastReader
from decode.texts import Result
from medusa import Tree
from medusa.errors import RequestError
from tests.helpers import (
    VOCAB,
    ScriptedDrafter,
    decode_with,
    left_padded,
    plain,
    random_heads,
    random_ids,
    random_tree,
    tiny_model,
    weekly,
)

NEW = 10
PROMPTS = [random_ids(length, seed=length) for length in (5, 2, 9)]
TREE = random_tree(12, seed=1)


@pytest.fixture(scope="module")
def expert() -> Any:
    return tiny_model("llama", initializer_range=0.15)


@pytest.fixture(scope="module")
def small() -> Any:
    return tiny_model("llama", seed=5, num_hidden_layers=1, initializer_range=0.15)


def test_both_caches_hold_the_text_when_the_expert_reads_it_again(small: Any) -> None:
    """Phi-3 reads its text again at the longrope boundary, 32 tokens here; the amateur does not."""
    expert, lengths = tiny_model("phi3, longrope"), []
    requests = prepare(expert, [random_ids(28)], max_new_tokens=12, do_sample=False, eos_token_id=None)
    session = Session(expert, requests, readers=Amateur.of(small))
    for _ in run(Stepper(session, NoDraft(torch.device("cpu")), AcceptanceRule("greedy")), Timer()):
        lengths.append([list(cache.lengths) for cache in session.reader.caches])
    assert lengths[-1][0][0] > 32
    assert all(mine == theirs for mine, theirs in lengths)


def test_an_amateur_on_another_device_is_refused(expert: Any) -> None:
    elsewhere = tiny_model("llama", seed=5).to("meta")
    with pytest.raises(RequestError, match="is on meta, the backbone on cpu; load both on one device"):
        generate(expert, drafter="ngram", input_ids=torch.tensor([PROMPTS[0]]), amateur=elsewhere, max_new_tokens=3)


# --- the formula -----------------------------------------------------------------------------------------------------


def scored(expert: list[float], amateur: list[float], **constants: Any) -> list[float]:
    found = Contrast(**constants)(torch.tensor(expert).log(), torch.tensor(amateur).log())
    return [round(value, 4) for value in found.tolist()]


def test_the_worked_example() -> None:
    """Tokens 2, 100 and 0.5 times as probable to the expert score ln 2, ln 100 and -ln 2."""
    expert, amateur = [0.5, 0.2, 0.25, 0.05], [0.25, 0.002, 0.5, 0.248]
    assert scored(expert, amateur)[:3] == [0.6931, 4.6052, -0.6931]
    # The word that the amateur would never say wins, though the expert has a better one ...
    assert Contrast()(torch.tensor(expert).log(), torch.tensor(amateur).log()).argmax() == 1
    # ... unless it is implausible: 0.04 is less than a tenth of 0.5.
    expert, amateur = [0.5, 0.04, 0.25, 0.21], [0.25, 0.0004, 0.5, 0.2496]
    found = scored(expert, amateur)[:3]
    assert found == [0.6931, round(-0.6931 - IMPLAUSIBLE, 4), -0.6931]
    assert scored(expert, amateur, alpha=0.0)[:3] == [0.6931, 4.6052, -0.6931]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_published_forms(dtype: torch.dtype) -> None:
    expert, amateur = torch.randn(2, 3, 4, 9, dtype=torch.float64).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    e, a = expert.to(wide), amateur.to(wide)
    p, q = e.softmax(-1), (a / 0.5).softmax(-1)
    plausible = p >= 0.3 * p.amax(-1, keepdim=True)
    assert 0 < plausible.double().mean() < 1
    for beta, written in ((None, (p / q).log()), (0.7, e * 1.7 - a / 0.5 * 0.7)):
        found = Contrast(0.3, beta, 0.5)(expert, amateur)
        assert found.dtype == wide
        assert (found > found.amax(-1, keepdim=True) - IMPLAUSIBLE / 2).equal(plausible)
        expected = written.masked_fill(~plausible, -math.inf).softmax(-1)
        torch.testing.assert_close(found.softmax(-1), expected)
    alone = Contrast(alpha=0.0, beta=0.0)(expert, amateur).softmax(-1)
    torch.testing.assert_close(alone, p)


def test_tokens_that_a_model_excludes() -> None:
    """Logits of -inf in a padded vocabulary give neither nan nor infinite scores."""
    found = Contrast(alpha=0.0)(
        torch.tensor([1.0, 0.0, -math.inf, 0.0]), torch.tensor([1.0, -math.inf, -math.inf, 0.0])
    )
    assert found[2] == -math.inf
    assert found[[0, 1, 3]].isfinite().all()
    assert found.softmax(-1).isfinite().all()


# --- bans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
def test_where_bans_exclude_all_plausible_tokens_the_best_allowed_one_follows(
    expert: Any, small: Any, do_sample: bool
) -> None:
    """A grammar or a minimal length can allow implausible tokens alone; the text was id 0, or an error about NaN."""
    prompt, allowed = PROMPTS[0], [3, 11]
    options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": NEW, "eos_token_id": None}
    if do_sample:
        options["temperature"] = 1e-3
    found = generate(
        expert,
        drafter="ngram",
        input_ids=torch.tensor([prompt]),
        amateur=Amateur(small, Contrast(alpha=0.99)),
        prefix_allowed_tokens_fn=lambda row, ids: allowed,
        **options,
    )
    text, only = list(prompt), 0
    for token in found[0, len(prompt) :].tolist():
        with torch.no_grad():
            logits, theirs = (m(torch.tensor([text]), use_cache=False).logits[0, -1].double() for m in (expert, small))
        p, ratio = logits.softmax(-1), logits.log_softmax(-1) - theirs.log_softmax(-1)
        plausible = [one for one in allowed if p[one] >= 0.99 * p.max()]
        only += not plausible
        assert token == max(plausible or allowed, key=lambda one: float((ratio if plausible else p)[one]))
        text.append(token)
    assert only > NEW / 2, "no power"


# --- the same text with a drafter as without -------------------------------------------------------------------------


def obvious(expert: Any, amateur: Amateur, prompt: list[int], new: int = NEW, penalty: float = 1.0) -> list[int]:
    """A simple version: whole forwards of both models for every token, by the definition in probabilities."""
    text = list(prompt)
    penalize = RepetitionPenaltyLogitsProcessor(penalty)
    for _ in range(new):
        ids = torch.tensor([text])
        with torch.no_grad():
            logits, theirs = (m(input_ids=ids, use_cache=False).logits[0, -1].double() for m in (expert, amateur.model))
        p, q = logits.softmax(-1), (theirs / amateur.contrast.temperature).softmax(-1)
        scores = torch.where(p >= amateur.contrast.alpha * p.max(), (p / q).log(), -math.inf)
        text.append(int(penalize(ids, scores[None]).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("family", "other"),
    [("llama", "gpt2"), ("gemma2", "llama4_text"), *weekly(("llama", "gemma3_text"), ("gemma2", "mistral"))],
)
def test_greedy_text_of_two_models_of_any_kind(family: str, other: str) -> None:
    """The drafter has a different number of correct tokens in every step of a ragged batch in which rows end."""
    expert = tiny_model(family)
    amateur = Amateur(tiny_model(other, seed=3), Contrast(alpha=0.02))
    texts = [obvious(expert, amateur, prompt) for prompt in PROMPTS]
    assert texts[0] != plain(expert, PROMPTS[0], max_new_tokens=NEW), "no contrast: no power"
    (alone,) = plain_method(expert, Settings(max_new_tokens=NEW, amateur=amateur))(PROMPTS[:1])
    assert alone.new_ids == texts[0]
    eos = texts[1][6]
    texts = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
    drafter = ScriptedDrafter(TREE, texts, lambda step: step % (TREE.max_depth + 1))
    batch = left_padded(PROMPTS)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos}
    session, taken = decode_with(
        expert, drafter, batch["input_ids"], amateur=amateur, attention_mask=batch["attention_mask"], **options
    )
    assert session.sequences.new_ids == texts
    assert len({length for step in taken for length in step.lengths.values()}) > 2, "all steps were alike: no power"
    assert len({len(step.ids) for step in taken}) > 1, "no row left before the others: no power"


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy, penalty": {"repetition_penalty": 1.4},
    "sampled": {"temperature": 0.8, "top_k": 20},
    "top-p, penalty": {"temperature": 1.2, "top_p": 0.8, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_drafter_and_model_generate_write_the_same(expert: Any, small: Any, name: str) -> None:
    """With one draw a token, a seed gives the text of `model.generate` with a contrasting processor."""
    amateur = Amateur(small, Contrast(alpha=0.05, temperature=0.8))
    settings = Settings(max_new_tokens=NEW, amateur=amateur, **OPTIONS[name])
    seeds = [1, 2, 3]
    methods = {
        "heads": medusa_method(expert, random_heads(expert), settings, tree="topk:6,3"),
        "mix": medusa_method(expert, random_heads(expert), settings, drafter="mix:heads+ngram:n=1"),
    }
    if not settings.do_sample:  # the same steps with other drafts
        for spec in ("ngram:n=1", "lookahead"):
            methods[spec] = medusa_method(expert, None, settings, drafter=spec)
    texts = [result.new_ids for result in plain_method(expert, settings)(PROMPTS, seeds=seeds)]
    theirs = transformers_method(expert, settings)
    assert texts == [theirs([p], seeds=[seed])[0].new_ids for p, seed in zip(PROMPTS, seeds, strict=True)]
    alone = plain_method(expert, Settings(max_new_tokens=NEW, **OPTIONS[name]))
    assert texts != [result.new_ids for result in alone(PROMPTS, seeds=seeds)]
    accepted = 0
    for method in methods.values():
        results = method(PROMPTS, seeds=seeds)
        assert [result.new_ids for result in results] == texts
        accepted += sum(length - 1 for result in results for length in result.uncut_lengths)
    assert accepted > 3, "hardly anything was accepted: no power"
    if not settings.do_sample:
        assert [result.new_ids for result in theirs(PROMPTS)] == texts, "padded batches"
        assert texts[0] == obvious(expert, amateur, PROMPTS[0], penalty=settings.repetition_penalty or 1.0)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", *weekly("mamba", "falcon_mamba", "jamba")])
def test_model_generate_contrasts_with_recurrent_amateurs(expert: Any, family: str) -> None:
    """Alone, and in padded batches."""
    settings = Settings(max_new_tokens=NEW, amateur=Amateur(tiny_model(family, seed=1)))
    texts = [result.new_ids for result in plain_method(expert, settings)(PROMPTS)]
    theirs = transformers_method(expert, settings)
    assert [result.new_ids for result in theirs(PROMPTS)] == texts
    assert [theirs([prompt])[0].new_ids for prompt in PROMPTS] == texts


def test_scores_equal_the_contrast(expert: Any, small: Any) -> None:
    """The logits that `generate` returns are the warpers' input."""
    ids = torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    out = generate(expert, random_heads(expert), ids, amateur=small, return_dict_in_generate=True, **options)
    with torch.no_grad():
        logits = [model(input_ids=out.sequences[:, :-1], use_cache=False).logits for model in (expert, small)]
    expected = Contrast()(*logits)[0, len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(torch.cat(out.logits), expected, rtol=1e-4, atol=1e-4)


# --- as a distribution -----------------------------------------------------------------------------------------------


def experiment(expert: Any, amateur: Amateur, **options: Any) -> Experiment:
    tree = Tree.from_paths([[0], [1], [4], [0, 0], [0, 2], [1, 0], [0, 0, 0]])
    settings = Settings(**{"temperature": 1.0} | options, amateur=amateur)
    source = TrainedHeads(random_heads(expert, 3), tree)
    return Experiment(expert, source, PROMPTS[2], settings, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.5}])
def test_samples_have_the_contrasts_distribution(expert: Any, small: Any, options: dict[str, Any]) -> None:
    """Compare 60,000 draws of each form of rejection with plain forwards of both models; false alarm below 1e-4."""
    made = experiment(expert, Amateur(small, Contrast(alpha=0.2)), **options)
    assert 8 <= (made.after_root > made.after_root.max() - IMPLAUSIBLE / 2).sum() < VOCAB / 2, (
        "few words are plausible: no power"
    )
    cases = [made.run(rule, 0, 60_000) for rule in RULES[:2]]
    assert passes(cases)
    assert all(case.mean_accepted > 0.02 for case in cases), "hardly anything was accepted: no power"


@pytest.mark.parametrize("fault", ["amateur forgets the tree", "amateur forgets the path", "no plausibility"])
def test_a_fault_is_found(expert: Any, small: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws or the greedy texts show each planted fault."""
    amateur = Amateur(small, Contrast(alpha=0.2))
    made = experiment(expert, amateur)
    if fault == "amateur forgets the tree":
        amateurs = made.context.session.reader.amateur  # type: ignore[attr-defined]
        stock = amateurs.forward

        def forward(ids: Any, positions: Any, masks: Any = None, *last: Any) -> Any:
            return stock(ids, positions, None if masks is None else masks * 0, *last)

        monkeypatch.setattr(amateurs, "forward", forward)
    elif fault == "no plausibility":
        monkeypatch.setattr(Contrast, "margin", lambda self, expert: torch.zeros_like(expert))
    else:

        def forgetting(self: ContrastReader) -> list[Any]:
            cache = self.amateur.cache
            first = SimpleNamespace(commit=lambda path, counts: cache.commit(None, counts), count=cache.count)
            return [self.cache, first]

        monkeypatch.setattr(ContrastReader, "caches", property(forgetting))
        settings = Settings(max_new_tokens=16, amateur=amateur)
        forgetful = medusa_method(expert, random_heads(expert), settings, tree="topk:3,2")
        texts = [[Result(prompt, obvious(expert, amateur, prompt, 16))] for prompt in PROMPTS]
        right = iter(texts)
        assert not compare_greedy(expert, lambda *_: next(right), forgetful, PROMPTS, amateur=amateur).passed
        return
    assert not passes([made.run(RULES[0], 0, 60_000)])


def test_differences_at_the_plausibility_threshold_count_as_rounding(expert: Any, small: Any) -> None:
    """A token that rounding moves over the threshold has no small score gap; a wrong token is not near it."""
    with torch.no_grad():
        logits = [m(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].double() for m in (expert, small)]
    order = logits[0].softmax(-1).argsort(descending=True)
    third = float((logits[0][order[2]] - logits[0][order[0]]).exp())

    def verdict(alpha: float) -> Any:
        amateur = Amateur(small, Contrast(alpha=alpha))
        scores = amateur.contrast(*logits)
        best, said = int(scores.argmax()), int(order[2])
        if best == said:
            best = int(order[0])

        def method(token: int) -> Any:
            return lambda prompts, *_: [Result(list(p), [token]) for p in prompts]

        return compare_greedy(expert, method(best), method(said), PROMPTS[:1], amateur=amateur).divergences[0]

    assert verdict(third * (1 + 1e-7)).is_rounding
    assert not verdict(third * (1 + 1e-3)).is_rounding


# --- where it ends, and who is refused -------------------------------------------------------------------------------


def shorter(model: Any, context: int) -> Any:
    other = LlamaForCausalLM(LlamaConfig(**model.config.to_dict() | {"max_position_embeddings": context})).eval()
    other.load_state_dict(model.state_dict())
    return other


def test_a_text_ends_at_the_amateurs_context(expert: Any, small: Any) -> None:
    """The text reaches the last position with a clipped tree and equals plain decoding."""
    settings = Settings(max_new_tokens=NEW, amateur=Amateur(shorter(small, 14), Contrast(alpha=0.02)))
    unbound = Settings(max_new_tokens=NEW, amateur=Amateur(small, Contrast(alpha=0.02)))
    method = medusa_method(expert, random_heads(expert), settings, tree="topk:3,2")
    whole = plain_method(expert, unbound)(PROMPTS)
    for results in (
        method(PROMPTS),
        plain_method(expert, settings)(PROMPTS),
        transformers_method(expert, settings)(PROMPTS),
    ):
        for prompt, result, free in zip(PROMPTS, results, whole, strict=True):
            assert result.new_ids == free.new_ids[: 14 - len(prompt)]
            assert result.finish_reason == "length"
    with pytest.raises(RequestError, match="the prompt has 15 tokens, but the amateur's context ends at 14"):
        method([random_ids(15)])


def test_unsupported_requests_are_rejected(expert: Any, small: Any) -> None:
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(RequestError, match=f"amateur has {VOCAB + 1} tokens and the backbone {VOCAB}"):
        generate(
            expert, inputs=ids, drafter="ngram", amateur=tiny_model("llama", vocab_size=VOCAB + 1), max_new_tokens=2
        )
    with pytest.raises(RequestError, match="ALiBi"):
        generate(expert, inputs=ids, drafter="ngram", amateur=tiny_model("bloom"), max_new_tokens=2)
    with pytest.raises(RequestError, match="pass a model"):
        generate(expert, inputs=ids, drafter="ngram", amateur="demo")
    with pytest.raises(RequestError, match="compile is not possible"):
        generate(expert, random_heads(expert), ids, amateur=small, compile=True, max_new_tokens=2)
    with pytest.raises(RequestError, match="compile is not possible"):
        Settings(compile=True, amateur=Amateur(small))
    for constants, said in (
        ({"alpha": 1.5}, "contrast_alpha is 1.5"),
        ({"beta": -1.0}, "contrast_beta is -1"),
        ({"temperature": 0.0}, "amateur_temperature is 0"),
    ):
        with pytest.raises(RequestError, match=said):
            Contrast(**constants)
