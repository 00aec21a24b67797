"""Heads with LM heads of their own, for forms that know no others."""

from __future__ import annotations

from dataclasses import replace

import torch

from medusa.errors import RequestError
from medusa.formats import Export
from medusa.heads import MedusaHeads


def with_own_lm_heads(export: Export) -> MedusaHeads:
    """`export.heads`, with copies of the backbone's LM head where they share it, in the heads' dtype.

    Raises:
        RequestError: the backbone's LM head cannot be read, or is of another size.
    """
    heads = export.heads
    if heads.lm_heads is not None:
        return heads
    weight = export.lm_head()
    config = heads.config
    if weight.shape[1] != config.hidden_size:
        raise RequestError(
            f"heads of size {config.hidden_size} are not of {export.backbone}, whose LM head reads {weight.shape[1]}"
        )
    with torch.device("meta"):
        own = MedusaHeads(replace(config, lm_head="own", vocab_size=len(weight)))
    weight = weight.T.to(next(heads.parameters()).dtype)
    tensors = heads.state_dict() | {"lm_heads": weight.expand(config.num_heads, -1, -1).contiguous()}
    own.load_state_dict(tensors, assign=True)
    return own.eval()
