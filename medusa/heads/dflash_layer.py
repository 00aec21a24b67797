"""The settings of block drafters (`medusa.heads.dflash`), and their decoder layers.

Shapes: `...` any positions, n tokens of a block, H hidden size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, cast

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import FILES_ONLY, KindSettings, MedusaConfig, require_whole, size_error
from medusa.errors import RequestError, choose_one_of
from medusa.heads.block_kv import BlockKV
from medusa.heads.eagle_layer import DeeperLayer, GatedStack, LayerSizes, check_sizes, default_sizes
from medusa.heads.markov import usual_rank

LAYOUTS, EDGES, EMBEDDINGS = ("fill", "shifted"), ("none", "markov", "pairwise"), ("own", "shared")


@dataclass
class DflashSettings(KindSettings):
    """The settings of heads of kind `dflash`."""

    layout: str | None = None
    """Kind dflash: fill (mask tokens guess their own place) or shifted (each token guesses the next). Default: shifted
    with markov edges, else fill."""
    edges: str = "markov"
    """Kind dflash: what a guess reads of the token before it: none, markov (the default) or pairwise."""
    rank: Annotated[int | None, Ge(1)] = None
    """Kind dflash: of the edges; the same default."""
    conv: list[int] | None = None
    """Kind dflash: taps and group size of convolutions, such as [2, 16]; default: none."""
    mask_token: Annotated[int | None, Ge(0)] = None
    """Kind dflash: token that fills the block; by default heads learn a vector."""
    windows: int | list[int | None] | None = None
    """Kind dflash: number of last tokens that a token sees, for all layers or each; default: all."""
    causal: bool | list[bool] | None = None
    """Kind dflash: whether tokens see only earlier ones of their block, for all layers or each; default: false."""
    confidence: bool = False
    """Kind dflash with markov edges: also learn how probably each guess is accepted, for exports."""
    layer: LayerSizes | None = field(default=None, metadata=FILES_ONLY)
    """The sizes of the decoder layers; `None`: `heads.layers` layers with default sizes."""
    embeddings: str = field(default="shared", metadata=FILES_ONLY)
    """`shared`: heads read the backbone's input embeddings. `own`: they have input embeddings."""
    embedding_scale: float = field(default=1.0, metadata=FILES_ONLY)
    """The factor of the embeddings."""
    logit_scale: float = field(default=1.0, metadata=FILES_ONLY)
    """The factor of the LM head's logits."""
    logit_cap: float | None = field(default=None, metadata=FILES_ONLY)
    """The soft cap c of the LM head's logits, c tanh(x / c), after their factor; `None`: no cap."""
    confidence_edges: bool = field(default=True, metadata=FILES_ONLY)
    """Whether the confidence also reads the token before the guess."""

    @property
    def is_causal(self) -> bool:
        """Whether tokens of a block see only earlier ones in some layer."""
        return self.causal is True or (isinstance(self.causal, list) and any(self.causal))


def block_sizes(config: MedusaConfig) -> LayerSizes:
    """Return the sizes of the layers of `dflash` heads: those of the config, or layers as wide as the backbone."""
    given = DflashSettings.of(config).layer
    return default_sizes(config) | {"layers": config.num_layers, "variants": ["qk_norm"]} if given is None else given


def check_dflash(config: MedusaConfig) -> None:
    """Raise RequestError if settings of `dflash` heads are invalid, or do not go together."""
    own = DflashSettings.of(config)
    if config.prefix_layers:
        raise RequestError("heads.kind dflash has no prefix layers; leave heads.prefix_layers out")
    if own.layer is not None:
        check_sizes(own.layer)
        if own.layer["hidden_size"] != config.hidden_size:
            raise RequestError("heads of kind dflash need the backbone's hidden size")
        if own.layer["layers"] != config.num_layers:
            raise RequestError(f"heads.layers is {config.num_layers}, but the config's layer has {own.layer['layers']}")
    _choose_defaults(config, own)
    for name, allowed in {"layout": LAYOUTS, "edges": EDGES, "embeddings": EMBEDDINGS}.items():
        if (value := getattr(own, name)) not in allowed:
            raise RequestError(f"heads.{name} is {value!r}; {choose_one_of(value, allowed)}")
    if own.rank is not None:
        require_whole("rank", own.rank, 1)
        if own.edges == "none":
            raise RequestError(f"heads.rank is {own.rank}, and there are no edges; leave it out, or heads.edges=none")
    if type(own.confidence) is not bool:
        raise RequestError(f"heads.confidence is {own.confidence!r}; it must be true or false")
    if own.confidence and own.edges != "markov":
        needs = f"heads.confidence needs heads.edges=markov, not {own.edges}"
        raise RequestError(f"{needs}; change the edges, or leave heads.confidence out")
    if own.mask_token is not None:
        require_whole("mask_token", own.mask_token, 0, (config.vocab_size or 2**24) - 1)
    for name, of_layer in {"windows": own.windows, "causal": own.causal}.items():
        if of_layer is not None and (not isinstance(of_layer, list) or len(of_layer) != config.num_layers):
            raise RequestError(f"heads.{name} is {of_layer!r}; it must be a list for {config.num_layers} layers")
    if any(type(one) is not bool for one in cast("list[bool]", own.causal or ())):
        raise RequestError(f"heads.causal is {own.causal!r}; it must hold true or false for each layer")
    for window in cast("list[int | None]", own.windows or ()):
        if window is not None:
            require_whole("windows", window, 1)
    for name in ("embedding_scale", "logit_scale", "logit_cap"):
        value = getattr(own, name)
        if (name != "logit_cap" or value is not None) and (wrong := size_error(name, value)):
            raise RequestError(f"the config's {name} is {value!r}; it must be {wrong}")
    conv = own.conv
    if conv is not None and not (
        isinstance(conv, list) and len(conv) == 2 and all(type(size) is int and size > 0 for size in conv)
    ):
        raise RequestError(f"heads.conv is {conv!r}; it must be two whole numbers above 0, taps and channels")
    if conv is not None and config.hidden_size % conv[1]:
        raise RequestError(f"heads.conv has groups of {conv[1]} channels; they must divide {config.hidden_size}")
    if config.vocab_size is None and (own.rank or own.embeddings == "own"):
        raise RequestError("heads of kind dflash with edges or own embeddings need the backbone's vocab_size")


def _choose_defaults(config: MedusaConfig, own: DflashSettings) -> None:
    """Fill in the layout and the rank that suit the edges, and write one value for all layers as a list."""
    if own.layout is None:
        own.layout = "shifted" if own.edges == "markov" else "fill"
    if own.rank is None and own.edges != "none":
        own.rank = usual_rank(config.hidden_size)
    if type(own.windows) is int:
        own.windows = [own.windows] * config.num_layers
    if type(own.causal) is bool:
        own.causal = [own.causal] * config.num_layers


def unserved(config: MedusaConfig, z_lab: bool = False) -> str:
    """Say what servers, or z-lab's form, do not have of heads with this config, and what to train instead; else ""."""
    own = DflashSettings.of(config)
    causal, windows = {*cast("list[bool]", own.causal or [False])}, {*cast("list[int | None]", own.windows or [None])}
    layout = "shifted" if own.edges == "markov" else "fill"
    scaled = own.embedding_scale != 1 or own.logit_scale != 1 or own.logit_cap is not None
    reduced = config.vocabulary is not None and (z_lab or own.edges == "pairwise")
    for is_wrong, what in (
        (config.feature_layers is None, "the last hidden state; train them with heads.feature_layers=usual"),
        (own.layout != layout, f"edges {own.edges} in the layout {own.layout}; train them with heads.layout={layout}"),
        (own.conv and own.edges != "pairwise", "convolutions; leave heads.conv out, or add heads.edges=pairwise"),
        (reduced, "a reduced vocabulary; train them with heads.vocabulary=0"),
        (len(causal) > 1, "some causal layers; make heads.causal true or false for all"),
        (len(windows - {None}) > 1, "windows of several sizes; make heads.windows one number for all"),
        (causal == {True} and None in windows and not z_lab, "causal layers without a window; add heads.windows"),
        (scaled and not z_lab, "factors of embeddings or logits, which only the format z-lab has"),
    ):
        if is_wrong:
            return what
    return ""


class GroupedConv(nn.Module):
    """A convolution over the tokens of a block before a sublayer, and one after it, with kernels from its input."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.shape, self.group = (2, taps, size // group), group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)
        with torch.no_grad():  # a new convolution changes nothing
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

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
        for output in (self.out, cast("GatedStack", self.stack).down):  # from zero, heads would learn slower
            nn.init.normal_(output.weight, std=output.in_features**-0.5)
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
            x = x + stack.dropout(sublayer(inner) if conv is None else conv(inner, sublayer))
        return x
