"""How often each head's top-r guess is the backbone's own token.

The reference is what the backbone itself goes on to write, never the data set's text: that is what acceptance compares
with. In a text that the backbone wrote greedily, the rest of the text is its greedy continuation from every position.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads import MedusaHeads
from train.labels import IGNORE, head_labels

TOPS = (1, 5, 10)


class OwnText(NamedTuple):
    """A prompt and the backbone's own greedy continuation of it."""

    input_ids: list[int]
    prompt_tokens: int


@torch.no_grad()
def head_accuracy(backbone: Backbone, heads: MedusaHeads, texts: Iterable[OwnText]) -> dict[str, Any]:
    """What `medusa evaluate --json` writes: per head top-1, 5 and 10, and top-1 given that all heads before were right.

    Positions from the prompt's last on count: where a step can start. For every head the same positions count, those
    from which the text goes on for as long as the heads reach.
    """
    num_heads = heads.config.num_heads
    hits = torch.zeros(num_heads, max(TOPS), dtype=torch.long)
    given, chained, positions = torch.zeros(num_heads), torch.zeros(num_heads), 0
    for text in texts:
        ids = torch.tensor([text.input_ids], device=backbone.device)
        ranks = guess_ranks(backbone, heads, ids, text.prompt_tokens)  # [K, M]
        positions += ranks.shape[1]
        for rank in range(max(TOPS)):
            hits[:, rank] += (ranks == rank).sum(1).cpu()
        right = (ranks == 0).long().cumprod(0)  # this head and all before
        before = torch.cat([torch.ones_like(right[:1]), right[:-1]])
        given += before.sum(1).cpu()
        chained += right.sum(1).cpu()
    within = hits.cumsum(1) / max(positions, 1)
    return {
        "heads": [
            {
                "head": head + 1,
                "top": {str(top): round(float(within[head, top - 1]), 4) for top in TOPS},
                "conditional_top1": round(float(chained[head] / given[head].clamp_min(1)), 4),
            }
            for head in range(num_heads)
        ],
        "tokens": positions,
    }


def guess_ranks(backbone: Backbone, heads: MedusaHeads, ids: Tensor, prompt_tokens: int) -> Tensor:
    """ids [1, T] -> rank of the token that came among each head's guesses [K, M]; `max(TOPS)`: not among them."""
    hidden = backbone.hidden_states(ids, use_cache=False)
    same = torch.zeros_like(ids)
    labels = head_labels(ids, torch.ones_like(ids), same, heads.config.num_heads)[:, 0]  # [K, T]
    start = max(prompt_tokens - 1, 0)
    usable = (labels != IGNORE).all(0)
    usable[:start] = False
    where = usable.nonzero()[:, 0]
    guesses = heads(hidden[0, where], backbone.lm_head).topk(min(max(TOPS), backbone.vocab_size), -1).indices
    match = guesses == labels[:, where, None]  # [K, M, top]
    return torch.where(match.any(-1), match.int().argmax(-1), max(TOPS))
