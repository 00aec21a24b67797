"""Block drafters (DFlash and DSpark): one pass over a block of tokens guesses all tokens after the root.

The features of the text join the states of several layers of the backbone: c = norm(fc([h_i ; h_j ; ...])). Let p be
the root's position, and n the size of the block. Its inputs are the embeddings of the root and of n - 1 mask tokens, at
the positions p to p + n - 1. L layers of Qwen3's shape read them:

    x' = x + attention(norm(x))      x'' = x' + W (SiLU(G norm(x')) * U norm(x'))

Keys and values of the text are those of c at the positions 0 to p - 1, by the matrices and the key norm of each layer,
but without its input norm. c is the same in all layers, so the keys of accepted tokens are stored without running the
layers. In the block, a token sees all others or only earlier ones. A layer can have a window. The LM head reads norm(x)
at K of the n tokens. Guess k, from 0, is of position p + k + 1:

    layout `fill`      at the guess's own position, so K = n - 1 (DFlash)
    layout `shifted`   at the token before it, so K = n (DSpark)

With `edges: none` all guesses are independent of each other. With `edges: markov` the logits of guess k also depend on
the token a before it, by tables of rank r: <W1[a], W2[b]> is added to the logit of token b (DSpark). With `edges:
pairwise` it is <W1[a] * Q x, W2[b]>, where x is what the LM head reads (DFlash 2). So features [x ; code] have H + r
numbers, and W2 is r more columns of the LM head.

With `confidence`, heads with Markov edges also predict the probability that guess k is accepted after the token a:
sigmoid(<w, [x ; W1[a]]> + b) (DSpark), or without W1[a] in some files.

With `conv`, convolutions surround attention and MLP (DFlash 2): y_t = sum over j of (base_j + d_tj) * x_{t - j}, with
zeros before the block. A product of the sublayer's normed input gives d, which the channels of a group share.

Shapes: `...` any positions, B rows, T tokens, H hidden size, E size of the states of all read layers, V vocabulary, N
tokens among which the heads guess, r rank of the edges (0 without), L layers, G heads of keys, D their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.block_kv import BlockKV
from medusa.heads.context_kv import KV, Append, AttendsToText, Rope
from medusa.heads.dflash_layer import BlockLayer, DflashSettings, block_sizes, check_dflash, unserved
from medusa.heads.eagle_layer import GATED
from medusa.heads.independent import LMHead, MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.heads.kind import BLOCK_TRELLIS, TREE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DflashHeads(MedusaHeads, AttendsToText):
    """Block drafters: all heads together are one pass over the root and mask tokens."""

    Settings = DflashSettings
    block_types = (GATED,)
    lm_head_forms = ("shared", "one")
    reads_layers = joins_layers = True
    reads_root = True
    reads_pairs = False
    usual_path_dropout = 0.4
    form = "dflash"
    published_form = "medusa.checkpoints.dflash:FORM"

    @classmethod
    def check(cls, config: MedusaConfig) -> None:
        check_dflash(config)

    @classmethod
    def trains(cls, config: MedusaConfig) -> bool:  # the loss reads plain LM heads
        own = DflashSettings.of(config)
        return own.logit_scale == 1 and own.logit_cap is None

    @classmethod
    def module_counts(cls, config: MedusaConfig) -> dict[str, int]:
        return {"layer": cls.decoder_layers(config)}

    @classmethod
    def decoder_layers(cls, config: MedusaConfig) -> int:
        return block_sizes(config)["layers"]

    @classmethod
    def inner_width(cls, config: MedusaConfig) -> int | None:
        return block_sizes(config)["width"]

    @classmethod
    def drafts_by(cls, config: MedusaConfig) -> str:
        return TREE if DflashSettings.of(config).edges == "none" else BLOCK_TRELLIS

    @classmethod
    def has_shortlist(cls, config: MedusaConfig) -> bool:
        return DflashSettings.of(config).edges != "none"

    @classmethod
    def servable(cls, config: MedusaConfig) -> bool:
        return not unserved(config)

    def make_blocks(self) -> None:
        config, own, sizes = self.config, DflashSettings.of(self.config), block_sizes(self.config)
        size, eps, layers = sizes["hidden_size"], sizes["eps"], sizes["layers"]
        self.rope = Rope(sizes["head_size"], sizes["rope"])
        self.windows = cast("list[int | None]", own.windows or [None] * layers)
        self.causal = cast("list[bool]", own.causal or [False] * layers)
        reach = [window for window in self.windows if window is not None]
        self.window = max(reach) if len(reach) == layers else None
        self.tokens = config.num_heads + (own.layout == "fill")  # n
        self.rank, self.path_dropout = own.rank or 0, 0.0
        self.follows_path = own.edges != "none"
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(sizes, own.conv) for _ in range(layers))
        self.reads_raw_embeddings = own.embeddings == "shared"
        vocab_size = config.vocab_size or 1
        self.embedding = nn.Embedding(vocab_size, size) if own.embeddings == "own" else None
        self.mask = nn.Parameter(torch.zeros(size)) if own.mask_token is None else None
        self.before = self.after = self.project = None
        if own.edges == "pairwise":
            self.project = nn.Linear(size, self.rank, bias=False)  # Q
        if self.rank:
            self.before = nn.Parameter(torch.zeros(vocab_size, self.rank))  # W1
            self.after = nn.Parameter(torch.zeros(config.draft_vocab_size(vocab_size), self.rank))  # W2
        self.confidence_head = None
        if own.confidence:
            self.confidence_head = nn.Linear(size + self.rank * own.confidence_edges, 1)
            for parameter in self.confidence_head.parameters():
                nn.init.zeros_(parameter)

    @torch.no_grad()
    def start_from_model(self, model: PreTrainedModel) -> None:
        table = cast("nn.Embedding", model.get_input_embeddings()).weight.float()
        if self.mask is not None:
            self.mask.copy_(table.mean(0))
        if self.before is not None:  # codes of similar tokens are similar
            codes = F.normalize(table, dim=-1) @ torch.randn(table.shape[-1], self.rank).to(table.device)
            self.before.copy_(codes[: len(self.before)])

    def join(self, hidden: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(hidden))

    def embed(self, ids: Tensor, backbone_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what blocks read of tokens [...]: [embedding ; embedding of the mask token ; W1], [..., 2 H + r]."""
        own, ids = DflashSettings.of(self.config), ids.to(self.device)
        look_up = backbone_embed if self.embedding is None else self.embedding
        with torch.no_grad():
            token = look_up(ids).to(self.device, self.dtype)
            if own.mask_token is not None:
                mask = look_up(torch.full((1,), own.mask_token, device=ids.device))[0].to(self.device, self.dtype)
        if own.mask_token is None:
            assert self.mask is not None
            mask = self.mask
        both = torch.cat([token, mask.expand_as(token)], dim=-1)
        both = both if own.embedding_scale == 1 else both * own.embedding_scale
        return both if self.before is None else torch.cat([both, F.embedding(ids, self.before)], dim=-1)

    def project_kv(
        self,
        hidden: Tensor,
        token: Tensor,
        position_ids: Tensor,
        append: Append | None = None,
        seen: Tensor | None = None,
    ) -> list[KV]:
        angles = self.rope.angles(position_ids, hidden.dtype)
        found: list[KV] = []
        for index, layer in enumerate(cast("list[BlockLayer]", self.layers)):
            key, value = layer.keys_and_values(hidden, angles)
            kv = key.transpose(1, 2), value.transpose(1, 2)  # [B, G, T, D]
            found.append(kv if append is None else append(*kv, index))
        return found

    def context_kv(self, kv: list[KV], seen: Tensor, position_ids: Tensor, place: Tensor | None = None) -> BlockKV:
        return BlockKV(kv, seen, position_ids, self.tokens, self.rope, self.windows, place)

    def block(self, root: Tensor, mask: Tensor, context_kv: BlockKV) -> Tensor:
        """Run the layers over blocks; return the features [K, ..., H] of all heads.

        `root` and `mask` are the embeddings [..., H] of roots and of the mask token."""
        shape, (root, mask) = root.shape, (part.reshape(*context_kv.shape, 1, -1) for part in (root, mask))
        x = torch.cat([root, mask.expand(*context_kv.shape, self.tokens - 1, -1)], dim=-2)  # [..., n, H]
        for index, layer in enumerate(self.layers):
            x = layer(x, context_kv, index, self.causal[index], self.windows[index])
        x = self.norm(x)[..., self.tokens - self.config.num_heads :, :]
        return x.movedim(-2, 0).reshape(-1, *shape)

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        """Compute the inputs [k, ..., H + r] of the LM heads and of the edges, for the first k = `num_heads` heads."""
        following, context_kv = inputs.following, inputs.context_kv
        if following is None or not isinstance(context_kv, BlockKV):
            raise RequestError("heads of kind dflash read the root and the text; pass `following` and `context_kv`")
        size = self.config.hidden_size
        root, mask, _ = following[..., 0, :].split([size, size, self.rank], dim=-1)
        x = self.block(root, mask, context_kv)[:num_heads]
        if not self.rank:
            return x
        codes = self.codes(x, following[..., : len(x), 2 * size :].movedim(-2, 0))
        if self.training and self.path_dropout:
            kept = torch.rand(codes.shape[:-1], device=codes.device) >= self.path_dropout
            if self.project is None:
                kept[0] = True  # Markov edges of the root are part of what its candidates are chosen by
            codes = codes * kept[..., None]
        return torch.cat([x, codes], dim=-1)

    def codes(self, x: Tensor, before: Tensor) -> Tensor:
        """Compute the codes [..., r], whose products with W2 are edges, of features x [..., H] and W1[a] [..., r]."""
        return before if self.project is None else before * self.project(x)

    @property
    def edge_rows(self) -> Tensor | None:
        return self.after

    @property
    def is_confident(self) -> bool:
        return self.confidence_head is not None

    def confidence(self, features: Tensor) -> Tensor:
        assert self.confidence_head is not None
        found: Tensor = self.confidence_head(features[..., : self.confidence_head.in_features])
        return found[..., 0]

    def confidence_weights(self, features: Tensor) -> Tensor:
        # Where path dropout hides the token before, guesses are worse than in drafting.
        shown = features[..., self.config.hidden_size :].any(-1).float()
        if self.training:
            shown[1:] /= 1 - self.path_dropout
        return shown

    def unary(self, x: Tensor, lm_head: LMHead | None = None) -> Tensor:
        """Compute logits [k, ..., N] without edges, from features [k, ..., H] of the first k heads."""
        own, logits = DflashSettings.of(self.config), super().logits(x, lm_head)
        logits = logits if own.logit_scale == 1 else logits * own.logit_scale
        return logits if own.logit_cap is None else torch.tanh(logits / own.logit_cap) * own.logit_cap

    def logits(self, features: Tensor, lm_head: LMHead | None = None) -> Tensor:
        if self.after is None:
            return self.unary(features, lm_head)
        x, codes = features.split([self.config.hidden_size, self.rank], dim=-1)
        return self.unary(x, lm_head) + codes @ self.after.T
