"""Hidden states of packed rows, in which no document attends to another."""

from __future__ import annotations

from torch import Tensor
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.utils.generic import is_flash_attention_requested

from medusa.backbone import Backbone


def packed_states(backbone: Backbone, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Compute the hidden states [B, T, H] of B packed rows of T tokens; `position_ids` [B, T] restart at each document.

    transformers makes a mask [B, 1, T, T] from the positions. Flash attention reads the documents' lengths instead, and
    computes nothing between documents: all rows are laid end to end, as transformers' DataCollatorWithFlattening does.
    """
    if not is_flash_attention_requested(backbone.config):
        return backbone.hidden_states(input_ids, position_ids=position_ids, use_cache=False)
    (starts_q, starts_k), (longest_q, longest_k) = prepare_fa_kwargs_from_position_ids(position_ids)
    hidden = backbone.hidden_states(
        input_ids.reshape(1, -1),
        position_ids=position_ids.reshape(1, -1),
        use_cache=False,
        cu_seq_lens_q=starts_q,  # [documents + 1] where each document starts, and the number of tokens
        cu_seq_lens_k=starts_k,
        max_length_q=int(longest_q),
        max_length_k=int(longest_k),
    )
    return hidden.unflatten(1, input_ids.shape)[0]
