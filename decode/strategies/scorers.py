"""Scorers of best-first beam search: the model predicts the next tokens of several hypotheses in one forward.

If the model allows it, all hypotheses share a KV cache, as a tree.

Shapes: W hypotheses that one forward reads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.masks import grown_masks
from decode.ops.grouped_attention import grouped
from decode.prefill import prefill
from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.tree_support import LayerKinds


@dataclass(eq=False)
class Partial:
    """A hypothesis of the search: the tokens after the prompt; finished if `is_end`. The root has no tokens."""

    ids: tuple[int, ...] = ()
    log_probability: float = 0.0
    is_end: bool = False
    slots: tuple[int, ...] = ()  # cache slots after the prompt, from 0, of those of `ids` that the model has read
    following: list[tuple[int, float]] | None = None  # best next tokens with log-probabilities, once read


Scorer = Callable[[Sequence[Partial]], Tensor]
"""A function from W hypotheses to logits [W, V] of their next tokens, called for parents before their children."""


def scorer_for(model: PreTrainedModel, prompt: list[int]) -> Scorer:
    """Make the scorer of a model: `OnTree`, or `WholeTexts` if the model cannot keep a tree in its KV cache."""
    try:
        require_tree_forward(model)
    except RequestError:
        return WholeTexts(model, prompt)
    backbone = Backbone(model)  # longrope changes the rotation of cached keys when a text crosses its boundary
    return WholeTexts(model, prompt) if backbone.rope_boundary is not None else OnTree(backbone, prompt)


class WholeTexts:
    """A scorer that reads every text from its start, without a KV cache: for any causal model and for tests."""

    def __init__(self, model: PreTrainedModel, prompt: list[int]) -> None:
        self.model, self.start = model, prompt

    def __call__(self, partials: Sequence[Partial]) -> Tensor:
        texts = [[*self.start, *partial.ids] for partial in partials]
        # Texts are padded on the right, where no causal model attends.
        ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        logits = self.model(input_ids=ids.to(self.model.device), use_cache=False).logits
        last = torch.tensor([len(text) - 1 for text in texts], device=logits.device)
        return logits[torch.arange(len(texts), device=logits.device), last]


class OnTree:
    """A scorer with one KV cache, which holds the prompt and then one token per hypothesis that was read: a tree."""

    def __init__(self, backbone: Backbone, prompt: list[int]) -> None:
        self.backbone, self.start = backbone, prompt
        self.cache = TreeCache(backbone.model.config, 1, len(prompt) + 256)
        self.layers = LayerKinds(backbone.config)
        self.depths: list[int] = []  # position, from 0 after the prompt, of the token in each slot after the prompt

    def __call__(self, partials: Sequence[Partial]) -> Tensor:
        backbone, device, prompt_length = self.backbone, self.backbone.device, len(self.start)
        if not partials[0].ids:  # the root, which is read alone
            return prefill(backbone, self.cache, torch.tensor([self.start], device=device), [prompt_length]).logits
        for slot, partial in enumerate(partials, len(self.depths)):
            partial.slots = (*partial.slots, slot)
        self.depths += [len(partial.ids) - 1 for partial in partials]
        depth = torch.tensor([self.depths[-len(partials) :]], device=device)  # [1, W]
        deepest = int(depth.max()) + 1
        # Shorter paths repeat their own slot as padding.
        paths = [[p.slots + p.slots[-1:] * (deepest - len(p.slots)) for p in partials]]
        seen, of_slot = torch.tensor(paths, device=device), torch.tensor(self.depths, device=device)
        starts = torch.tensor([prompt_length], device=device)
        with grouped(backbone.config):
            logits = backbone.forward(
                torch.tensor([[partial.ids[-1] for partial in partials]], device=device),
                self.cache,
                position_ids=prompt_length + depth,
                attention_mask=grown_masks(self.layers, backbone.dtype, starts, seen, depth, of_slot),
            ).logits
        self.cache.commit_prompt([len(partials)])
        return logits[0]
