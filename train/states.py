"""The backbone's hidden states at the tokens of packed rows, in which each document is read as if it were alone.

Shapes: B rows of T tokens, D documents in them, H hidden size."""

from __future__ import annotations

import weakref
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.utils.generic import is_flash_attention_requested

from medusa.backbone import Backbone, by_value
from medusa.memory import free_memory
from medusa.tree_support import LayerTypes

KEPT = 1 / 4  # of the free memory, which kept states may fill
PROBE = 5  # tokens in each of two documents
MAX_LEAK = 0.2
"""The greatest change of a document's states by another document in its row, as a share of its change by a text before
it. In half precision, rounding changes them by some hundredths."""


def packed_states(backbone: Backbone, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Compute the hidden states [B, T, H] of B packed rows of T tokens; `position_ids` [B, T] restart at each document.

    Documents that the model does not keep apart are read in rows of their own; on a CPU all are, because attention
    with a mask also computes what no token sees: a third of the forward over six documents in a row of 1,856 tokens."""
    if input_ids.device.type != "cpu" and keeps_documents_apart(backbone):
        return states_by_row(backbone, input_ids, position_ids)
    return states_by_document(backbone, input_ids, position_ids)


class KeptStates:
    """Reads packed rows by a frozen backbone, and keeps their hidden states, as far as memory goes, for later epochs.

    Only on a CPU, whose forwards take long, and in a single process: processes of a sharded backbone wait for each
    other's forwards."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.room = backbone, 0.0  # bytes that may still be kept
        if backbone.device.type == "cpu" and not (dist.is_available() and dist.is_initialized()):
            self.room = KEPT * free_memory(backbone.device)
        self.keeps = self.room > 0
        self.held: dict[bytes, Tensor] = {}

    def __call__(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Compute or find the hidden states [B, T, H]; for the arguments see `packed_states`."""
        if not self.keeps:
            return packed_states(self.backbone, input_ids, position_ids)
        # Row by row, so that rounding does not depend on the rows that come together.
        return torch.cat([self._row(*row) for row in zip(input_ids[:, None], position_ids[:, None], strict=True)])

    def _row(self, ids: Tensor, positions: Tensor) -> Tensor:
        key = blake2b(torch.stack([ids, positions]).numpy().tobytes(), digest_size=16).digest()
        states = self.held.get(key)
        if states is None:
            states = packed_states(self.backbone, ids, positions)
            if states.nbytes <= self.room:
                self.held[key] = states
                self.room -= states.nbytes
        return states


def states_by_row(backbone: Backbone, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Compute the hidden states [B, T, H] of packed rows, row by row, by a model that keeps documents apart.

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


def states_by_document(backbone: Backbone, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Compute the hidden states [B, T, H] with one document in each row, padded at its end, which no token sees.

    A forward reads at most B T tokens, padding included, so it takes no more memory than one over packed rows."""
    positions, limit = position_ids.flatten(), input_ids.numel()
    starts = (positions == 0).nonzero()[:, 0].tolist()
    parts = input_ids.flatten().tensor_split(starts[1:])  # of D documents
    found: dict[int, Tensor] = {}
    waiting = sorted(range(len(parts)), key=lambda number: -len(parts[number]))  # so that little is padded
    while waiting:
        count = limit // len(parts[waiting[0]])
        together, waiting = waiting[:count], waiting[count:]
        rows = pad_sequence([parts[number] for number in together], batch_first=True)
        hidden = backbone.hidden_states(rows, use_cache=False)
        found |= {number: states[: len(parts[number])] for number, states in zip(together, hidden, strict=True)}
    return torch.cat([found[number] for number in range(len(parts))]).unflatten(0, input_ids.shape)


def keeps_documents_apart(backbone: Backbone) -> bool:
    """Whether positions that restart keep the documents of a row apart, tested once for a model and its config.

    Many attention layers do so. Some make their masks without our positions, and recurrent layers carry their states
    from one document into the next."""
    if is_flash_attention_requested(backbone.config) and not LayerTypes(backbone.config).has_states:
        return True  # it gets the lengths of documents, and masks nothing
    config = by_value(backbone.model.config)
    known = _APART.get(backbone.model)
    if known is None or known[0] != config:
        known = _APART[backbone.model] = config, _is_apart(backbone)
    return known[1]


@torch.no_grad()
def _is_apart(backbone: Backbone) -> bool:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(backbone.vocab_size, (1, 2 * PROBE), generator=draw).to(backbone.device)
    positions = torch.arange(2 * PROBE, device=ids.device)[None]
    alone = backbone.hidden_states(ids[:, PROBE:], use_cache=False).float()
    packed = states_by_row(backbone, ids, positions % PROBE)[:, PROBE:].float()
    after_text = backbone.hidden_states(ids, use_cache=False)[:, PROBE:].float()
    return bool((packed - alone).norm() <= MAX_LEAK * (after_text - alone).norm())


_APART: weakref.WeakKeyDictionary[nn.Module, tuple[object, bool]] = weakref.WeakKeyDictionary()
