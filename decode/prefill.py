"""Reading prompts, a piece at a time: however long they are, only a piece's activations and masks are held at once.

A piece of C tokens attends to all S slots before and in it, so the largest mask is [C, S], never [S, S], and the LM
head is applied at one position a row. The first piece needs no mask at all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.cache import TreeCache
from decode.ops.grouped_attention import grouped
from medusa.backbone import Backbone, Readout, at

TOKENS, LEAST = 1024, 256
"""Tokens of a piece in all rows together, and at least in each. More gain nothing: products of 1024 rows are as fast as
any, and the masks of pieces cost less than a tenth (8192 tokens, 6 layers of 288, float32)."""


def prefill(
    backbone: Backbone,
    cache: TreeCache,
    ids: Tensor,
    lengths: list[int],
    on_hidden: Callable[[Tensor, Tensor, int], Tensor] | None = None,
) -> Readout:
    """Fill the empty `cache` with prompts, right-padded; a causal model never looks at what stands behind a token.

    Args:
        ids: [B, T] prompts.
        lengths: of each row, without its padding.
        on_hidden: is given the hidden states [B, C, H] of every piece, the tokens behind them [B, C] and where it
        starts,
            and gives back what is to be taken for them.

    Returns:
        The last hidden state of each row [B, H] and its logits [B, V].
    """
    count, longest = ids.shape[0], max(lengths)
    size = max(TOKENS // count, LEAST)
    last = torch.tensor(lengths, device=ids.device) - 1
    next_ids = F.pad(ids[:, 1:], (0, 1))
    found: Readout | None = None
    for start in range(0, longest, size):
        end = min(start + size, longest)
        piece, positions = ids[:, start:end], torch.arange(start, end, device=ids.device)
        if backbone.rope_boundary is not None and end <= backbone.rope_boundary < longest:
            # longrope turns a forward by its longest position, and this text's lies beyond the boundary. One more token
            # says so; standing behind the others it is seen by none, and its slot is written over.
            piece = torch.cat([piece, piece[:, -1:]], dim=1)
            positions = torch.cat([positions, positions.new_tensor([longest - 1])])
        final = (last - start).clamp(0, end - start - 1)
        with grouped(backbone.config):
            here = backbone.forward(
                piece, cache, last=final, all_hidden=on_hidden is not None, position_ids=positions.expand(count, -1)
            )
        if on_hidden is not None:
            here = here._replace(
                hidden=at(on_hidden(here.hidden[:, : end - start], next_ids[:, start:end], start), final)
            )
        cache.commit_prompt([end - start] * count)
        if found is None:
            found = here
        else:  # rows that ended before have what they need
            goes_on = (last >= start)[:, None].to(here.hidden.device)
            found = Readout(*(torch.where(goes_on, new, old) for new, old in zip(here, found, strict=True)))
    assert found is not None, "an empty prompt is refused before"
    cache.cut(lengths)
    return found
