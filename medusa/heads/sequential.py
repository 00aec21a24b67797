"""Sequential heads: head k reads a state (tensors from head k - 1) and, in most kinds, the tokens before its guess.

Let h be the backbone's hidden state and e an embedding. Token t_0 is the root: the next token, which the backbone has
chosen. Heads count from 0: token t_k is the guess of head k - 1. Head k computes x_k, to which its LM head is applied:

    cascade     x_k = blocks(x_{k-1})                            with x_{-1} = h
    recurrent   x_k = blocks([x_{k-1} ; e(t_k)])
    hydra       x_k = blocks([h ; e(t_0) ; e(t_1) ; ... ; e(t_k)])     arXiv 2402.05109

In training the tokens t are those of the text. In decoding they are nodes of the tree. Recurrent and hydra heads
then run level by level: head k runs once, on all nodes of depth k that get children.

Shapes: ... any positions or nodes, K heads, H hidden size, S size of one tensor in a state, V vocabulary size."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.blocks import ORIGINAL_HYDRA, OriginalHydraStack, Stack
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import LMHead, MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.heads.stacked import product

State = tuple[Tensor, ...]  # tensors [..., S] that a head passes to the next head, the same for all children of a node


class SequentialHeads(MedusaHeads, ABC):
    """K heads that run one after the other. Except in EAGLE, a head is a stack of blocks. Subclasses define `step`."""

    @classmethod
    def module_counts(cls, config: MedusaConfig) -> dict[str, int]:
        counts = super().module_counts(config)
        return counts | {"block": config.num_heads * counts["block"]}

    def make_blocks(self) -> None:
        stack = OriginalHydraStack if self.config.block == ORIGINAL_HYDRA else Stack
        self.stacks = nn.ModuleList(stack(self.config, self.input_size(head)) for head in range(self.config.num_heads))

    def input_size(self, head: int) -> int:
        """Return the input size of the first block of head `head` (an index from 0)."""
        return self.config.hidden_size

    @abstractmethod
    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        """Compute the features [..., H] of the head with index `head`, and the state for the next head.

        Args:
            state: what the previous head returned; for head 0, a tuple of the backbone's hidden states [..., H].
            token: [..., H] embedding of the token just before each guess; may be `None` in kinds that read no tokens.
            context_kv: keys and values of the earlier text; `None` without such text or in kinds that ignore it."""

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        hidden, _, context_kv = inputs
        following = self.require_following(inputs) if self.follows_path else inputs.following
        state: State = (hidden,)
        found = []
        for head in range(self.config.num_heads if num_heads is None else num_heads):
            token = None if following is None else following[..., head, :]
            feature, state = self.step(head, state, token, context_kv)
            found.append(feature)
        return torch.stack(found)

    def require_following(self, inputs: HeadInputs) -> Tensor:
        """Return the embeddings [..., K, H] of the tokens after each position; raise RequestError without them."""
        if inputs.following is None:
            raise RequestError(f"heads of kind {self.config.kind} guess from earlier tokens; pass `following`")
        return inputs.following

    def logits_of(self, head: int, features: Tensor, lm_head: LMHead) -> Tensor:
        """Compute the logits [..., V] of head `head` from its features [..., H], by its own LM head or `lm_head`."""
        if self.lm_heads is None:
            return lm_head(features)
        own = head % len(self.lm_heads)  # with `lm_head: one` there is only one
        logits = product(features.reshape(1, -1, features.shape[-1]), self.lm_heads, slice(own, own + 1))
        return logits.view(*features.shape[:-1], logits.shape[-1])


class CascadeHeads(SequentialHeads):
    """Cascaded heads: each reads the previous head's features [..., H] (the state), and head 0 the hidden states.

    Cascaded heads do not read the guessed tokens. So all nodes of a level have the same guesses as children, and a
    decoding step costs as much as with independent heads."""

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        (previous,) = state
        feature = self.stacks[head](previous, previous)
        return feature, (feature,)


class RecurrentHeads(SequentialHeads):
    """Recurrent heads: each reads the previous head's features [..., H] (the state) and the token before its guess."""

    follows_path = True

    def input_size(self, head: int) -> int:
        return 2 * self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        (previous,) = state
        feature = self.stacks[head](previous, torch.cat([previous, normalised(token)], dim=-1))
        return feature, (feature,)


class HydraHeads(SequentialHeads):
    """Hydra heads: head k reads the hidden state and all k + 1 tokens after it, concatenated to [..., (k + 2) H].

    The state for head k is [..., (k + 1) H]: the hidden state and the embeddings of the first k tokens.

    Heads from original Hydra checkpoints (block `hydra`, read by `medusa.checkpoints.hydra`) differ from heads trained
    here. The first block of each adds its output to a learned linear map of its input, not to the hidden state. These
    heads do not normalise embeddings, and their LM heads have a bias."""

    follows_path = True
    foreign_block_types = fixed_block_types = (ORIGINAL_HYDRA,)
    published_form = "medusa.checkpoints.hydra:FORM"

    @classmethod
    def check(cls, config: MedusaConfig) -> None:
        if config.block == ORIGINAL_HYDRA and config.lm_head != "own":
            raise RequestError("heads.block hydra needs heads.lm_head=own; take square or mlp")

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.lm_biases: nn.Parameter | None = None
        if config.block == ORIGINAL_HYDRA and self.lm_heads is not None:
            self.lm_biases = nn.Parameter(torch.zeros(config.num_heads, self.lm_heads.shape[-1]))

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
    """Scale vectors [..., H] such as embeddings to root mean square 1, because backbones differ in their scale."""
    return F.rms_norm(token, token.shape[-1:])
