"""A session: the texts being decoded in one call, and everything that grows with them. No part is stored on a model.

Shapes: B rows of the batch, T tokens of a piece of the prompts, C columns of a path, H hidden size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from decode.cache import TreeCache
from decode.reader import Reader, ReaderFactory, tree_masks
from decode.sequences import AHEAD, Request, Sequences
from decode.target import Target
from decode.topology import Topology, chain
from medusa.backbone import Backbone, Readout
from medusa.errors import RequestError
from medusa.heads.context_kv import AttendsToText, ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.tree_support import LayerKinds

WIDEST = 2048
"""The widest window of heads for which a compiled step copies the keys in the window, also after shorter texts."""


Read = Callable[[Tensor, Sequence[int]], Readout | None]
"""(prompts [B, T], their lengths) -> what `Reader.prefill` returns; `None` if the reader has to read them."""


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
        if requests[0].config.return_dict_in_generate:  # then transformers gives them to criteria, too
            self.sequences.scores = self.target.kept_scores
        longest = max(len(request.prompt) for request in requests)
        self.capacity = capacity = longest + min(max(request.max_new_tokens for request in requests), AHEAD) + slack + 1
        self.reader = readers.create(self.backbone, len(requests), capacity, fixed)
        self.kept_hidden: list[list[Tensor]] | None = [[] for _ in requests] if keep_hidden else None
        """Per row, in pieces [n, H]: the hidden states of its tokens, as far as they were read."""
        self.heads_cache: HeadsCache | None = None  # other heads read only the current hidden state
        if heads is not None and (heads.prefix is not None or isinstance(heads, AttendsToText)):
            self.heads_cache = HeadsCache(heads, self.backbone, len(requests), capacity, fixed)

    def prefill(self, most_probable_first: bool = False, read: Read | None = None) -> tuple[Tensor, Tensor]:
        """Read the prompts; returns the first token of each text [B], and the hidden states [B, H] before them.

        `most_probable_first` forbids a random draw. `read` may read the prompts instead of the reader."""
        prompts = self.sequences.prompts
        lengths = [len(prompt) for prompt in prompts]
        records = self.heads_cache is not None or self.kept_hidden is not None
        ids = self.sequences.buffer[:, : max(lengths)]
        readout = None if read is None else read(ids, lengths)
        if readout is None:
            readout = self.reader.prefill(ids, lengths, self._on_hidden if records else None)
        if self.heads_cache is not None:
            self.heads_cache.cut(lengths)
        root = self.target.next(list(range(len(prompts))), self.sequences, readout.logits, most_probable_first)
        return root.to(self.backbone.device), readout.hidden

    def reread(self) -> None:
        """Read a single text again when it outgrows longrope's original context, as Phi-3's `generate` does.

        Only Phi-3 models then drop the keys that longrope's short factors have rotated."""
        boundary, cache = self.backbone.rope_boundary, self.reader.cache
        if boundary is None or not self.backbone.rereads or cache.longest != boundary:
            return
        text = self.sequences.prefix(0)  # [1, boundary + 1]: its root is written, and its position turns all others
        cache.cut([0])
        Reader.prefill(self.reader, text, [text.shape[1]])  # this model alone: an amateur keeps what it has read
        cache.cut([boundary])  # without the root, which the draft holds

    def join(self, other: Session, places: Sequence[int], running: Sequence[int]) -> None:
        """Take over the texts of `other`, whose prompts are read, for the rows `places`; `other` is used up.

        `running` are the own rows in the caches, in their order. `places` are rows of ended texts, or new ones at the
        end. Both sessions are of the same models and options, and keep no hidden states."""
        assert self.kept_hidden is None
        self.sequences.take(other.sequences, places)
        self.target.take(other.target, places, running)

    def _on_hidden(self, hidden: Tensor, next_ids: Tensor, start: int) -> Tensor:
        """Record `hidden` [B, T, H] from position `start` (next tokens: `next_ids` [B, T]); return what heads read."""
        if self.kept_hidden is not None:
            for row, prompt in enumerate(self.sequences.prompts):
                self.kept_hidden[row].append(hidden[row, : max(len(prompt) - start, 0)])
        if self.heads_cache is None:
            return hidden
        hidden = self.heads_cache.piece(hidden, next_ids)
        self.heads_cache.count([hidden.shape[1]] * len(hidden))
        return hidden

    def record(self, hidden: Tensor, path: Tensor, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """With `keep_hidden`, record hidden states of the first `lengths[b]` nodes on `path[b]` for text `rows[b]`."""
        if self.kept_hidden is not None:
            for states, nodes, length, row in zip(hidden, path.to(hidden.device), lengths, rows, strict=True):
                self.kept_hidden[row].append(states[nodes[:length]])


class HeadsCache:
    """KV caches of Medusa heads that look back at the text; they grow with the backbone's cache, by accepted tokens.

    Prefix layers between backbone and heads read every hidden state (`medusa.heads.prefix`). Heads that attend to the
    text (`medusa.heads.context_kv`) keep keys and values of pairs, a hidden state and the token after it, or, in block
    drafters, of the features of the text alone."""

    def __init__(
        self, heads: MedusaHeads, backbone: Backbone, batch_size: int, capacity: int, fixed: bool = False
    ) -> None:
        """Make empty caches; for `fixed` see `TreeCache`."""
        self.heads, self.backbone = heads, backbone
        self.dtype, self.device = heads.dtype, heads.device
        self.prefix = self.pairs = None
        self.shift = 0
        """By how many tokens the keys end before the root's position; 1 if the last one needs the root."""
        self.chains: dict[int, Topology] = {}  # by the number of columns of a path
        size = batch_size, capacity, heads.device, fixed
        if heads.prefix is not None:
            self.prefix, self.layers = TreeCache(heads.prefix.config, *size), LayerKinds(heads.prefix.config)
        if isinstance(heads, AttendsToText):
            self.shift = int(heads.reads_pairs)
            self.pairs = TreeCache(LlamaConfig(num_hidden_layers=heads.config.decoder_layers), *size)

    @property
    def caches(self) -> list[TreeCache]:
        """The caches of prefix layers, and of pairs, as far as there are any."""
        return [cache for cache in (self.prefix, self.pairs) if cache is not None]

    def piece(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Append a piece of each right-padded prompt to the caches, from the backbone's hidden states [B, T, E].

        E is H times the number of layers that the heads read. Returns what the heads read [B, T, H]. `next_ids` [B, T]
        is the token after each of the T positions of the piece; from the last token of each prompt on, it may be any
        value, because `cut` drops these pairs and padding. The host calls `count`."""
        hidden = self.heads.join(hidden.to(self.device, self.dtype))
        counts = torch.full((len(hidden),), hidden.shape[1], device=self.device)
        if self.prefix is not None:
            hidden = self._read(self.prefix, hidden, counts)
        if self.pairs is not None:
            self._append(self.pairs, hidden, next_ids, counts)
        return hidden

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        """Append B rows' accepted paths to the caches; returns the heads' input [B, H] at the paths' last nodes.

        `before` [B, H] are the hidden states that the heads read at the token before the root. `hidden` [B, C, E] and
        `ids` [B, C] are those of the C path nodes, the root first; `counts[b]` is the number of nodes of path b, 0 for
        a row that does not grow, whose result has no meaning. The host calls `count` when it knows them."""
        hidden, counts = self.heads.join(hidden.to(self.device, self.dtype)), counts.to(self.device)
        if self.prefix is not None:
            hidden = self._read(self.prefix, hidden, counts)
        if self.pairs is not None:
            read = torch.cat([before[:, None].to(hidden), hidden[:, :-1]], dim=1) if self.shift else hidden
            self._append(self.pairs, read, ids, counts)
        last = (counts - 1).clamp_min(0)[:, None, None]
        return hidden.gather(1, last.expand(-1, -1, hidden.shape[-1]))[:, 0]

    def _read(self, cache: TreeCache, hidden: Tensor, counts: Tensor) -> Tensor:
        """Run the prefix layers (decoder layers between backbone and heads) over `hidden` [B, T, H] of T tokens."""
        assert self.heads.prefix is not None
        positions = self._appended(cache, hidden)
        masks = tree_masks(self.layers, self.dtype, self.chain(hidden.shape[1]), cache.filled, cache.width)
        out = self.heads.prefix(hidden, positions, masks, cache)
        cache.commit(None, counts)
        return out

    def _append(self, cache: TreeCache, hidden: Tensor, next_ids: Tensor, counts: Tensor) -> None:
        """Append the KV of T pairs (hidden state, next token) to each row; row b keeps the first `counts[b]` pairs."""
        assert isinstance(self.heads, AttendsToText)
        token = self.heads.embed(next_ids, self.backbone.embed)
        self.heads.project_kv(hidden, token, self._appended(cache, hidden), cache.update)
        cache.commit(None, counts)

    def _appended(self, cache: TreeCache, hidden: Tensor) -> Tensor:
        """Reserve slots for `hidden` [B, T, H]; returns their positions [B, T]."""
        if not cache.is_compiled:  # else the host has opened it before the step
            cache.open(hidden.shape[1])
        return cache.append(hidden.shape[1])

    def chain(self, columns: int) -> Topology:
        """The topology of a path of so many `columns`; torch.compile cannot trace the first call."""
        if columns not in self.chains:
            self.chains[columns] = chain(columns, self.device)
        return self.chains[columns]

    def count(self, counts: Sequence[int]) -> None:
        """Tell how many nodes were committed; see `TreeCache.count`."""
        for cache in self.caches:
            cache.count(counts)

    def cut(self, lengths: Sequence[int]) -> None:
        """Shorten each row b of the caches to its first `lengths[b]` tokens, because the later tokens were padding."""
        if self.prefix is not None:
            self.prefix.cut(lengths)
        if self.pairs is not None:
            self.pairs.cut([length - self.shift for length in lengths])

    def context_kv(self) -> ContextKV | None:
        """The keys and values of the text for the next guesses; `None` for heads that do not attend to the text."""
        cache = self.pairs
        if cache is None:
            return None
        assert isinstance(self.heads, AttendsToText)
        if cache.is_compiled:
            widest = WIDEST
        else:
            cache.open(0)
            widest = cache.longest - 1
        window = self.heads.window
        last = None if window is None or window > widest else window
        return self.heads.after_text([layer.read() for layer in cache.tree_layers], cache.filled, last)
