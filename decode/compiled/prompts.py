"""CUDA graphs that read prompts: one for each bucket of lengths, so that a text begins with one launch.

A prompt is padded on the right to the length of its bucket. A causal model does not see padding after a token, and
steps write over the padding's slots before they see them. Longer prompts are read eagerly, because launches are then a
small part of the time.

Shapes: B rows of the batch, T tokens of the longest prompt, H hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.compiled.graphs import GraphedStep
from decode.ops.transfer import on_device
from decode.reader import Reader
from decode.session import HeadsCache
from medusa.backbone import Readout, at

BUCKETS = (64, 128, 256, 512, 1024)
"""Lengths to which prompts are padded."""
MOST_TOKENS = 4096
"""Tokens of a bucket in all rows together; a graph keeps the memory of all activations of a layer."""


class PromptGraphs:
    """Reads prompts into the empty caches of a region, by eager forwards that are captured as CUDA graphs."""

    def __init__(self, reader: Reader, heads_cache: HeadsCache | None) -> None:
        """Read into the caches of `reader` and `heads_cache`, which stay where they are until `clear`."""
        self.reader, self.heads_cache = reader, heads_cache
        rows, device = len(reader.cache.lengths), reader.cache.filled.device
        self.ids = torch.zeros(rows, BUCKETS[-1] + 1, dtype=torch.long, device=device)  # + 1: the token after the last
        self.last = torch.zeros(rows, dtype=torch.long, device=device)  # [B] the last position of each prompt
        self.graphed = GraphedStep(self._read, device, "prompts are read")
        self.clear = self.graphed.clear

    def bucket(self, lengths: Sequence[int]) -> int | None:
        """The bucket of prompts of `lengths`; `None`: none fits, or a forward of this model cannot be captured.

        A model that runs whole asks the host for positions, states of recurrent layers would read the padding, and
        autocast keeps weights that a capture has converted."""
        backbone, cache = self.reader.backbone, self.reader.cache
        if not backbone.splits or cache.state_layers or torch.is_autocast_enabled(backbone.device.type):
            return None
        most = min(MOST_TOKENS // len(lengths), backbone.context or MOST_TOKENS)
        return next((size for size in BUCKETS if max(lengths) <= size <= most), None)

    def __call__(self, bucket: int, ids: Tensor, lengths: Sequence[int]) -> Readout:
        """Read prompts `ids` [B, T], padded to `bucket` tokens, for which the caches are open.

        Returns the last hidden state of each prompt [B, H] and the logits after it [B, V], until the next call."""
        self.ids[:, : ids.shape[1]].copy_(ids)
        self.ids[:, ids.shape[1] : bucket + 1].zero_()
        self.last.copy_(on_device([length - 1 for length in lengths], self.last.device))
        found = self.graphed(bucket)
        self.reader.cache.count(lengths)
        return found

    def _read(self, bucket: int) -> Readout:
        cache, heads_cache = self.reader.cache, self.heads_cache
        positions = cache.append(bucket)
        found = self.reader.forward(self.ids[:, :bucket], positions, None, self.last, heads_cache is not None)
        if heads_cache is not None:
            hidden = heads_cache.piece(found.hidden, self.ids[:, 1 : bucket + 1])
            found = found._replace(hidden=at(hidden, self.last))
        cache.commit(None, self.last + 1)
        return found
