"""Heads that follow the path (`medusa.heads.sequential`) as a drafter: their trees are grown level by level."""

from __future__ import annotations

from torch import Tensor

from decode.draft import Frontier
from decode.drafters.heads import require_draftable
from decode.drafters.levelwise import LevelwiseDrafter
from decode.target import Target
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import SequentialHeads, State
from medusa.tree import Layout
from medusa.vocabulary import lm_head_for, over_all, token_ids


class PathDrafter(LevelwiseDrafter):
    """Grows or draws a tree with one head per level."""

    def __init__(self, heads: SequentialHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Raises:
        RequestError: heads of another size than the backbone, or a tree that they cannot fill or draw."""
        require_draftable(heads.config, backbone, tree, drawn=target is not None)
        super().__init__(tree.to(backbone.device), target)
        self.heads, self.backbone, self.dtype = heads, backbone, heads.dtype
        self.lm_head = lm_head_for(heads, backbone)

    def begin(self, frontier: Frontier) -> State:
        return self.heads.begin(frontier.hidden.to(self.heads.device, self.heads.dtype)[:, None])

    def step(self, depth: int, state: State, tokens: Tensor, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        embedded = self.backbone.embed(tokens).to(device=state[0].device, dtype=self.dtype)
        features, state = self.heads.step(depth, state, embedded, context_kv)
        return self.heads.logits_of(depth, features, self.lm_head), state

    def token_ids(self, guesses: Tensor) -> Tensor:
        return token_ids(self.heads, guesses)

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        return over_all(self.heads, logits, self.backbone.vocab_size)
