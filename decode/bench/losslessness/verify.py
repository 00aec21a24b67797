"""Runs a verification: compares greedy texts with and without the drafter, and tests tokens sampled after prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import RepetitionPenaltyLogitsProcessor

from decode.bench.losslessness.cases import FALSE_ALARM, Case, passes, rules_for, threshold
from decode.bench.losslessness.compiled import CompiledDecisions
from decode.bench.losslessness.experiment import Experiment, require_room
from decode.bench.machine import machine
from decode.bench.methods import Job, Method, transformers_method
from decode.request import prepare
from decode.settings import near_tie
from decode.stable import stable_forwards
from decode.strategies.contrastive import Amateur
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.quantization import quantization_of

FAR = 1e30  # a gap to a token that processors exclude, as JSON has no infinity


@dataclass(frozen=True, kw_only=True)
class Verification(Job):
    """What a verification tests: the drafter, models, prompts and settings of a `Job`, and how many samples it draws.

    Raises RequestError if nothing is drafted or a sampled prompt is too long."""

    draws: int = 1_000_000  # samples for each tested prompt, sampling setting and acceptance rule
    sampled_prompts: int = 4  # number of prompts for which samples are tested: the first ones
    full: bool = False  # whether to sample at three temperatures, with and without top-p, instead of only at 1

    def __post_init__(self) -> None:
        if self.source.num_nodes == 1:
            raise RequestError("the tree chain:0 drafts nothing, so there is nothing to verify; give a deeper tree")
        require_room(self.prompts[: self.sampled_prompts], self.settings, self.loaded.model)


@dataclass
class Divergence:
    """Where greedy texts with and without the drafter first differ.

    Logits are those of a forward without a tree, after the logits processors, such as penalties."""

    prompt: int  # index of the prompt
    position: int  # index of the first new token that differs
    plain_token: int | None  # the token of plain decoding at `position`; `None` if this text is shorter
    medusa_token: int | None  # the token of decoding with the drafter there; `None` if this text is shorter
    gap: float | None  # logit of `plain_token` minus that of `medusa_token`; `None` if a text ended
    top2_gap: float  # logit of the most probable token minus logit of the second most probable token
    bound: float  # largest gap that rounding explains (`tie_bound`)

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains that the two texts differ."""
        return self.gap is not None and abs(self.gap) <= self.bound and self.top2_gap <= self.bound


def tie_bound(dtype: torch.dtype, scale: float) -> float:
    """Compute the largest gap between two logits that rounding explains. `scale`: the greatest magnitude of a logit.

    The bound is a number of units in the last place of `scale`, because rounding grows with the logits. In float64 it
    is 0."""
    if dtype == torch.float64:
        return 0.0
    # Measured between a forward over a text and the same text token by token, on models of 6 and 16 layers: the gap of
    # the two best logits changes by up to 55 units in float32 and 4.7 in bfloat16. Sums are float32 in both, so their
    # rounding counts in float32, while bfloat16 only meets that of results.
    units = 64 if dtype == torch.float32 else 8
    return units * torch.finfo(dtype).eps * scale


@dataclass
class GreedyOutcome:
    """The result of comparing greedy texts with and without the drafter, for all prompts."""

    prompts: int
    equal: int
    divergences: list[Divergence]

    @property
    def ties(self) -> int:
        """Number of divergences between greedy texts that rounding explains."""
        return sum(divergence.is_rounding for divergence in self.divergences)

    @property
    def passed(self) -> bool:
        return self.ties == len(self.divergences)

    def to_json(self) -> dict[str, object]:
        """Return the entry `greedy` of `medusa verify --json`."""
        listed = [asdict(divergence) | {"is_rounding": divergence.is_rounding} for divergence in self.divergences]
        return {"prompts": self.prompts, "equal": self.equal, "rounding_ties": self.ties, "divergences": listed}

    def in_words(self, dtype: str) -> str:
        """Describe the comparison of greedy texts in one to three sentences. `dtype`: the backbone's dtype."""
        line = f"{self.equal} of {self.prompts} texts are equal, token by token."
        if self.ties:
            widest = max(abs(one.gap) for one in self.divergences if one.is_rounding and one.gap is not None)
            line += f" {self.ties} diverge: {near_tie(dtype, widest)}."
        if errors := len(self.divergences) - self.ties:
            line += f" {errors} diverge where rounding cannot explain it."
        return line


@dataclass
class VerificationResult:
    """The result of a verification: the comparison of greedy texts, and the tests of samples."""

    asked: Verification
    greedy: GreedyOutcome
    cases: list[Case]

    @property
    def passed(self) -> bool:
        return self.greedy.passed and passes(self.cases)

    def to_json(self) -> dict[str, object]:
        """Return the content of `medusa verify --json`."""
        asked, settings = self.asked, self.asked.settings
        amateur = None if settings.amateur is None else settings.amateur.to_dict()
        about = {"backbone": asked.loaded.name, "nodes": asked.source.num_nodes, "amateur": amateur}
        about |= {name: getattr(asked, name) for name in ("heads", "drafter", "tree", "dtype", "batch_size", "seed")}
        about |= {
            name: getattr(settings, name) for name in ("max_new_tokens", "epsilon", "delta", "compile", "numerics")
        }
        about["quantization"] = quantization_of(asked.loaded.model)
        limits = {"false_alarm_rate": FALSE_ALARM, "smallest_allowed_p_value": threshold(self.cases)}
        sampling = {"draws": asked.draws, **limits, "cases": [line for case in self.cases for line in case.to_json()]}
        found = {"greedy": self.greedy.to_json(), "sampling": sampling, "passed": self.passed}
        return {"settings": about, "machine": asdict(machine())} | found


def verify(asked: Verification) -> VerificationResult:
    """Compare greedy texts with those of `model.generate`, then test samples of the first `sampled_prompts` prompts.

    The option `compile` applies to greedy decoding with the drafter, and to decisions on samples; the rest is eager."""
    eager, model = replace(asked.settings, compile=False), asked.loaded.model
    advance = asked.start_progress("greedy", len(asked.prompts))
    # Not `asked.plain`, whose forwards and masks are our own: a fault there would change both texts alike.
    plain: Method = transformers_method(model, eager, asked.loaded.tokenizer)
    if asked.settings.stable:
        plain = stable_forwards(model)(plain)
    options = eager.generate_kwargs(asked.loaded.tokenizer)
    greedy = compare_greedy(
        model, plain, asked.drafted(asked.settings), asked.prompts, asked.batch_size, advance, eager.amateur, options
    )
    compile = bool(asked.settings.compile)
    rules, chosen = rules_for(asked.source, compile), asked.prompts[: asked.sampled_prompts]
    targets = list(product((0.5, 1.0, 1.5), (1.0, 0.9))) if asked.full else [(1.0, 1.0)]
    advance = asked.start_progress("draws", len(chosen) * len(targets) * len(rules) * asked.draws)
    generator = torch.Generator(model.device).manual_seed(asked.seed)
    cases, compiled = [], CompiledDecisions(generator) if compile else None
    for (number, prompt), (temperature, top_p) in product(enumerate(chosen), targets):
        sampling = replace(eager, temperature=temperature, top_p=top_p)
        experiment = Experiment(model, asked.source, prompt, sampling, generator, compiled)
        cases += [experiment.run(rule, number, asked.draws, advance) for rule in rules]
    return VerificationResult(asked, greedy, cases)


def compare_greedy(
    model: PreTrainedModel,
    plain: Method,
    medusa: Method,
    prompts: Sequence[list[int]],
    batch_size: int = 1,
    on_progress: Callable[[], object] = lambda: None,
    amateur: Amateur | None = None,
    options: Mapping[str, Any] | None = None,
) -> GreedyOutcome:
    """Decode all prompts with `plain` one by one and with `medusa` in batches, and compare the texts.

    `options`: those of `model.generate` whose logits processors apply to both."""
    divergences = []
    for start in range(0, len(prompts), batch_size):
        for number, found in enumerate(medusa(prompts[start : start + batch_size]), start):
            expected = plain([prompts[number]])[0].new_ids
            if found.new_ids != expected:
                texts = expected, found.new_ids
                divergences.append(_divergence(model, number, prompts[number], *texts, amateur, options or {}))
            on_progress()
    return GreedyOutcome(len(prompts), len(prompts) - len(divergences), divergences)


@torch.inference_mode()
def _divergence(
    model: PreTrainedModel,
    number: int,
    prompt: list[int],
    plain: list[int],
    medusa: list[int],
    amateur: Amateur | None,
    options: Mapping[str, Any],
) -> Divergence:
    """Find where the texts `plain` and `medusa` first differ, and how far apart their two tokens' logits are there."""
    at = next((i for i, (a, b) in enumerate(zip(plain, medusa, strict=False)) if a != b), min(len(plain), len(medusa)))
    ids = torch.tensor([prompt + plain[:at]], device=Backbone(model).device)
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].double()
    token, other = (text[at] if at < len(text) else None for text in (plain, medusa))
    scores, nearest, bound = logits, float("inf"), tie_bound(model.dtype, float(logits.abs().max()))
    if amateur is not None:
        contrast, theirs = amateur.contrast, amateur.model(input_ids=ids, use_cache=False).logits[0, -1].double()
        scores, margin = contrast(logits, theirs), contrast.margin(logits)
        # Rounding can also make a token plausible or implausible, which changes its score by a jump. So a gap is at
        # most the distance between the plausibility threshold and the token that is nearest to it.
        nearest = min((float(margin[some].abs()) for some in (token, other) if some is not None), default=nearest)
        own, of_amateur = contrast.weights
        bound = own * bound + of_amateur * tie_bound(model.dtype, float(theirs.abs().max()))
    for processor in prepare(model, [prompt], **options)[0].processors:
        scores = processor(ids, scores[None])[0]
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):  # which multiplies rounding, too
            bound *= max(processor.penalty, 1 / processor.penalty)
    gap, best = None, scores.topk(2).values
    if token is not None and other is not None:
        gap = float(scores[token] - scores[other])
        gap = max(min(gap if abs(gap) <= nearest else nearest, FAR), -FAR)
    return Divergence(number, at, token, other, gap, min(float(best[0] - best[1]), nearest, FAR), bound)
