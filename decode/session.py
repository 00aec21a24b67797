"""A session: the texts being decoded in one call, and everything that grows with them. No part is stored on a model.

Shapes: B rows of the batch, C prompt tokens read in one forward, H hidden size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from decode.heads_cache import HeadsCache
from decode.reader import ReaderFactory
from decode.sequences import Request, Sequences
from decode.target import Target
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.context_kv import AttendsToText
from medusa.heads.independent import MedusaHeads

AHEAD = 1024
"""New tokens for which the first cache has room; it grows with longer texts."""


class Session:
    """The texts of one call, the distribution that they follow (target), and the caches of models that read them."""

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        slack: int = 0,
        keep_hidden: bool = False,
        heads: MedusaHeads | None = None,
        readers: ReaderFactory | None = None,
        fixed: bool = False,
    ) -> None:
        """Make a session with empty caches; `readers` makes its reader, by default one that runs only the backbone.

        Caches and text buffers have room for a draft of up to `slack` nodes after each text's end. With `keep_hidden`,
        hidden states of all tokens are recorded in `kept_hidden`. `heads` get caches if they look back at the text.
        `fixed` caches can be used by compiled steps. Raise RequestError if heads read several layers, so that there are
        no last hidden states to record."""
        layers = None if heads is None else heads.config.feature_layers
        if keep_hidden and layers is not None:
            reading = "these heads read hidden states of several layers"
            raise RequestError(f"{reading}, and --record keeps the last ones; record by plain decoding (--plain)")
        self.backbone = Backbone(model, layers)
        self.target = Target(requests)
        readers = readers or ReaderFactory()
        self.sequences = Sequences(requests, readers.context(self.backbone), self.backbone.device, slack)
        longest = max(len(request.prompt) for request in requests)
        self.capacity = capacity = longest + min(max(request.max_new_tokens for request in requests), AHEAD) + slack + 1
        self.reader = readers.create(self.backbone, self.sequences, capacity, fixed)
        self.kept_hidden: list[list[Tensor]] | None = [[] for _ in requests] if keep_hidden else None
        """Per row, in pieces [n, H]: the hidden states of its tokens, as far as they were read."""
        self.heads_cache: HeadsCache | None = None  # other heads read only the current hidden state
        if heads is not None and (heads.prefix is not None or isinstance(heads, AttendsToText)):
            self.heads_cache = HeadsCache(heads, self.backbone, len(requests), capacity, fixed)

    def prefill(self, most_probable_first: bool = False) -> tuple[Tensor, Tensor]:
        """Read the prompts; returns the first token of each text [B], and the hidden states [B, H] before them.

        `most_probable_first` forbids a random draw."""
        prompts = self.sequences.prompts
        lengths = [len(prompt) for prompt in prompts]
        records = self.heads_cache is not None or self.kept_hidden is not None
        ids = self.sequences.buffer[:, : max(lengths)]
        readout = self.reader.prefill(ids, lengths, self._on_hidden if records else None)
        if self.heads_cache is not None:
            self.heads_cache.cut(lengths)
        root = self.target.next(list(range(len(prompts))), self.sequences, readout.logits, most_probable_first)
        return root.to(self.backbone.device), readout.hidden

    def join(self, other: Session, places: Sequence[int], running: Sequence[int]) -> None:
        """Take over the texts of `other`, whose prompts are read, for the rows `places`; `other` is used up.

        `running` are the own rows in the caches, in their order. `places` are rows of ended texts, or new ones at the
        end. Both sessions are of the same models and options, and keep no hidden states."""
        assert self.kept_hidden is None
        self.sequences.take(other.sequences, places)
        self.target.take(other.target, places, running)

    def _on_hidden(self, hidden: Tensor, next_ids: Tensor, start: int) -> Tensor:
        """Record `hidden` [B, C, H] from position `start` (next tokens: `next_ids` [B, C]); return what heads read."""
        if self.kept_hidden is not None:
            for row, prompt in enumerate(self.sequences.prompts):
                self.kept_hidden[row].append(hidden[row, : max(len(prompt) - start, 0)])
        return hidden if self.heads_cache is None else self.heads_cache.piece(hidden, next_ids)

    def record(self, hidden: Tensor, path: Tensor, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """With `keep_hidden`, record hidden states of the first `lengths[b]` nodes on `path[b]` for text `rows[b]`."""
        if self.kept_hidden is not None:
            for states, nodes, length, row in zip(hidden, path.to(hidden.device), lengths, rows, strict=True):
                self.kept_hidden[row].append(states[nodes[:length]])
