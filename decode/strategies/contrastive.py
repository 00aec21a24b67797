"""Contrastive decoding (Li et al. 2022, arXiv 2210.15097): the text is to follow what the backbone, the expert, says
more than a small model, the amateur, does. A target like any other: every drafter drafts for it, every rule accepts.

The amateur reads what the backbone reads: the prompts, and in each step the same ids on the same tree, with a cache of
its own that keeps the same path. The contrast takes the logits' place before temperature, penalties and the like.

Shapes: B rows, T tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from decode.cache import TreeCache
from decode.draft import Draft
from decode.prefill import prefill
from decode.sequences import Sequences
from decode.verify import Verifier
from medusa.backbone import Backbone, Readout
from medusa.errors import RequestError

FLOOR = -1e4
"""The least log-probability that an amateur is taken at its word for: a word that it excludes has no infinite score."""


@dataclass(frozen=True)
class Contrast:
    """What is made of two opinions; the defaults are the article's."""

    alpha: float = 0.1
    """Plausibility: words less probable to the expert than `alpha` times its best one are left out; 0: none."""
    beta: float | None = None
    """`None`: log p(expert) - log p(amateur), the article's. A number: (1 + beta) log p(expert) - beta log p(amateur),
    O'Brien and Lewis's (2023, arXiv 2309.09117); at 0 that is the expert alone, but for `alpha`."""
    temperature: float = 1.0
    """Of the amateur: below 1 it is surer of itself, and its first choices are held against the text more."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise RequestError(f"contrast-alpha is {self.alpha}; it must lie between 0 (all words are plausible) and 1")
        if self.beta is not None and not 0 <= self.beta < math.inf:
            raise RequestError(f"contrast-beta is {self.beta}; it must be 0 or above")
        if not 0 < self.temperature < math.inf:
            raise RequestError(f"amateur-temperature is {self.temperature}; it must be above 0")

    def __call__(self, expert: Tensor, amateur: Tensor) -> Tensor:
        """Logits [..., V] of both -> scores [..., V] in their stead; -inf for what is not plausible (section 3.2-3.3).

        float32, or float64 where the expert's are."""
        dtype = torch.promote_types(expert.dtype, torch.float32)
        ours = expert.to(dtype).log_softmax(-1)
        theirs = (amateur.to(expert.device, dtype) / self.temperature).log_softmax(-1).clamp_min(FLOOR)
        scores = ours - theirs if self.beta is None else (1 + self.beta) * ours - self.beta * theirs
        return scores.masked_fill(self.margin(ours) < 0, -torch.inf)

    def margin(self, expert: Tensor) -> Tensor:
        """Log-probabilities or logits [..., V] of the expert -> by how much each word is plausible; below 0: not."""
        edge = math.log(self.alpha) if self.alpha else -math.inf
        return expert - expert.amax(-1, keepdim=True) - edge

    @property
    def weights(self) -> tuple[float, float]:
        """How much a change of an expert's logit, and of an amateur's, changes a score."""
        ours, theirs = (1.0, 1.0) if self.beta is None else (1 + self.beta, self.beta)
        return ours, theirs / self.temperature


@dataclass(frozen=True)
class Amateur:
    """A small model of the backbone's vocabulary, and how it is contrasted."""

    model: PreTrainedModel
    contrast: Contrast = Contrast()
    name: str = "amateur"

    @classmethod
    def of(cls, given: AmateurLike) -> Amateur | None:
        """Raises:
        RequestError: it is no model."""
        if given is None or isinstance(given, Amateur):
            return given
        if not isinstance(given, PreTrainedModel):
            raise RequestError(f"the amateur is {given!r}; pass a model, or an Amateur (decode.strategies.contrastive)")
        return cls(given, name=given.config._name_or_path or "amateur")

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.name} | asdict(self.contrast)


AmateurLike = Amateur | PreTrainedModel | None


class AmateurState:
    """An amateur at work: it reads the texts of a session along, in a cache of its own."""

    def __init__(self, amateur: Amateur, rows: int, capacity: int) -> None:
        self.contrast = amateur.contrast
        self.backbone = Backbone(amateur.model)
        self.cache = TreeCache(amateur.model.config, rows, capacity)

    def prefill(self, ids: Tensor, lengths: list[int], logits: Tensor) -> Tensor:
        """Prompts [B, T], right-padded, and what the expert says behind them [B, V] -> the contrast [B, V]."""
        return self.contrast(logits, prefill(self.backbone, self.cache, ids, lengths).logits)


class ContrastVerifier(Verifier):
    """Both models over one draft."""

    def __init__(self, backbone: Backbone, cache: TreeCache, sequences: Sequences, beside: AmateurState) -> None:
        super().__init__(backbone, cache, sequences)
        self.amateur, self.contrast = Verifier(beside.backbone, beside.cache, sequences), beside.contrast

    def read(self, draft: Draft) -> Readout:
        """The expert's hidden states [B, N, H], and the contrast [B, N, V] in the place of its logits."""
        readout = super().read(draft)
        return readout._replace(logits=self.contrast(readout.logits, self.amateur.read(draft).logits))

    def room(self, draft: Draft) -> Tensor | None:
        rooms = [room for room in (super().room(draft), self.amateur.room(draft)) if room is not None]
        return torch.stack(rooms).amin(0) if rooms else None


class ContrastProcessor(LogitsProcessor):
    """The same target inside `model.generate`, a token a step, the amateur on a stock cache: for one call of it.

    Give it as `logits_processor`; penalties of `generate` itself would come before it, so they belong behind it there.
    """

    def __init__(self, amateur: Amateur, attention_mask: Tensor) -> None:
        """`attention_mask` [B, T] of the prompts, padded on the left."""
        self.amateur, self.mask = amateur, attention_mask
        self.cache = DynamicCache(config=amateur.model.config)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        held, total = self.cache.get_seq_length(), input_ids.shape[1]
        mask = F.pad(self.mask, (0, total - self.mask.shape[1]), value=1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = self.amateur.model(
            input_ids=input_ids[:, held:],
            attention_mask=mask,
            position_ids=positions[:, held:],
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        return self.amateur.contrast(scores, logits[:, -1])
