"""A small model that drafts for a large one (Leviathan et al. 2023, Chen et al. 2023): a chain, or a tree.

It reads the text into a KV cache of its own, and then what it has drafted itself, a level of the tree in each forward.
Which of that became text shows in the text: the drafted nodes on its way are kept in the cache, the others forgotten.

Shapes: B rows, W nodes of a level that are read, A of their ancestors in the tree, V vocabulary, S slots, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decode.cache import TreeCache
from decode.draft import Draft, Drafter, DrafterConfig, DrafterContext, DrafterFactory, Frontier
from decode.drafters import require_at_least, require_no_tree
from decode.drafters.dynamic_tree import DynamicTree
from decode.drafters.paths import PathDrafter
from decode.drafters.small_model import companion_path, load_companion, require_same_vocabulary
from decode.drafters.tries import chain
from decode.loop import Session
from decode.ops.fast_topk import argmax, top_k
from decode.ops.grouped_attention import grouped
from decode.prefill import prefill
from decode.sampling import Target
from decode.topology import Topology
from decode.tree_check import require_tree_forward
from decode.verify import Mask, Verifier, layer_kinds, path_masks
from medusa.backbone import Backbone, require_tree_support
from medusa.errors import RequestError
from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import State
from medusa.loading import load_config
from medusa.memory import bytes_of
from medusa.tree import Layout, Tree


@dataclass(frozen=True)
class DraftModelConfig(DrafterConfig):
    """A draft model by name."""

    model: str
    """A local folder, a Hub id, or demo: the one that comes with the embedded backbone."""
    tokens: int = 4
    """How far ahead is drafted."""
    widths: str = ""
    """Children of each node by depth, as in 3x2x1: a tree instead of a chain, as deep as this says."""
    nodes: int = 0
    """Of a dynamic tree, `tokens` deep, root included: in every step the most probable ones; 0: none."""
    topk: int = 0
    """Only the k most probable tokens are candidates wherever guesses are drawn; 0: all."""
    confidence: float = 0.0
    """A chain ends where it is less probable than this."""

    first = "model"
    can_draw = True
    needs = "a small model"

    def __post_init__(self) -> None:
        require_at_least(1, "model", tokens=self.tokens)
        require_at_least(0, "model", topk=self.topk)
        if not self.model:
            raise RequestError("drafter model needs a model: model:FOLDER, model:HUB-ID or model:demo")
        if not 0 <= self.confidence < 1:
            raise RequestError(f"drafter model: confidence is {self.confidence}; it must be from 0 to below 1")
        if sum(map(bool, (self.widths, self.nodes, self.confidence))) > 1:
            raise RequestError("drafter model: give one of widths, nodes and confidence; each has a shape of its own")
        _ = self.tree

    @property
    def tree(self) -> Layout:
        if self.nodes:
            return DynamicTree.over_heads(self.nodes, self.tokens)
        if not self.widths:
            return Tree.chain(self.tokens)
        try:
            return Tree.top_k([int(width) for width in self.widths.split("x")])
        except ValueError:
            raise RequestError(f"drafter model: widths is {self.widths!r}; write numbers such as 3x2x1") from None

    def check(self, config: PretrainedConfig) -> None:
        require_same_vocabulary(self.model, load_config(companion_path(self.model)), config)

    def source(self, materials: DrafterContext) -> DrafterFactory:
        require_no_tree(materials.tree, materials.stop_drafting)
        return DraftModel(load_companion(self.model, materials), self.tree, self.topk, self.confidence)


class DraftModel(DrafterFactory):
    """A loaded draft model and the shape of its drafts."""

    can_draw = True

    def __init__(self, model: PreTrainedModel, tree: Layout, topk: int = 0, confidence: float = 0.0) -> None:
        """Raises:
        RequestError: a model that cannot hold a tree, or a tree wider than its vocabulary."""
        require_tree_support(model)
        require_tree_forward(model)
        self.model, self.tree, self.topk, self.confidence = model, tree, topk, confidence
        tree.require_fit(tree.max_depth, Backbone(model).vocab_size)

    @property
    def num_bytes(self) -> int:
        return bytes_of(self.model)

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        if drawn and (self.tree.is_dynamic or self.confidence):
            raise RequestError("what was drawn would choose the draft's nodes; leave nodes and confidence out")
        return ModelDrafter(self, session, session.target if drawn else None)

    def reshaped(self, change: Callable[[Layout], Layout]) -> DraftModel:
        return DraftModel(self.model, change(self.tree), self.topk)


class Grown(NamedTuple):
    """A level that was read: which nodes stand in the slots behind the text."""

    tokens: Tensor
    """[B, W]."""
    parent: Tensor
    """[B, W] the slot of each node's parent behind the text; -1 for the root."""


class Words:
    """What is asked of heads that grow a tree: which tokens their logits stand for. A model's stand for all."""

    vocabulary = None


ALL_WORDS: Any = Words()


class ModelDrafter(PathDrafter):
    """Keeps the draft model's cache in step with the texts of a session.

    As a `PathDrafter` it grows static and dynamic trees and draws; the state of a node is the list of slots, counted
    from the text's end, of its ancestors [B, W, A].
    """

    def __init__(self, source: DraftModel, session: Session, target: Target | None = None) -> None:
        self.source, self.target, self.heads = source, target, ALL_WORDS
        self.sequences = session.sequences
        self.backbone = Backbone(source.model)
        self.lay_out(source.tree)
        self.is_chain = not self.tree.is_dynamic and self.tree.candidates.max_rank == 0 and target is None
        self.cache = TreeCache(source.model.config, len(session.sequences), session.cache.capacity)
        self.rows = list(range(len(session.sequences)))
        self.text_lengths: list[int] = []
        """Of each row, roots included: where the nodes of the last draft begin in the cache."""
        self.grown: list[Grown] = []
        self.verifiers: dict[int, Verifier] = {}

    def propose(self, frontier: Frontier) -> Draft:
        longest = max(self.sequences.lengths[row] for row in frontier.rows)
        if self.backbone.context is not None and longest + self.tree.max_depth > self.backbone.context:
            return Draft(frontier.root[:, None], chain(1, frontier.root.device))  # it was not made for such a text
        return self._chain(frontier) if self.is_chain else super().propose(frontier)

    # The text

    def _root_logits(self, rows: list[int]) -> Tensor:
        """[B, V] what it expects behind the texts of `rows`, which are then in the cache."""
        if self.rows != rows:
            left = [self.rows.index(row) for row in rows]
            if self.cache.longest:
                self.cache.select(left)
            else:
                self.cache = TreeCache(self.source.model.config, len(rows), self.cache.capacity)
            self.text_lengths = [self.text_lengths[index] for index in left] if self.text_lengths else []
            self.grown = [Grown(level.tokens[left], level.parent[left]) for level in self.grown]
            self.rows = list(rows)
        if not self.text_lengths:
            logits = self._read_prompts(rows)
        else:
            self._keep_what_became_text()
            logits = self._read_news(rows)
        self.text_lengths, self.grown = list(self.cache.lengths), []
        return logits

    def _read_prompts(self, rows: list[int]) -> Tensor:
        texts = [self.sequences.tail(row, 0) for row in rows]
        return prefill(self.backbone, self.cache, self._padded(texts), [len(text) for text in texts]).logits

    def _read_news(self, rows: list[int]) -> Tensor:
        # Whoever asks again without having written gets the same answer.
        ends = [self.sequences.lengths[row] - 1 for row in rows]
        self.cache.cut([min(held, end) for held, end in zip(self.cache.lengths, ends, strict=True)])
        news = [self.sequences.tail(row, held) for row, held in zip(rows, self.cache.lengths, strict=True)]
        counts = [len(new) for new in news]
        width = max(counts)
        if width not in self.verifiers:  # one a width: each keeps the masks of its chain
            self.verifiers[width] = Verifier(self.backbone, self.cache)
        verifier = self.verifiers[width]
        verifier.cache = self.cache
        line = Topology.of(Tree.chain(width - 1).to(self.backbone.device)) if width > 1 else chain(1, self.device)
        logits = verifier(Draft(self._padded(news), line)).logits
        self.cache.commit_prompt(counts)
        last = torch.tensor(counts, device=logits.device) - 1
        return logits[torch.arange(len(rows), device=logits.device), last]

    def _keep_what_became_text(self) -> None:
        """Of the drafted nodes in the cache, those that stand in the text where they were drafted.

        Never the text's last token: whoever asks wants to know what follows it, so it is read again.
        """
        starts = self.text_lengths
        if not self.grown:
            return
        levels = [(level.tokens.tolist(), level.parent.tolist()) for level in self.grown]
        kept: list[list[int]] = []
        for index, (row, start) in enumerate(zip(self.rows, starts, strict=True)):
            path, at, first = [0], -1, 0  # the root, which the text ended in, and behind it the nodes
            for token, (tokens, parents) in zip(self.sequences.tail(row, start)[:-1], levels, strict=False):
                here = zip(tokens[index], parents[index], strict=True)
                found = next((place for place, node in enumerate(here) if node == (token, at)), None)
                if found is None:
                    break
                at = first + found
                path.append(1 + at)
                first += len(tokens[index])
            kept.append(path)
        longest = max(map(len, kept))
        self.cache.reopen([start - 1 for start in starts])
        padded = torch.tensor([line + [0] * (longest - len(line)) for line in kept])
        self.cache.commit(padded, [len(line) for line in kept], in_place=self.is_chain)

    def _padded(self, texts: list[list[int]]) -> Tensor:
        width = max(map(len, texts))
        return torch.tensor([text + [0] * (width - len(text)) for text in texts], device=self.device)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    # The draft

    def _chain(self, frontier: Frontier) -> Draft:
        """The most probable token, and the most probable one behind it: no states, and no mask for a single row."""
        logits, ids = self._root_logits(frontier.rows), [frontier.root]
        worth = torch.ones(len(logits), device=self.device)
        count = min(self.tree.max_depth, max(self.sequences.room(row) for row in frontier.rows) - 1)
        state: State = (frontier.root.new_empty(len(frontier.rows), 1, 0),)
        for depth in range(1, count + 1):
            token = argmax(logits)
            if self.source.confidence:
                best = logits.float().softmax(-1).gather(-1, token[:, None])[:, 0]
                worth = worth * best
                if bool((worth < self.source.confidence).all()):
                    break
            ids.append(token)
            if depth < count:
                found, state = self._step(depth, state, token[:, None], None)
                logits = found[:, 0]
        return Draft(torch.stack(ids, dim=1), chain(len(ids), frontier.root.device))

    def _begin(self, frontier: Frontier) -> State:
        self._first = self._root_logits(frontier.rows)
        return (frontier.root.new_empty(len(frontier.rows), 1, 0),)

    def _step(self, head: int, state: State, tokens: Tensor, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        """Ancestors [B, W, A] and tokens [B, W] of nodes -> logits [B, W, V] of what follows, and with themselves."""
        if head == 0:  # the root is the text's last token
            return self._candidates(self._first[:, None]), state
        (above,), (rows, width) = state, tokens.shape
        offset = self.cache.lengths[0] - self.text_lengths[0]
        itself = torch.arange(offset, offset + width, device=self.device).expand(rows, -1)[:, :, None]
        parent = above[:, :, -1] if above.shape[-1] else torch.full_like(tokens, -1)
        self.grown.append(Grown(tokens, parent))
        line = torch.cat([above, itself], dim=-1)  # [B, W, A + 1]
        positions = torch.tensor(self.text_lengths, device=self.device)[:, None] + (head - 1)
        with grouped(self.backbone.config):
            logits = self.backbone.forward(
                tokens,
                self.cache,
                position_ids=positions.expand(-1, width),
                attention_mask=self._mask(line),
            ).logits
        self.cache.commit_prompt([width] * rows)
        return self._candidates(logits), (line,)

    def _candidates(self, logits: Tensor) -> Tensor:
        """Without what is no candidate: only draws can tell."""
        if self.target is None or not self.source.topk or self.source.topk >= logits.shape[-1]:
            return logits
        least = top_k(logits, self.source.topk).values[..., -1:]
        return logits.masked_fill(logits < least, -torch.inf)

    def _mask(self, line: Tensor) -> Mask | None:
        """line [B, W, A + 1] slots behind the text that each node sees -> masks [B, 1, W, S]; it sees the text, too."""
        if layer_kinds(self.backbone.config) == ["full_attention"] and self.cache.is_even and self.is_chain:
            return None
        depths = [at for at, level in enumerate(self.grown) for _ in level.tokens[0]]
        starts = torch.tensor(self.text_lengths, device=self.device)
        depth = torch.full(line.shape[:2], line.shape[-1] - 1, device=self.device)
        return path_masks(self.backbone, starts, line, depth, torch.tensor(depths, device=self.device))
