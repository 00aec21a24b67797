"""Medusa heads: guesses for the tokens after the next one, from one hidden state of the backbone (paper section 2.1).

Head k (counted from 0) guesses the token at distance k + 2 from the position of its hidden state; the backbone's own
LM head predicts distance 1.

Shapes: K heads, H hidden size, V vocabulary, N tokens that heads guess among, B rows, T tokens, ... any positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.blocks import STACKED_BLOCKS
from medusa.heads.context_kv import ContextKV, visible
from medusa.heads.inputs import HeadInputs, following_ids
from medusa.heads.pretrained import PretrainedHeads

if TYPE_CHECKING:
    from medusa.heads.prefix import Prefix

LMHead = Callable[[Tensor], Tensor]
"""hidden [..., H] -> logits [..., V]."""


class MedusaHeads(PretrainedHeads):
    """K independent heads on a frozen backbone's last hidden state, and the base class of all other kinds.

    With `lm_head: own` each head has an LM head. With `lm_head: shared` the caller passes the backbone's LM head in, so
    that heads never hold a part of the backbone.
    """

    follows_path: ClassVar[bool] = False
    """Whether a guess depends on the tokens before it, so that a tree grows level by level."""
    uses_context: ClassVar[bool] = False
    """Whether heads attend to the text before, so that decoding keeps keys and values for them."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.vocabulary: Tensor | None
        """[N] the tokens that heads guess among (`medusa.vocabulary`); `None`: all."""
        self.register_buffer("vocabulary", None if config.vocabulary is None else torch.arange(config.vocabulary))
        self.prefix: Prefix | None = None
        if config.prefix_layers:
            from medusa.heads.prefix import Prefix  # needs transformers; independent heads do not

            self.prefix = Prefix(config)
        self.make_blocks()
        self.lm_heads: nn.Parameter | None = None
        if config.lm_head == "own":
            if config.vocab_size is None:
                raise RequestError("heads with LM heads of their own need heads.vocab_size; give the backbone's")
            # [K, H, V] and contiguous: at one position a batched product over [K, V, H] is 2.6 times slower on a CPU.
            tokens = config.draft_vocab_size(config.vocab_size)
            self.lm_heads = nn.Parameter(torch.zeros(config.num_heads, config.hidden_size, tokens))

    def make_blocks(self) -> None:
        """Make the modules between the hidden state and the LM head."""
        block, config = STACKED_BLOCKS[self.config.block], self.config
        self.blocks = nn.ModuleList(block(config) for _ in range(config.num_layers))

    def start_from(self, lm_head_weight_VH: Tensor) -> None:
        """Copy the backbone's LM head [V, H], without its bias, into each head's, so that heads begin at its guess."""
        if self.lm_heads is not None:
            with torch.no_grad():
                rows = slice(None) if self.vocabulary is None else self.vocabulary.to(lm_head_weight_VH.device)
                self.lm_heads.copy_(lm_head_weight_VH[rows].T)

    def set_dropout(self, rate: float) -> None:
        """Set the share of each block's output that training drops (Vaswani et al. 2017, section 5.4).

        The share is dropped before it is added to the residual stream. Prefix layers drop nothing.

        Raises:
            RequestError: heads of this kind have no blocks with dropout.
        """
        found = [module for module in self.modules() if isinstance(module, nn.Dropout)]
        if not found:
            raise RequestError(
                f"training.dropout: heads of kind {self.config.kind} have no block to drop; leave it out"
            )
        for module in found:
            module.p = rate

    def read(self, hidden: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Run prefix layers, if there are any, on the backbone's hidden states [B, T, H] of whole texts: [B, T, H].

        Positions attend to positions before them in the same document only (`document_ids` [B, T]).
        """
        if self.prefix is None:
            return hidden
        return self.prefix(hidden, position_ids, visible(hidden.shape[1], document_ids, hidden.device)[:, None])

    def project_kv(self, hidden: Tensor, token: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, A, T, D] of the text, for kinds that look back, with A attention heads of size D.

        Args:
            hidden, token: [B, T, H] hidden states, and embeddings of the tokens after them.
            position_ids: [B, T].
        """
        raise NotImplementedError(f"heads of kind {self.config.kind} do not look back at the text")

    def inputs(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        embed: Callable[[Tensor], Tensor],
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        place: Tensor | None = None,
        num_heads: int | None = None,
    ) -> HeadInputs:
        """The inputs of the heads at positions of whole texts.

        Args:
            hidden: [B, T, H] the backbone's hidden states.
            input_ids: [B, T or more] the texts. Tokens after the last hidden state count as the tokens that follow it.
            embed: the backbone's input embeddings (`Backbone.embed`).
            position_ids, document_ids: [B, T]; by default each row is one document that starts at position 0.
            place: [R] indices of the wanted positions among all B x T; by default all of them, as [B, T].
            num_heads: number of heads that will run (all by default).
        """
        hidden = hidden.to(self.device, self.dtype)
        rows, length = hidden.shape[:2]
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden.device).expand(rows, -1)
        read = self.read(hidden, position_ids, document_ids)
        ids = following_ids(input_ids, num_heads or self.config.num_heads)[:, :length]  # [B, T, K]
        context_kv = following = None
        if self.uses_context:
            with torch.no_grad():
                token = embed(ids[..., 0]).to(hidden)
            keys, values = self.project_kv(read, token, position_ids)
            # Each position sees the earlier pairs of its document. The pair at the position is the first of its path.
            earlier = visible(length, document_ids, hidden.device, before=1)
            positions = position_ids if place is None else position_ids.flatten()[place]
            context_kv = ContextKV(keys, values, earlier, positions, self.config.num_heads, place)
        if place is not None:
            read, ids = read.flatten(0, 1)[place], ids.flatten(0, 1)[place]
        if self.follows_path:
            with torch.no_grad():
                following = embed(ids).to(hidden)
        return HeadInputs(read, following, context_kv)

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        """Run the first k = `num_heads` heads (all by default) at positions [...]: outputs [k, ..., H] for LM heads.

        Independent heads read the hidden states alone.
        """
        heads, hidden = slice(num_heads), inputs.hidden
        count = len(range(self.config.num_heads)[heads])
        x_KMH = hidden.reshape(1, -1, hidden.shape[-1]).expand(count, -1, -1)
        for block in self.blocks:
            x_KMH = block(x_KMH, heads)
        return x_KMH.reshape(count, *hidden.shape)

    def logits(self, features: Tensor, lm_head: LMHead | None = None) -> Tensor:
        """features [k, ..., H] of the first k heads -> logits [k, ..., V], or [k, ..., N] with a `vocabulary`.

        `lm_head`: the result of `medusa.vocabulary.lm_head_for`, for heads that share the backbone's.
        """
        if self.lm_heads is None:
            if lm_head is None:
                raise RequestError("these heads share the backbone's LM head; pass it as `lm_head`")
            return lm_head(features)
        flat = features.reshape(features.shape[0], -1, features.shape[-1])
        logits = torch.bmm(flat, self.lm_heads[: features.shape[0]])
        return logits.reshape(*features.shape[:-1], logits.shape[-1])

    def forward(self, inputs: HeadInputs, lm_head: LMHead | None = None, num_heads: int | None = None) -> Tensor:
        """Inputs at positions [...] -> logits [k, ..., V] of the first k = `num_heads` heads (all by default)."""
        return self.logits(self.features(inputs, num_heads), lm_head)
