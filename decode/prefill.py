"""Prefill: read prompts into the KV cache piece by piece, so that memory holds the activations of one piece only.

A piece of C tokens attends to all S cache slots up to its own end. So the largest mask is [C, S], never [S, S], and the
LM head runs at one position per row.

Shapes: B rows of the batch, T tokens of the longest prompt, C tokens of a piece, H hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.cache import TreeCache
from decode.ops.fast_linear import fast_linear
from decode.ops.grouped_attention import grouped
from medusa.backbone import Backbone, Readout, at

PIECE_TOKENS, MIN_PIECE_ROW = 1024, 256
"""Tokens of a piece in all rows together, and the fewest in each row. Larger pieces gain nothing (measured at 8192
tokens, 6 layers of width 288, float32)."""
OnHidden = Callable[[Tensor, Tensor, int], Tensor]
"""(hidden states [B, C, H] of a piece, the token after each [B, C], the piece's first position) -> the hidden states
[B, C, H] to use instead."""


def prefill(
    backbone: Backbone, cache: TreeCache, ids: Tensor, lengths: list[int], on_hidden: OnHidden | None = None
) -> Readout:
    """Read prompts `ids` [B, T] into the empty `cache` in pieces; row b has `lengths[b]` tokens, padded on the right.

    A causal model does not see padding after a token. `on_hidden` receives each piece's hidden states and returns those
    to use instead. The result holds the last hidden state of each prompt [B, H] and the logits after it [B, V]."""
    count, longest = ids.shape[0], max(lengths)
    size = max(PIECE_TOKENS // count, MIN_PIECE_ROW)
    last = torch.tensor(lengths, device=ids.device) - 1
    next_ids = F.pad(ids[:, 1:], (0, 1))
    found: Readout | None = None
    for start in range(0, longest, size):
        end = min(start + size, longest)
        piece, positions = ids[:, start:end], torch.arange(start, end, device=ids.device)
        if backbone.rope_boundary is not None and end <= backbone.rope_boundary < longest:
            # longrope rotates a forward by its longest position, and this text's lies beyond the boundary. One more
            # token carries that position; no other token sees it, and its slot is overwritten.
            piece = torch.cat([piece, piece[:, -1:]], dim=1)
            positions = torch.cat([positions, positions.new_tensor([longest - 1])])
        final = (last - start).clamp(0, end - start - 1)
        with grouped(backbone.config), fast_linear(backbone.head_weight, piece.numel()):
            here = backbone.forward(
                piece, cache, last=final, all_hidden=on_hidden is not None, position_ids=positions.expand(count, -1)
            )
        if on_hidden is not None:
            hidden = on_hidden(here.hidden[:, : end - start], next_ids[:, start:end], start)
            here = here._replace(hidden=at(hidden, final))
        cache.commit_prompt([end - start] * count)
        if found is None:
            found = here
        else:  # rows that ended in an earlier piece keep its readout
            goes_on = (last >= start)[:, None].to(here.hidden.device)
            found = Readout(*(torch.where(goes_on, new, old) for new, old in zip(here, found, strict=True)))
    assert found is not None, "an empty prompt is refused before"
    cache.cut(lengths)
    return found
