"""A small language model drafts a chain or a tree for the backbone (Leviathan et al. 2023, Chen et al. 2023).

The draft model has its own KV cache. In each step it drops its last draft, reads the new text in one forward, and then
its own draft, one level of the tree per forward. So accepted nodes are read twice: if all four tokens of a chain are
accepted, this takes 5 % of a step in which both models have 135 M parameters (one CPU core), and less with a large one.

Shapes: B texts, W nodes of a level that one forward reads, A drafted ancestors of a node, V vocabulary, S cache slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decode.cache import TreeCache
from decode.draft import Draft, Drafter, Frontier
from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, require_at_least
from decode.drafters.layouts import DynamicTree, Layout
from decode.drafters.levelwise import Guesses, LevelwiseDrafter, selected
from decode.drafters.small_model import load_small_model, require_same_vocabulary, small_model_path
from decode.ops.fast_topk import top_k
from decode.ops.transfer import on_device
from decode.reader import Reader
from decode.session import Session
from decode.target import Target
from decode.topology import chain
from decode.tree_check import require_tree_forward
from medusa.argmax import argmax
from medusa.backbone import Backbone, require_tree_support
from medusa.errors import RequestError
from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import State
from medusa.loading import load_config
from medusa.memory import bytes_of
from medusa.tree import Tree
from medusa.tree_support import LayerKinds, LayerTypes, Mask, text_config

MAX_NEW = 128  # new tokens that are read as a draft; for more, which need large masks, the whole text is read again


@dataclass(frozen=True)
class DraftModelConfig(DrafterConfig):
    """Options of `--drafter model`: a small language model drafts."""

    model: str  # a local folder, a Hub id, or `demo`, the draft model that comes with the embedded backbone
    tokens: int = 4  # number of tokens to draft
    widths: str = ""  # number of children of a node by depth, such as 3x2x1, for a tree; replaces `tokens`
    nodes: int = 0  # nodes of a dynamic tree of depth `tokens`, root included; 0: no dynamic tree
    topk: int = 0  # with `--draft sample`: sample only among this many most probable tokens; 0: among all
    confidence: float = 0.0  # stop drafting when the chain's probability falls below it; 0: never stop early

    first = "model"
    can_draw = True
    needs = "a small model"

    def __post_init__(self) -> None:
        require_at_least(1, "model", tokens=self.tokens)
        require_at_least(0, "model", topk=self.topk)
        if not self.model:
            raise RequestError("drafter model needs a model: model:FOLDER, model:HUB-ID or model:demo")
        if not 0 <= self.confidence < 1:
            raise RequestError(f"drafter model: confidence is {self.confidence}; it must be at least 0 and below 1")
        if sum(map(bool, (self.widths, self.nodes, self.confidence))) > 1:
            raise RequestError("drafter model: give one of widths, nodes and confidence; each sets the draft's shape")
        _ = self.tree  # raises an error if the shape is invalid

    @property
    def tree(self) -> Layout:
        """The draft tree that the options `tokens`, `widths` or `nodes` describe."""
        if self.nodes:
            return DynamicTree.over_heads(self.nodes, self.tokens)
        if not self.widths:
            return Tree.chain(self.tokens)
        try:
            widths = [int(width) for width in self.widths.split("x")]
        except ValueError:
            raise RequestError(f"drafter model: widths is {self.widths!r}; write numbers such as 3x2x1") from None
        return Tree.top_k(widths)

    def check(self, config: PretrainedConfig) -> None:
        require_same_vocabulary(self.model, load_config(small_model_path(self.model)), config, "draft model")

    def factory(self, context: DrafterContext) -> DrafterFactory:
        return DraftModel(load_small_model(self.model, context), self.tree, self.topk, self.confidence)


class DraftModel(DrafterFactory):
    """A factory of drafters that share a loaded draft model and the tree of its drafts."""

    tree: Layout

    def __init__(self, model: PreTrainedModel, tree: Layout, topk: int = 0, confidence: float = 0.0) -> None:
        """Make a factory from a loaded model, which must support tree attention. Options: see `DraftModelConfig`."""
        require_tree_support(model)
        if LayerTypes(text_config(model)).has_states:  # which a draft would change
            keeps = f"{type(model).__name__} keeps states in its recurrent layers, which cannot go back after a draft"
            raise RequestError(f"drafter model: {keeps}; take a draft model that only attends")
        require_tree_forward(model)
        tree.candidates.require_fit(tree.max_depth, Backbone(model).vocab_size)
        self.model, self.tree, self.topk, self.confidence = model, tree, topk, confidence
        self.num_nodes, self.num_bytes, self.can_draw = tree.num_nodes, bytes_of(model), not confidence

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        if drawn and (isinstance(self.tree, DynamicTree) or self.confidence):
            raise RequestError("drafter model: draft sample needs a fixed shape; leave nodes and confidence out")
        return ModelDrafter(self, session, session.target if drawn else None)

    def reshaped(self, change: Callable[[Layout], Layout]) -> DraftModel:
        return DraftModel(self.model, change(self.tree), self.topk, self.confidence)


class ModelDrafter(LevelwiseDrafter):
    """Drafts with a small model, whose KV cache follows the texts of a session.

    The state of W nodes in B texts: the cache slots [B, W, A] of their A drafted ancestors, counted from the text's
    end: slot 0 is the first slot after the text."""

    def __init__(self, source: DraftModel, session: Session, target: Target | None = None) -> None:
        self.backbone = Backbone(source.model)
        self.device = self.backbone.device
        super().__init__(source.tree.to(self.device), self.backbone.vocab_size, target)
        self.source, self.sequences, self.capacity = source, session.sequences, session.reader.cache.capacity
        self.layers = LayerKinds(self.backbone.config)
        self.is_chain = isinstance(self.tree, Tree) and self.tree.max_rank == 0 and target is None
        self.reader, self.rows = self._reader(0), list[int]()  # the rows of the texts that the cache holds
        self.text_lengths: list[int] = []  # root included; the last draft starts at these slots of the cache
        self.depths: list[int] = []  # of the nodes of the last draft that were read, by slot

    def propose(self, frontier: Frontier) -> Draft:
        """Draft a chain or a tree, or only the root if text and draft together exceed the draft model's context."""
        longest = max(self.sequences.lengths[row] for row in frontier.rows)
        if self.backbone.context is not None and longest + self.tree.max_depth > self.backbone.context:
            return Draft(frontier.root[:, None], chain(1, frontier.root.device))
        return self._chain(frontier) if self.is_chain else super().propose(frontier)

    def forget(self, rows: Sequence[int]) -> None:
        self._select([row for row in self.rows if row not in rows])

    @property
    def cache(self) -> TreeCache:
        return self.reader.cache

    def _reader(self, count: int) -> Reader:
        return Reader(self.backbone, TreeCache(self.source.model.config, count, self.capacity, self.device))

    def _follow(self, rows: list[int]) -> None:
        """Keep what was read of the texts `rows`, and read those that have joined, except their last tokens."""
        self._select([row for row in rows if row in self.rows])
        joined = [row for row in rows if row not in self.rows]
        if not self.rows:  # `_read_new_text` reads all texts
            self.reader, self.rows = self._reader(len(rows)), list(rows)
        elif joined:
            new, texts = self._reader(len(joined)), [self.sequences.tail(row, 0)[:-1] for row in joined]
            lengths = list(map(len, texts))
            new.prefill(self._padded(texts), lengths)
            self.cache.join(new.cache)
            self.rows, self.text_lengths = [*self.rows, *joined], [*self.text_lengths, *lengths]
            self._select(rows)  # those that have joined may stand in the places of ended ones

    def _select(self, rows: list[int]) -> None:
        """Keep only the texts `rows`, without their drafts."""
        left = [self.rows.index(row) for row in rows]
        if left:
            self.cache.cut(self.text_lengths)
        if left and rows != self.rows:  # or the cache would be copied for each text that joins
            self.cache.select(left)
        self.text_lengths, self.rows = [self.text_lengths[place] for place in left], list(rows)

    def _read_new_text(self, rows: list[int]) -> Tensor:
        """Read the tokens that the cache does not hold yet, of each text at least the last, for the logits after it."""
        ends = [self.sequences.lengths[row] - 1 for row in rows]
        self.cache.cut([min(held, end) for held, end in zip(self.cache.lengths, ends, strict=True)])
        news = [self.sequences.tail(row, held) for row, held in zip(rows, self.cache.lengths, strict=True)]
        counts = [len(new) for new in news]
        if not self.text_lengths or max(counts) > MAX_NEW:
            self.cache.cut([0] * len(rows))
            texts = [self.sequences.tail(row, 0) for row in rows]
            return self.reader.prefill(self._padded(texts), list(map(len, texts))).logits
        draft = Draft(self._padded(news), chain(max(counts), self.device))
        logits = self.reader.read(draft, on_device(counts, self.device) - 1).logits
        self.cache.keep(counts)
        return logits

    def _padded(self, lines: list[list[int]]) -> Tensor:
        width = max(map(len, lines))
        return on_device([line + [0] * (width - len(line)) for line in lines], self.device)

    def _chain(self, frontier: Frontier) -> Draft:
        """Draft a chain by greedy decoding with the draft model; `confidence` can end the chain early."""
        state, ids = self.begin(frontier), [frontier.root]
        logits, probability = self._first, torch.ones(len(frontier.rows), device=self.device)
        count = min(self.tree.max_depth, max(self.sequences.tokens_left(row) for row in frontier.rows) - 1)
        for depth in range(1, count + 1):
            token = argmax(logits)
            if self.source.confidence:
                probability = probability * logits.float().softmax(-1).gather(-1, token[:, None])[:, 0]
                if bool((probability < self.source.confidence).all()):
                    break
            ids.append(token)
            if depth < count:
                guesses = self.step(depth, state, torch.zeros_like(token[:, None]), token[:, None], None)
                logits, state = guesses.logits[:, 0], guesses.state
        return Draft(torch.stack(ids, dim=1), chain(len(ids), frontier.root.device))

    def begin(self, frontier: Frontier) -> State:
        """Read the new tokens of B texts (at first, all), keep the last logits [B, V]; returns the root's state."""
        rows = frontier.rows
        self._follow(rows)
        self._first = self._read_new_text(rows)
        self.text_lengths, self.depths = list(self.cache.lengths), []
        self.starts = self.cache.filled.clone()
        return (frontier.root.new_empty(len(rows), 1, 0),)

    def step(self, depth: int, state: State, parent: Tensor, tokens: Tensor, context_kv: ContextKV | None) -> Guesses:
        if depth == 0:  # the root is the text's last token, which was read with the text
            return Guesses(self._candidates(self._first[:, None]), state)
        (above,), (rows, width) = selected(state, parent), tokens.shape
        itself = torch.arange(len(self.depths), len(self.depths) + width, device=self.device)[None, :, None]
        self.depths += [depth - 1] * width
        seen = torch.cat([above, itself.expand(rows, -1, -1)], dim=-1)  # [B, W, A + 1]
        self.cache.open(width)
        self.cache.append(width)
        positions = (self.starts[:, None] + (depth - 1)).expand(-1, width)
        logits = self.reader.forward(tokens, positions, self._masks(seen)).logits
        self.cache.keep([width] * rows)
        return Guesses(self._candidates(logits), (seen,))

    def _candidates(self, logits: Tensor) -> Tensor:
        """Return `logits` [B, W, V] of W nodes; in sampled drafts, all but the `topk` largest of a node are -inf."""
        if self.target is None or not self.source.topk or self.source.topk >= logits.shape[-1]:
            return logits
        limit = top_k(logits, self.source.topk).values[..., -1:]
        return logits.masked_fill(logits < limit, -torch.inf)

    def _masks(self, seen: Tensor) -> Mask | None:
        """Make attention masks [B, 1, W, S] of W nodes over S cache slots; `None` if a causal mask is enough.

        A node sees the text, and the slots `seen` [B, W, A + 1] of its A drafted ancestors and itself."""
        if self.layers.is_full and self.cache.even is not None and self.is_chain:
            return None
        depth = torch.full(seen.shape[:2], seen.shape[-1] - 1, device=self.device)
        of_all = on_device(self.depths, self.device)
        return self.reader.grown_masks(self.starts, seen, depth, of_all)
