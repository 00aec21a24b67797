"""Medusa heads: from one hidden state of the backbone to guesses for the tokens after the next (paper section 2.1).

Head k (counted from 0) guesses the token at distance k + 2 from the position of its hidden state; the backbone's own
LM head guesses distance 1. The weights of all heads are stacked, so that they cost a few batched matrix products and
no Python loop.

Shapes: K heads, H hidden size, E width of an MLP block, V vocabulary, M positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.context_kv import ContextKV, visible
from medusa.heads.inputs import HeadInputs, following_ids

if TYPE_CHECKING:
    from pathlib import Path

    from medusa.heads.prefix import Prefix

LMHead = Callable[[Tensor], Tensor]


class SquareBlock(nn.Module):
    """The paper's residual block, one per head: x + SiLU(x W + b), with W = b = 0 at the start (section 2.1.1)."""

    def __init__(self, num_heads: int, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        del inner_size  # the square block is as wide as the hidden state
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size))  # [K, in, out]
        self.bias = nn.Parameter(torch.zeros(num_heads, 1, hidden_size))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x_KMH: Tensor, heads: slice) -> Tensor:
        return x_KMH + self.dropout(F.silu(torch.baddbmm(self.bias[heads], x_KMH, self.weight[heads])))


class MLPBlock(nn.Module):
    """A residual MLP per head: x + SiLU(x U + b) D + c. Only D and c start at zero, so every weight learns."""

    def __init__(self, num_heads: int, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_heads, hidden_size, inner_size))  # [K, H, E]
        self.up_bias = nn.Parameter(torch.zeros(num_heads, 1, inner_size))
        self.down = nn.Parameter(torch.zeros(num_heads, inner_size, hidden_size))  # [K, E, H]
        self.down_bias = nn.Parameter(torch.zeros(num_heads, 1, hidden_size))
        self.dropout = nn.Dropout(0.0)
        nn.init.uniform_(self.up, -(hidden_size**-0.5), hidden_size**-0.5)  # as nn.Linear draws its weights

    def forward(self, x_KMH: Tensor, heads: slice) -> Tensor:
        inner = F.silu(torch.baddbmm(self.up_bias[heads], x_KMH, self.up[heads]))
        return x_KMH + self.dropout(torch.baddbmm(self.down_bias[heads], inner, self.down[heads]))


BLOCKS: dict[str, type[SquareBlock] | type[MLPBlock]] = {"square": SquareBlock, "mlp": MLPBlock}


class MedusaHeads(nn.Module):
    """K independent heads on a frozen backbone's last hidden state (the LM head's input); the base of all other kinds.

    With `lm_head: own` each head owns an LM head [V, H]; with `lm_head: shared` the backbone's is applied to each
    head's output, so the caller passes it in: heads never hold a part of the backbone.
    """

    follows_path: ClassVar[bool] = False
    """Whether a guess depends on the tokens before it, so that the tree is grown level by level."""
    uses_context: ClassVar[bool] = False
    """Whether heads look back at the text before (`context_kv`), so that decoding keeps keys and values for them."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.provenance: dict[str, Any] | None = None
        """Where they come from, as `provenance.json` says; `None` where nobody knows."""
        self.vocabulary: Tensor | None
        known = None if config.vocabulary is None else torch.arange(config.vocabulary)
        self.register_buffer("vocabulary", known)  # [N] tokens that these heads guess; None: all (medusa.vocabulary)
        # Of which LM head, for which tokens: those rows. In a tuple, as they are no part of the heads.
        self.shared_rows: tuple[weakref.ref[Tensor], Tensor, nn.Linear] | None = None
        self.prefix: Prefix | None = None
        if config.prefix_layers:
            from medusa.heads.prefix import Prefix  # with transformers, which independent heads do without

            self.prefix = Prefix(config.hidden_size, config.prefix_layers, **config.prefix or {})
        self.make_blocks()
        self.lm_heads: nn.Parameter | None = None
        if config.lm_head == "own":
            if config.vocab_size is None:
                raise RequestError("heads with LM heads of their own need heads.vocab_size; give the backbone's")
            # [K, H, V] and contiguous: at one position a batched product over [K, V, H] is 2.6 times slower on a CPU.
            words = config.words(config.vocab_size)
            self.lm_heads = nn.Parameter(torch.zeros(config.num_heads, config.hidden_size, words))

    def make_blocks(self) -> None:
        """What lies between the hidden state and the LM head."""
        block, config = BLOCKS[self.config.block], self.config
        self.blocks = nn.ModuleList(
            block(config.num_heads, config.hidden_size, config.inner_size) for _ in range(config.num_layers)
        )

    def start_from(self, lm_head_weight_VH: Tensor) -> None:
        """Own LM heads start as copies of the backbone's, so that the heads begin as its own guess, but for a bias."""
        if self.lm_heads is not None:
            with torch.no_grad():
                rows = slice(None) if self.vocabulary is None else self.vocabulary.to(lm_head_weight_VH.device)
                self.lm_heads.copy_(lm_head_weight_VH[rows].T)

    def set_dropout(self, rate: float) -> None:
        """What share of each block's output to drop while training, before it is added to the residual stream (Vaswani
        et al. 2017, section 5.4). Prefix layers drop nothing.

        Raises:
            RequestError: a kind of heads without such blocks.
        """
        found = [module for module in self.modules() if isinstance(module, nn.Dropout)]
        if not found:
            raise RequestError(
                f"training.dropout: heads of kind {self.config.kind} have no block to drop; leave it out"
            )
        for module in found:
            module.p = rate

    def read(self, hidden: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """The backbone's hidden states [B, T, H] of whole texts -> what the heads read of them [B, T, H].

        The same, unless there is prefix attention; that never looks into another document (`document_ids` [B, T]).
        """
        if self.prefix is None:
            return hidden
        return self.prefix(hidden, position_ids, visible(hidden.shape[1], document_ids, hidden.device)[:, None])

    def project_kv(self, hidden: Tensor, token: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """hidden, and the embedding of the token after it, both [B, T, H], at positions [B, T] -> keys and values.

        Both are [B, A, T, D]; for kinds that look back.
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
        """The heads' inputs at positions of whole texts; training, evaluation and calibration all take them from here.

        Args:
            hidden: [B, T, H] the backbone's hidden states.
            input_ids: [B, T or more] the texts. Tokens after the last hidden state are seen as what follows it.
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
            context_kv = ContextKV.of_texts(keys, values, position_ids, document_ids, self.config.num_heads, place)
        if place is not None:
            read, ids = read.flatten(0, 1)[place], ids.flatten(0, 1)[place]
        if self.follows_path:
            with torch.no_grad():
                following = embed(ids).to(hidden)
        return HeadInputs(read, following, context_kv)

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        """Inputs at positions [...] -> what the LM head is applied to [k, ..., H].

        Only the first k = `num_heads` heads run (all by default). Independent heads look at the hidden states alone.
        """
        heads, hidden = slice(num_heads), inputs.hidden
        count = len(range(self.config.num_heads)[heads])
        x_KMH = hidden.reshape(1, -1, hidden.shape[-1]).expand(count, -1, -1)
        for block in self.blocks:
            x_KMH = block(x_KMH, heads)
        return x_KMH.reshape(count, *hidden.shape)

    def logits(self, features: Tensor, lm_head: LMHead | None = None) -> Tensor:
        """features [k, ..., H] of the first k heads -> logits [k, ..., V]; [k, ..., N] of N tokens (`vocabulary`).

        `lm_head`: the backbone's, or what `medusa.vocabulary.lm_head_for` makes of it.
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

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> MedusaHeads:
        """Heads from a local folder or the Hub, in any form that `medusa.checkpoints.load.load_heads` reads.

        `kwargs`: `revision`, `token`, `cache_dir`, `local_files_only`, `dtype` and `device`, as there.
        """
        from medusa.checkpoints.load import load_heads  # the file formats import this module

        return load_heads(name_or_path, **kwargs)

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Write config and weights into `folder`; see `medusa.checkpoints.load.save_heads`."""
        from medusa.checkpoints.load import save_heads

        save_heads(self, folder, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Publish them on the Hub, with a model card and code for plain transformers; returns the commit's address.

        `kwargs`: `private`, `token`, `revision`, `commit_message`, `license` and `benchmark`, as
        `medusa.export.repository.push`.
        """
        from medusa.export.repository import push

        return push(self, repo_id, **kwargs)


def bytes_of(module: nn.Module) -> int:
    """Of its parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
