"""decode/target.py: target probabilities and draws equal transformers' bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode.ops.fast_topk import most_probable
from decode.rules import AcceptanceRule
from decode.sequences import Request
from decode.target import Target, truncated

V = 9
PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top_k": [TopKLogitsWarper(3)],
    "top_p": [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.7)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2)],
}
WARPED = {
    "cooler": [TemperatureLogitsWarper(0.7)],
    "both": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8)],
    "warmer": [TemperatureLogitsWarper(1.5), TopKLogitsWarper(3)],
}


def target_of(processors: LogitsProcessorList, do_sample: bool, keep_scores: bool = False, rows: int = 1) -> Target:
    return Target(requests_of([[1]] * rows, processors, do_sample, keep_scores))


def probabilities(target: Target, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return target.scores(0, prefix, logits).softmax(-1)[0]


def draw(target: Target, prefix: torch.Tensor, logits: torch.Tensor, row: int = 0) -> int:
    first = torch.tensor([0])
    return int(target.decide(target.draws.of([row]), first, target.scores(row, prefix, logits), first))


def requests_of(
    prompts: list[list[int]], processors: LogitsProcessorList, do_sample: bool, keep_scores: bool = False
) -> list[Request]:
    config = GenerationConfig(do_sample=do_sample, output_scores=keep_scores)
    return [Request(prompt, processors, StoppingCriteriaList(), config, 5) for prompt in prompts]


@pytest.mark.parametrize("name", PROCESSORS)
def test_probabilities_follow_the_processors(name: str) -> None:
    processors = LogitsProcessorList(PROCESSORS[name])
    prefix, logits = torch.tensor([[1, 2, 3, 1]]), torch.randn(V) * 3
    expected = processors(prefix, logits[None].clone()).softmax(-1)[0]
    target = target_of(processors, do_sample=True)
    assert torch.equal(probabilities(target, prefix, logits), expected)
    assert probabilities(target, prefix, logits).dtype == torch.float32


def test_logits_are_not_changed() -> None:
    """A processor may write in place, but the same logits are read again for another path."""

    def in_place(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(0)

    logits = torch.randn(V)
    before = logits.clone()
    probabilities(target_of(LogitsProcessorList([in_place]), do_sample=True), torch.tensor([[1, 2, 1]]), logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", ["temperature", "top_p", "both"])
def test_tokens_are_typical_after_the_processors(name: str) -> None:
    """The target of typical-sampled, by hand; before the processors other tokens would be typical."""
    epsilon, delta = 0.3, 0.6
    processors, logits = LogitsProcessorList((PROCESSORS | WARPED)[name]), 3 * torch.randn(40, V)

    def by_hand(scores: torch.Tensor) -> torch.Tensor:
        p = scores.softmax(-1).double()
        entropy = torch.tensor([[-sum(x * math.log(x) for x in row if x > 0)] for row in p.tolist()])
        return (p > (delta * torch.exp(-entropy)).clamp_max(epsilon)) | (p == p.amax(-1, keepdim=True))

    prefix = torch.tensor([[1, 2]])
    processed = processors(prefix, logits.clone())
    kept = by_hand(processed)
    assert not torch.equal(kept, by_hand(logits))
    rule = AcceptanceRule("typical-sampled", epsilon, delta)
    target = Target([truncated(request, rule) for request in requests_of([[1]], processors, do_sample=True)])
    one_by_one = torch.cat([target.scores(0, prefix, row) for row in logits])
    for scores in (target.scores_of(logits, logits.device), one_by_one):
        assert torch.equal(scores, processed.masked_fill(~kept, -torch.inf))


def test_q_has_the_temperature_and_top_p_of_its_row() -> None:
    """Rows with equal options are processed together; a penalty, or options that differ, make them go one by one."""
    rows, logits = [2, 0], 3 * torch.randn(2, 4, V)
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    different, equal = list(WARPED.values()), [WARPED["both"]] * 3
    for options, others in ((equal, []), (equal, [penalty]), (different, []), (different, [penalty])):
        requests = [requests_of([[1]], LogitsProcessorList([*others, *own]), do_sample=True)[0] for own in options]
        q = Target(requests).draft_probabilities(rows, logits)
        expected = [LogitsProcessorList(options[row])(None, one.clone()) for row, one in zip(rows, logits, strict=True)]
        assert torch.equal(q, torch.stack(expected).softmax(-1))


def test_a_single_argmax_suffices_only_for_plain_greedy_targets() -> None:
    none, some = LogitsProcessorList(), LogitsProcessorList(PROCESSORS["top_k"])
    assert target_of(none, do_sample=False).is_argmax
    assert not target_of(none, do_sample=True).is_argmax
    assert not target_of(some, do_sample=False).is_argmax
    assert not target_of(none, do_sample=False, keep_scores=True).is_argmax


def test_kept_scores_are_in_the_order_of_the_draws() -> None:
    target = target_of(LogitsProcessorList(), do_sample=False, keep_scores=True, rows=8)
    logits = torch.randn(3, V)
    for at in (0, 2, 1):
        draw(target, torch.tensor([[1]]), logits[at], row=7)
    assert target.kept_scores is not None
    assert torch.equal(torch.cat(target.kept_scores[7]), logits[[0, 2, 1]])


def test_float64_is_compared_as_float32() -> None:
    """transformers casts logits to float32 before argmax; a smaller difference is a tie, and the first id wins."""
    logits = torch.tensor([[0.0, 1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert most_probable(logits).tolist() == [1]
    assert logits.argmax(-1).tolist() == [2]
