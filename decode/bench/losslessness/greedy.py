"""Greedy texts compared: with a drafter, and by plain decoding.

Where two texts part, the gap between the logits of their two tokens tells a tie that rounding decided from an error.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.bench.methods import Method
from decode.strategies.contrastive import Amateur, Contrast
from medusa.backbone import Backbone

TIE = 1e-5
"""In float32, the gap between two logits below which rounding may decide their order."""


@dataclass
class Divergence:
    """The first difference between the text with a drafter and the plain one."""

    prompt: int
    position: int
    """Index of the first new token that differs."""
    plain_token: int | None
    """`None` if the plain text has ended before."""
    medusa_token: int | None
    gap: float | None
    """Logit of the plain token minus that of the other, by a plain forward over the text before both."""
    top2_gap: float
    """Logit of the most probable token minus that of the second most probable one."""
    bound: float
    """The largest gap that rounding explains; see `tie_bound`."""

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None and abs(self.gap) <= self.bound and self.top2_gap <= self.bound


def tie_bound(dtype: torch.dtype, top: float) -> float:
    """The largest gap of logits that rounding explains, if the largest logit is `top`.

    float64 allows none, float32 1e-5. Lower precision allows four units in the last place of the largest logit: a
    number that is computed in two orders may differ by two units, and so may the number that it is compared with.
    """
    if dtype == torch.float64:
        return 0.0
    return TIE if dtype == torch.float32 else 4 * torch.finfo(dtype).eps * abs(top)


@dataclass
class GreedyOutcome:
    """The greedy texts of all prompts compared."""

    prompts: int
    equal: int
    divergences: list[Divergence]

    @property
    def ties(self) -> int:
        """Number of texts that part where rounding explains it."""
        return sum(divergence.is_rounding for divergence in self.divergences)

    @property
    def passed(self) -> bool:
        return self.ties == len(self.divergences)

    def to_json(self) -> dict[str, object]:
        """The part `greedy` of `medusa verify --json`."""
        listed = [asdict(divergence) | {"is_rounding": divergence.is_rounding} for divergence in self.divergences]
        return {"prompts": self.prompts, "equal": self.equal, "rounding_ties": self.ties, "divergences": listed}

    def in_words(self, dtype: str) -> str:
        """The outcome in one to three sentences."""
        line = f"{self.equal} of {self.prompts} texts are equal, token by token."
        if self.ties:
            line += f" {self.ties} part where the two best logits are so close that {dtype} rounding decides."
        if errors := len(self.divergences) - self.ties:
            line += f" {errors} part where rounding cannot explain it."
        return line


def compare_greedy(
    model: PreTrainedModel,
    plain: Method,
    medusa: Method,
    prompts: Sequence[list[int]],
    batch_size: int = 1,
    on_progress: Callable[[], object] = lambda: None,
    amateur: Amateur | None = None,
) -> GreedyOutcome:
    """Decode `prompts` one by one with `plain`, and in batches of `batch_size` with `medusa`.

    `amateur`: the model that both methods contrast the backbone with."""
    divergences = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        for offset, (prompt, found) in enumerate(zip(batch, medusa(batch), strict=True)):
            expected = plain([prompt])[0].new_ids
            if found.new_ids != expected:
                divergences.append(_divergence(model, start + offset, prompt, expected, found.new_ids, amateur))
            on_progress()
    return GreedyOutcome(len(prompts), len(prompts) - len(divergences), divergences)


@torch.inference_mode()
def _divergence(
    model: PreTrainedModel, number: int, prompt: list[int], plain: list[int], medusa: list[int], amateur: Amateur | None
) -> Divergence:
    at = next((i for i, (a, b) in enumerate(zip(plain, medusa, strict=False)) if a != b), min(len(plain), len(medusa)))
    ids = torch.tensor([prompt + plain[:at]], device=Backbone(model).device)
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].double()
    token, other = (text[at] if at < len(text) else None for text in (plain, medusa))
    if amateur is not None:
        theirs = amateur.model(input_ids=ids, use_cache=False).logits[0, -1].double()
        gap, top2_gap = _contrast_gaps(amateur.contrast, logits, theirs, token, other)
        parts = zip(amateur.contrast.weights, (logits, theirs), strict=True)
        bound = sum(weight * tie_bound(model.dtype, float(some.max())) for weight, some in parts)
        return Divergence(number, at, token, other, gap, top2_gap, bound)
    best = logits.topk(2).values
    gap = None if token is None or other is None else float(logits[token] - logits[other])
    bound = tie_bound(model.dtype, float(best[0]))
    return Divergence(number, at, token, other, gap, float(best[0] - best[1]), bound)


def _contrast_gaps(
    contrast: Contrast, expert: Tensor, amateur: Tensor, token: int | None, other: int | None
) -> tuple[float | None, float]:
    """Logits [V] of both models -> the gap of contrastive scores between two tokens, and between the two best tokens.

    Rounding can also move a token over the edge of plausibility, where its score is not small. The gap is then the
    distance of the token from that edge."""
    scores, edge = contrast(expert, amateur), contrast.margin(expert)
    known = [word for word in (token, other) if word is not None]
    nearest = min((float(edge[word].abs()) for word in known), default=float("inf"))
    best = scores.topk(2).values
    gap = None
    if len(known) == 2:
        gap = float(scores[known[0]] - scores[known[1]])  # nan if neither token is plausible
        gap = nearest if not abs(gap) <= nearest else gap
    return gap, min(float(best[0] - best[1]), nearest)
