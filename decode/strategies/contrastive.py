"""Contrastive decoding (Li et al. 2022, arXiv 2210.15097): scores contrast a large and a small model.

A token scores high if the backbone (the expert) predicts it more strongly than a small model (the amateur). These
scores replace the backbone's logits before temperature and penalties, so every drafter and acceptance rule works with
them. The amateur has its own KV cache. It reads what the backbone reads: the prompts, and in each step the same tree.

Shapes: B rows of the batch, T tokens, N nodes, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from decode.cache import TreeCache
from decode.draft import Draft
from decode.drafters.small_model import require_same_vocabulary
from decode.reader import OnHidden, Reader, ReaderFactory
from decode.request import require_fitting, require_longrope_alone
from decode.rules import IMPLAUSIBLE
from decode.sequences import Request
from decode.strategies.options import ContrastOptions, require_uncontrasted
from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone, Readout
from medusa.errors import RequestError

MIN_LOG_PROB = -1e4  # lower log probabilities of the amateur are raised to it, so that all scores are finite


class Contrast(ContrastOptions, kw_only=False):
    """The scoring function of contrastive decoding, with its constants.

    If `beta` is `None`, a score is log p(expert) - log p(amateur). Otherwise, a score is
    (1 + beta) log p(expert) - beta log p(amateur), as in O'Brien and Lewis (2023, arXiv 2309.09117)."""

    def __call__(self, expert: Tensor, amateur: Tensor) -> Tensor:
        """Score tokens by both models' logits [..., V].

        Tokens that the expert finds implausible score far lower than all others, in the expert's order, and not -inf as
        in the paper: where bans, a grammar or a minimal length exclude every plausible token, one of them follows."""
        dtype = torch.promote_types(expert.dtype, torch.float32)  # of the scores: float32, or the expert's float64
        expert_log_p = expert.to(dtype).log_softmax(-1)
        amateur_log_p = (amateur.to(expert.device, dtype) / self.temperature).log_softmax(-1).clamp_min(MIN_LOG_PROB)
        if self.beta is None:
            scores = expert_log_p - amateur_log_p
        else:
            scores = (1 + self.beta) * expert_log_p - self.beta * amateur_log_p
        implausible = self.margin(expert_log_p) < 0
        lowest = scores.masked_fill(implausible, torch.inf).amin(-1, keepdim=True)
        best = expert_log_p.masked_fill(~implausible, -torch.inf).amax(-1, keepdim=True)
        return torch.where(implausible, lowest - IMPLAUSIBLE + (expert_log_p - best), scores)

    def margin(self, expert: Tensor) -> Tensor:
        """Log-probability of each token minus the threshold of plausible tokens, from the expert's logits [..., V]."""
        limit = math.log(self.alpha) if self.alpha else -math.inf
        return expert - expert.amax(-1, keepdim=True) - limit

    @property
    def weights(self) -> tuple[float, float]:
        """The factors of the expert's logit, which raises a token's score, and of the amateur's, which lowers it."""
        expert, amateur = (1.0, 1.0) if self.beta is None else (1 + self.beta, self.beta)
        return expert, amateur / self.temperature


@dataclass(frozen=True)
class Amateur(ReaderFactory):
    """The small model of contrastive decoding, with the function that scores tokens by it and the backbone."""

    model: PreTrainedModel
    contrast: Contrast = field(default_factory=Contrast)
    name: str = "amateur"

    @classmethod
    def of(cls, given: AmateurLike) -> Amateur | None:
        """Make an `Amateur` from the argument `amateur` of `decode.generate`, often a model; `None` stays `None`."""
        if given is None or isinstance(given, Amateur):
            return given
        if not isinstance(given, PreTrainedModel):
            raise RequestError(f"the amateur is {given!r}; pass a model, or an Amateur (decode.strategies.contrastive)")
        return cls(given, name=given.config._name_or_path or "amateur")

    def context(self, backbone: Backbone) -> int | None:
        contexts = (backbone.context, Backbone(self.model).context)
        return min((context for context in contexts if context is not None), default=None)

    def create(self, backbone: Backbone, batch_size: int, capacity: int, fixed: bool = False) -> ContrastReader:
        models = (backbone, Backbone(self.model))
        expert, amateur = (super(Amateur, self).create(model, batch_size, capacity, fixed) for model in models)
        return ContrastReader(expert, amateur, self.contrast)

    def require_fitting(self, model: PreTrainedModel, requests: Sequence[Request], compile: bool = False) -> None:
        """Raise a `RequestError` if the amateur does not fit the model or the requests, or steps are to be compiled."""
        require_uncontrasted(compile, self)
        require_same_vocabulary(self.name, self.model.config, model.config, "amateur")
        if self.model.device != model.device:
            where = f"the amateur {self.name} is on {self.model.device}, the backbone on {model.device}"
            raise RequestError(f"{where}; load both on one device")
        require_tree_forward(self.model)
        require_fitting([request.prompt for request in requests], Backbone(self.model), "amateur")
        require_longrope_alone(self.model, requests)

    def to_dict(self) -> dict[str, object]:
        """The amateur's name and the options of the contrast, for results files in JSON."""
        return {"model": self.name} | asdict(self.contrast)


AmateurLike = Amateur | PreTrainedModel | None


class ContrastReader(Reader):
    """Reads by contrastive decoding: both models read each prompt and draft, and their caches keep the same nodes."""

    def __init__(self, expert: Reader, amateur: Reader, contrast: Contrast) -> None:
        self.amateur, self.contrast = amateur, contrast
        super().__init__(expert.backbone, expert.cache)

    def be_stable(self, stable: bool) -> None:
        super().be_stable(stable)
        self.amateur.be_stable(stable)

    @property
    def caches(self) -> list[TreeCache]:
        return [self.cache, self.amateur.cache]

    def prefill(self, ids: Tensor, lengths: Sequence[int], on_hidden: OnHidden | None = None) -> Readout:
        return self._contrasted(super().prefill(ids, lengths, on_hidden), self.amateur.prefill(ids, lengths))

    def read(self, draft: Draft, last: Tensor | None = None) -> Readout:
        """Read a draft with both models; returns the expert's hidden states [B, N, H] and contrastive scores."""
        return self._contrasted(super().read(draft, last), self.amateur.read(draft, last))

    def _contrasted(self, expert: Readout, amateur: Readout) -> Readout:
        return expert._replace(logits=self.contrast(expert.logits, amateur.logits))

    def depth_limit(self, draft: Draft) -> Tensor | None:
        limits = [limit for limit in (super().depth_limit(draft), self.amateur.depth_limit(draft)) if limit is not None]
        return torch.stack(limits).amin(0) if limits else None


class ContrastProcessor(LogitsProcessor):
    """Contrastive decoding as a logits processor for one call of `model.generate`, the baseline without drafts."""

    def __init__(self, amateur: Amateur, attention_mask: Tensor) -> None:
        """Make a processor for a batch of prompts with this `attention_mask` [B, T], padded on the left."""
        self.amateur, self.mask = amateur, attention_mask
        self.cache: DynamicCache | None = DynamicCache(config=amateur.model.config)
        try:
            self.cache.get_seq_length()
        except ValueError:  # a model without attention: its states cannot be continued for a padded batch
            self.cache = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mask = F.pad(self.mask, (0, input_ids.shape[1] - self.mask.shape[1]), value=1)
        if self.cache is None:
            logits = self.amateur.model(input_ids, attention_mask=mask, use_cache=False).logits
            return self.amateur.contrast(scores, logits[:, -1])
        held = self.cache.get_seq_length()
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, held:]
        logits = self.amateur.model(
            input_ids[:, held:], attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        ).logits
        return self.amateur.contrast(scores, logits[:, -1])
