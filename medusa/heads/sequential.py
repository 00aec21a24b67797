"""Sequential heads: head k starts from the state of head k - 1, and from the token before its own token on the path.

That token is the root for head 0 and the first guess for head 1. In training it is a token of the text. In decoding it
is a node's token, so that heads run level by level of the tree. With the hidden state h and embeddings e, head k
computes x_k, to which the LM head is applied:

    cascade     x_k = blocks(x_{k-1})            x_{-1} = h. All guesses of a head have the same children.
    recurrent   x_k = blocks([x_{k-1} ; e(guess k)])                          guess 0 is the root
    hydra       x_k = blocks([h ; e(root) ; e(guess 1) ; ... ; e(guess k)])   arXiv 2402.05109

A kind can also attend to the text (`uses_context`): to pairs of a hidden state and the token after it, at all positions
before the one that head 0 starts from.

Shapes: ... any positions or nodes, K heads, H hidden size, S size of a part of a state, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import ORIGINAL_HYDRA, MedusaConfig
from medusa.errors import RequestError
from medusa.heads.blocks import OriginalHydraStack, Stack
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import LMHead, MedusaHeads
from medusa.heads.inputs import HeadInputs

State = tuple[Tensor, ...]
"""The state that a head leaves to the next one: tensors [..., S], which all children of a node share."""


class SequentialHeads(MedusaHeads, ABC):
    """K heads in a row. A kind defines its modules (`make_blocks`) and the computation of one head (`step`)."""

    @abstractmethod
    def make_blocks(self) -> None: ...

    def begin(self, hidden: Tensor) -> State:
        """hidden [..., H] of the backbone -> the state that head 0 starts from."""
        return (hidden,)

    @abstractmethod
    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        """Run one head.

        Args:
            head: its number, from 0.
            state: the state of the head before.
            token: [..., H] embedding of the token before the guessed one, for kinds that follow the path.
            context_kv: keys and values of the text before, for kinds that look back; `None`: there is none.

        Returns:
            The output [..., H], to which the LM head is applied, and the state that the next head starts from.
        """

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        hidden, following, context_kv = inputs
        if self.follows_path and following is None:
            raise RequestError(f"heads of kind {self.config.kind} guess from the tokens before; pass `following`")
        state, found = self.begin(hidden), []
        for head in range(self.config.num_heads if num_heads is None else num_heads):
            token = None if following is None else following[..., head, :]
            feature, state = self.step(head, state, token, context_kv)
            found.append(feature)
        return torch.stack(found)

    def logits_of(self, head: int, features: Tensor, lm_head: LMHead) -> Tensor:
        """features [..., H] of one head -> its logits [..., V]."""
        return lm_head(features) if self.lm_heads is None else features @ self.lm_heads[head]


class StackedHeads(SequentialHeads):
    """Sequential heads with a stack of blocks each; a kind defines the size of their inputs."""

    def make_blocks(self) -> None:
        stack = OriginalHydraStack if self.config.block == ORIGINAL_HYDRA else Stack
        self.stacks = nn.ModuleList(stack(self.config, self.input_size(head)) for head in range(self.config.num_heads))

    @abstractmethod
    def input_size(self, head: int) -> int:
        """The size of a head's input to its first block."""


class CascadeHeads(StackedHeads):
    """Cascaded heads, whose state is the output [..., H].

    A guess depends on the computation of the guesses before it, not on which of them was chosen. So the tree stays a
    product of every head's best guesses, and a step costs as much as with independent heads.
    """

    def input_size(self, head: int) -> int:
        return self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        (above,) = state
        feature = self.stacks[head](above, above)
        return feature, (feature,)


class RecurrentHeads(StackedHeads):
    """Recurrent heads, whose state is the output [..., H]. Inputs stay 2 H wide at every depth of the tree."""

    follows_path = True

    def input_size(self, head: int) -> int:
        return 2 * self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        (above,) = state
        feature = self.stacks[head](above, torch.cat([above, normalised(token)], dim=-1))
        return feature, (feature,)


class HydraHeads(StackedHeads):
    """Hydra heads, whose state is the input z of the head before [..., (k + 1) H].

    Heads that are trained here add a block of z to h, and scale embeddings to the hidden state. The original's (block
    `hydra`, read by `medusa.checkpoints.hydra`) add the block to a learned matrix times z instead of h, take embeddings
    as they are, and have LM heads with a bias.
    """

    follows_path = True

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.lm_biases: nn.Parameter | None = None
        if config.block == ORIGINAL_HYDRA and config.vocab_size is not None:
            tokens = config.draft_vocab_size(config.vocab_size)
            self.lm_biases = nn.Parameter(torch.zeros(config.num_heads, tokens))

    def input_size(self, head: int) -> int:
        return (head + 2) * self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        seen = torch.cat([*state, normalised(token) if self.lm_biases is None else token], dim=-1)
        return self.stacks[head](seen[..., : self.config.hidden_size], seen), (seen,)

    def logits(self, features: Tensor, lm_head: LMHead | None = None) -> Tensor:
        logits = super().logits(features, lm_head)
        if self.lm_biases is None:
            return logits
        biases = self.lm_biases[: len(features)]
        return logits + biases.view(len(biases), *[1] * (logits.ndim - 2), -1)

    def logits_of(self, head: int, features: Tensor, lm_head: LMHead) -> Tensor:
        logits = super().logits_of(head, features, lm_head)
        return logits if self.lm_biases is None else logits + self.lm_biases[head]


def normalised(token: Tensor) -> Tensor:
    """An embedding [..., H] at the scale of a hidden state: root mean square 1, whatever the backbone's scale."""
    return F.rms_norm(token, token.shape[-1:])
