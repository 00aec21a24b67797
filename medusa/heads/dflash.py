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

With `conv`, convolutions surround attention and MLP (DFlash 2): y_t = sum over j of (base_j + d_tj) * x_{t - j}, with
zeros before the block. A product of the sublayer's normed input gives d, which the channels of a group share.

Shapes: `...` any positions, B rows, T tokens, H hidden size, E size of the states of all read layers, V vocabulary, N
tokens among which the heads guess, r rank of the edges (0 without), L layers, G heads of keys, D their size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import FILES_ONLY, KindSettings, MedusaConfig, require_whole, size_error
from medusa.errors import RequestError, choose_one_of
from medusa.heads.block_kv import BlockKV
from medusa.heads.context_kv import KV, Append, AttendsToText, Rope
from medusa.heads.eagle_layer import GATED, DeeperLayer, GatedStack, LayerSizes, check_sizes, default_sizes
from medusa.heads.independent import LMHead, MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.heads.kind import BLOCK_TRELLIS, TREE

LAYOUTS, EDGES, EMBEDDINGS = ("fill", "shifted"), ("none", "markov", "pairwise"), ("own", "shared")


@dataclass
class DflashSettings(KindSettings):
    """The settings of heads of kind `dflash`, which only files set."""

    layout: str = field(default="fill", metadata=FILES_ONLY)
    """`fill`: a mask token guesses the token in its own place. `shifted`: each token guesses the next one."""
    edges: str = field(default="none", metadata=FILES_ONLY)
    """What a guess reads of the token before it: `none`, `markov`, or `pairwise`."""
    rank: int | None = field(default=None, metadata=FILES_ONLY)
    """The rank of the edges; `None` without edges."""
    conv: list[int] | None = field(default=None, metadata=FILES_ONLY)
    """The taps of the convolutions, and the channels of a group; `None`: there are no convolutions."""
    mask_token: int | None = field(default=None, metadata=FILES_ONLY)
    """The token whose embedding fills the block; `None`: the heads have a vector of their own."""
    layer: LayerSizes | None = field(default=None, metadata=FILES_ONLY)
    """The sizes of the decoder layers; `None`: one layer with default sizes."""
    windows: list[int | None] | None = field(default=None, metadata=FILES_ONLY)
    """For each layer, how many last tokens a token sees, itself included; `None`: all."""
    causal: list[bool] | None = field(default=None, metadata=FILES_ONLY)
    """For each layer, whether a token of the block sees only earlier ones; `None`: no layer."""
    embeddings: str = field(default="shared", metadata=FILES_ONLY)
    """`shared`: heads read the backbone's input embeddings. `own`: they have input embeddings."""
    embedding_scale: float = field(default=1.0, metadata=FILES_ONLY)
    """The factor of the embeddings."""
    logit_scale: float = field(default=1.0, metadata=FILES_ONLY)
    """The factor of the LM head's logits."""
    logit_cap: float | None = field(default=None, metadata=FILES_ONLY)
    """The soft cap c of the LM head's logits, c tanh(x / c), after their factor; `None`: no cap."""


def block_sizes(config: MedusaConfig) -> LayerSizes:
    """Return the sizes of the layers of `dflash` heads: those of the config, or one layer as wide as the backbone."""
    given = DflashSettings.of(config).layer
    return default_sizes(config) | {"variants": ["qk_norm"]} if given is None else given


class GroupedConv(nn.Module):
    """A convolution over the tokens of a block before a sublayer, and one after it, with kernels from its input."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.shape, self.group = (2, taps, size // group), group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a sublayer on its normed input [..., n, H] between two convolutions."""
        before, after = self.kernel_projection(x).unflatten(-1, self.shape).unbind(-3)  # [..., n, taps, H / group]
        return self._convolved(sublayer(self._convolved(x, before, 0)), after, 1)

    def _convolved(self, x: Tensor, kernel: Tensor, side: int) -> Tensor:
        taps = self.base_kernel[side] + kernel.repeat_interleave(self.group, dim=-1)  # [..., n, taps, H]
        shifted = [F.pad(x, (0, 0, back, 0))[..., : x.shape[-2], :] for back in range(taps.shape[-2])]
        return (taps * torch.stack(shifted, dim=-2)).sum(-2)


class BlockLayer(DeeperLayer):
    """A layer of a block drafter."""

    def __init__(self, sizes: LayerSizes, conv: list[int] | None) -> None:
        super().__init__(sizes)
        self.attention_conv = self.mlp_conv = None
        if conv is not None:
            self.attention_conv, self.mlp_conv = (GroupedConv(sizes["hidden_size"], *conv) for _ in range(2))

    def forward(self, x: Tensor, context_kv: BlockKV, index: int, causal: bool, window: int | None) -> Tensor:
        """Compute the layer's output [..., n, H] for blocks x; for the other arguments see `attend_in_block`."""

        def attention(inner: Tensor) -> Tensor:
            query, key, value = self.project(inner, context_kv.angles)
            attended = context_kv.attend_in_block(query, key, value, index, causal, window)
            mixed: Tensor = self.out(attended.flatten(-2))
            return mixed

        stack = cast("GatedStack", self.stack)
        for conv, norm, sublayer in (
            (self.attention_conv, self.norm, attention),
            (self.mlp_conv, stack.norm, stack.mlp),
        ):
            inner = norm(x)
            x = x + (sublayer(inner) if conv is None else conv(inner, sublayer))
        return x


class DflashHeads(MedusaHeads, AttendsToText):
    """Block drafters: all heads together are one pass over the root and mask tokens."""

    Settings = DflashSettings
    block_types = (GATED,)
    lm_head_forms = ("shared", "one")
    reads_layers = True
    reads_root = True
    reads_pairs = False
    trainable = False
    published_form = "medusa.checkpoints.dflash:FORM"

    @classmethod
    def check(cls, config: MedusaConfig) -> None:
        check_dflash(config)

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

    def make_blocks(self) -> None:
        config, own, sizes = self.config, DflashSettings.of(self.config), block_sizes(self.config)
        size, eps, layers = sizes["hidden_size"], sizes["eps"], sizes["layers"]
        self.rope = Rope(sizes["head_size"], sizes["rope"])
        self.windows, self.causal = own.windows or [None] * layers, own.causal or [False] * layers
        reach = [window for window in self.windows if window is not None]
        self.window = max(reach) if len(reach) == layers else None
        self.tokens = config.num_heads + (own.layout == "fill")  # n
        self.rank = own.rank or 0
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

    def join(self, hidden: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(hidden))

    def embed(self, ids: Tensor, backbone_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what blocks read of tokens [...]: [embedding ; embedding of the mask token ; W1], [..., 2 H + r]."""
        own, ids = DflashSettings.of(self.config), ids.to(self.device)
        look_up = backbone_embed if self.embedding is None else self.embedding
        if own.mask_token is None:
            assert self.mask is not None
            mask: Tensor = self.mask
        else:
            mask = look_up(torch.full((1,), own.mask_token, device=ids.device))[0].to(self.device, self.dtype)
        token = look_up(ids).to(self.device, self.dtype)
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
        return torch.cat([x, self.codes(x, following[..., : len(x), 2 * size :].movedim(-2, 0))], dim=-1)

    def codes(self, x: Tensor, before: Tensor) -> Tensor:
        """Compute the codes [..., r], whose products with W2 are edges, of features x [..., H] and W1[a] [..., r]."""
        return before if self.project is None else before * self.project(x)

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


def check_dflash(config: MedusaConfig) -> None:
    """Raise RequestError if settings of `dflash` heads are invalid, or do not go together."""
    own = DflashSettings.of(config)
    if config.num_layers != 1 or config.prefix_layers:
        raise RequestError("heads.kind dflash needs heads.layers 1, and no heads.prefix_layers")
    if config.feature_layers is None:
        raise RequestError("heads.kind dflash needs heads.feature_layers, such as [2, 10, 18]")
    for name, allowed in {"layout": LAYOUTS, "edges": EDGES, "embeddings": EMBEDDINGS}.items():
        if (value := getattr(own, name)) not in allowed:
            raise RequestError(f"the config's {name} is {value!r}; {choose_one_of(value, allowed)}")
    if (own.rank is None) != (own.edges == "none"):
        raise RequestError(f"the config's rank is {own.rank!r}; only edges have one, and edges is {own.edges!r}")
    if own.layer is not None:
        check_sizes(own.layer)
        if own.layer["hidden_size"] != config.hidden_size:
            raise RequestError("heads of kind dflash need the backbone's hidden size")
    if own.mask_token is not None:
        require_whole("mask_token", own.mask_token, 0, (config.vocab_size or 2**24) - 1)
    count = block_sizes(config)["layers"]
    for name, of_layer in {"windows": own.windows, "causal": own.causal}.items():
        if of_layer is not None and (not isinstance(of_layer, list) or len(of_layer) != count):
            raise RequestError(f"the config's {name} is {of_layer!r}; it must be a list for {count} layers")
    for window in own.windows or ():
        if window is not None:
            require_whole("windows", window, 1)
    for name in ("embedding_scale", "logit_scale", "logit_cap"):
        value = getattr(own, name)
        if (name != "logit_cap" or value is not None) and (wrong := size_error(name, value)):
            raise RequestError(f"the config's {name} is {value!r}; it must be {wrong}")
    if own.rank is not None:
        require_whole("rank", own.rank, 1)
    conv = own.conv
    if conv is not None and not (
        isinstance(conv, list) and len(conv) == 2 and all(type(size) is int and size > 0 for size in conv)
    ):
        raise RequestError(f"the config's conv is {conv!r}; it must be two whole numbers above 0, taps and channels")
    if conv is not None and config.hidden_size % conv[1]:
        raise RequestError(f"the config's conv has groups of {conv[1]} channels; they must divide {config.hidden_size}")
    if config.vocab_size is None and (own.rank or own.embeddings == "own"):
        raise RequestError("heads of kind dflash with edges or own embeddings need the backbone's vocab_size")
