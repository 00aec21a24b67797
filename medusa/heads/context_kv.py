"""Attention of heads to the text and to their path in the tree, with rotary embeddings (RoPE, arXiv 2104.09864).

A query attends to two sets of keys. The keys of the text are many, and all queries of a row share them. Each query
also has a few own keys, from its path. One call of PyTorch's attention computes both, without copying the text's keys.
The score s_j of own key j is computed in advance and put into an extra dimension j. With unit vectors e_j:

    query   [q ; s_0 ... s_J-1]      text    key [k_i ; 0]     value [v_i ; 0]
                                     own     key [0 ; e_j]     value [0 ; e_j]

So the softmax runs over text keys and own keys. The extra dimensions of the output are the weights of the own keys. The
caller multiplies the own values by these weights and adds them to the output.

Shapes: B rows, S keys of the text, Q queries of a row, R selected queries, A attention heads, G heads of keys, D their
size, E the size of values (usually D), J own keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.attention import attention
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json

KV = tuple[Tensor, Tensor]  # keys [B, G, S, D] and values [B, G, S, E] of one layer
Append = Callable[[Tensor, Tensor, int], KV]
"""Appends new keys and values to those of a layer in a cache, and returns all of them."""
BASE = 10_000.0  # of the rotary embeddings
SCALED = ("linear", "llama3", "yarn")  # other types of rotary embeddings, which do not depend on the text's length
NOTHING = -1e4  # the score of an unused own key, so that its weight is 0; finite, because 0 times infinity is NaN


class Rope:
    """The rotations of keys and queries of size D by their positions: D / 2 frequencies, and a factor.

    The factor is 1, except for some rotations that were stretched to longer texts, such as yarn's."""

    def __init__(self, head_size: int, parameters: Json | None = None) -> None:
        """Compute the frequencies for `parameters`, which are transformers' `rope_parameters`; by default base 10,000.

        Raise RequestError for a type of rotation that depends on the length of the text, or is unknown, and for a base
        that is not a positive number in float32."""
        parameters = Json(rope_type="default", rope_theta=BASE) | (parameters or {})
        kind, base, self.factor = parameters["rope_type"], parameters["rope_theta"], 1.0
        if type(base) not in (int, float) or not 0 < base <= torch.finfo(torch.float32).max:
            raise RequestError(f"rope_theta is {base!r}; it must be a number above 0, such as 10000")
        if kind == "default":
            powers = torch.arange(0, head_size, 2, device="cpu", dtype=torch.float32) / head_size
            self.frequencies = float(base) ** -powers
        elif kind in SCALED:
            from transformers import LlamaConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            with torch.device("cpu"):  # also while heads are made on the meta device, to be filled from a file
                config = LlamaConfig(head_dim=head_size, rope_parameters=parameters)
                self.frequencies, self.factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        else:
            raise RequestError(f"rope_type is {kind!r}; heads can have default, {', '.join(SCALED)}")

    def angles(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines [..., D] at positions [...]. The second half of the D repeats the first."""
        if self.frequencies.device != position_ids.device:
            self.frequencies = self.frequencies.to(position_ids.device)
        angles = position_ids[..., None].float() * self.frequencies
        both = torch.cat([angles, angles], dim=-1)
        cos, sin = both.cos(), both.sin()
        if self.factor != 1:
            cos, sin = cos * self.factor, sin * self.factor
        return cos.to(dtype), sin.to(dtype)


class ContextKV:
    """Keys and values of B texts, with masks and rotations, to which Medusa heads at given positions attend."""

    def __init__(
        self,
        kv: Sequence[KV],
        seen: Tensor,
        position_ids: Tensor,
        steps: int,
        rope: Rope,
        place: Tensor | None = None,
        window: int | None = None,
        sinks: int = 0,
    ) -> None:
        """Prepare S text tokens and Q queries in each of B rows for attention with A attention heads of size D.

        Args:
            kv: for each layer the keys [B, G, S, D] and values [B, G, S, E] of the text, with the keys already rotated.
                A is a multiple of G: several queries share a key (arXiv 2305.13245).
            seen: [B, Q, S] the mask, True where a query sees a text token. B or Q is 1 if rows or queries share it.
            position_ids: [B, Q] positions of head 0's queries; [B, 1] if a row's queries share one, [R] with `place`.
            steps: the number of heads, the maximum of J. Head i (from 0) adds one own key, at `position_ids` + i.
            rope: the rotations of keys and queries.
            place: [R] indices of the selected queries in the flattened [B * Q]; by default all queries.
            window: the number of last keys that a query sees, its own ones included; by default all.
            sinks: 1 if each query comes with the score of a sink, after those of its own keys (`attend_to_path`)."""
        keys, values = kv[0]
        self.place, self.rows, self.queries, self.size = place, len(keys), seen.shape[1], values.shape[-1]
        self.sinks = sinks
        ahead = torch.arange(steps, device=position_ids.device)
        self.angles = rope.angles(position_ids[..., None] + ahead, keys.dtype)  # [..., steps, D] each
        self.extra = -(-(steps + sinks) // 8) * 8  # attention kernels are faster with multiples of 8
        self.masks = [additive(seen, self.extra, keys)]
        if window is not None:  # one mask for each head, which has one own key more than the head before it
            back = seen.flip(-1).cumsum(-1).flip(-1)  # 1 at the last key of the text, 2 at the key before it, ...
            self.masks = [additive(seen & (back + head < window), self.extra, keys) for head in range(steps)]
        unit = torch.eye(self.extra, dtype=keys.dtype, device=keys.device)
        self.layers = [(extended(keys, unit), extended(values, unit)) for keys, values in kv]

    def attend(self, query: Tensor, own: Tensor, layer: int = 0, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend to text and own keys; return the text's part of the output, and own keys' softmax weights [..., A, J].

        Args:
            query: [B, Q, A, D], or [R, A, D] for the R queries that the constructor's `place` selects; the text's part
                has this shape with E for D. If all queries share the mask (`seen` is [B, 1, S]), Q can be any number.
            own: [..., A, J] unscaled inner products of each query with its own keys; J counts those so far, and a sink.
            layer: the index of the layer whose keys and values are used.
            scale: the factor of inner products; `None`: 1 / sqrt(D)."""
        count, scale = own.shape[-1], query.shape[-1] ** -0.5 if scale is None else scale
        query = F.pad(torch.cat([query, own], dim=-1), (0, self.extra - count), value=NOTHING)
        if self.place is not None:
            grid = query.new_zeros(self.rows * self.queries, *query.shape[1:])
            query = grid.index_copy(0, self.place, query).unflatten(0, (self.rows, -1))
        keys, values = self.layers[layer]
        mask = self.masks[min(count - self.sinks, len(self.masks)) - 1]
        out = attention(query.transpose(1, 2), keys, values, mask, scale).transpose(1, 2)
        if self.place is not None:
            out = out.flatten(0, 1)[self.place]
        return out[..., : self.size], out[..., self.size : self.size + count]


class AttendsToText(ABC):
    """What kinds of heads that attend to the text have in addition: the keys and values of the text's tokens.

    Further shapes: T new tokens, H hidden size."""

    config: MedusaConfig
    rope: Rope
    window: int | None = None  # the number of last keys that a head sees (`ContextKV`); `None`: all
    sinks = 0  # 1 if attention has sinks (`attend_to_path`)
    reads_pairs: ClassVar[bool] = True
    """Whether a key needs the token after its position, so that the last position has none before the draft."""

    @abstractmethod
    def project_kv(
        self,
        hidden: Tensor,
        token: Tensor,
        position_ids: Tensor,
        append: Append | None = None,
        seen: Tensor | None = None,
    ) -> list[KV]:
        """Compute, for each layer of the heads, the keys and values [B, G, T, D] of a text.

        Args:
            hidden: [B, T, H] the features that the heads read (`MedusaHeads.read`).
            token: [B, T, H] the embedding of the token after each position, if the keys depend on it (`reads_pairs`).
            position_ids: [B, T] the positions of the T tokens in their texts.
            append: appends the keys and values to those of earlier tokens in a cache, and returns all [B, G, S, D].
            seen: [B or 1, T, S] the mask, True where a token attends; by default all earlier tokens and itself."""

    def context_kv(self, kv: list[KV], seen: Tensor, position_ids: Tensor, place: Tensor | None = None) -> ContextKV:
        """Prepare the keys and values of texts, from `project_kv`, for attention; for arguments see `ContextKV`."""
        return ContextKV(kv, seen, position_ids, self.config.num_heads, self.rope, place, self.window, self.sinks)

    def angles(self, head: int, feature: Tensor, context_kv: ContextKV | None) -> tuple[Tensor, Tensor]:
        """The rotations [..., D] of the pair that the head with index `head` adds after features [..., H]."""
        if context_kv is None:
            return self.rope.angles(torch.full((), head, device=feature.device), feature.dtype)
        cos, sin = context_kv.angles
        return cos[..., head, :], sin[..., head, :]

    def after_text(self, kv: list[KV], lengths: Tensor, last: int | None = None) -> ContextKV:
        """Prepare keys and values in a cache for a draft after each of B texts.

        The first `lengths[b]` of the S slots of row b hold its text. With `last`, the heads get only the last so many
        keys of each text, so that a draft costs the same after texts of any length; it must be at least `window`."""
        lengths = lengths[:, None]  # [B, 1]
        if last is None:
            seen = torch.arange(kv[0][0].shape[2], device=lengths.device) < lengths
        else:
            slots = lengths - last + torch.arange(last, device=lengths.device)  # below 0: before the text
            seen = slots >= 0
            kv = [(_at(slots, keys), _at(slots, values)) for keys, values in kv]
        return self.context_kv(kv, seen[:, None], lengths)


def attend_to_path(
    query: Tensor,
    own: Sequence[Tensor],
    groups: int,
    context_kv: ContextKV | None,
    layer: int = 0,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the text and to the path; return the attention's output [..., A, E], before its matrix.

    `query` [..., A, D] is that of the path's last pair, and `own` [..., G (D + E)] are the keys and values of all pairs
    of the path (`joined`), of G = `groups` heads of keys. `layer` is the layer's index in `context_kv`, and `scale` the
    factor of inner products (`None`: 1 / sqrt(D)). `sinks` [A] are scaled scores of a key whose value is 0 (attention
    sinks, arXiv 2508.10925)."""
    size, scale = query.shape[-1], query.shape[-1] ** -0.5 if scale is None else scale
    states = torch.stack(list(own), dim=-2).unflatten(-1, (groups, -1))
    keys, values = (part[..., None, :] for part in states.tensor_split([size], dim=-1))  # [..., J, G, 1, D or E]
    by_group = query.unflatten(-2, (groups, -1))[..., None, :, :, :]  # [..., 1, G, A / G, D]
    scores = (by_group * keys).sum(-1).flatten(-2).transpose(-1, -2)  # [..., A, J]
    if sinks is not None:
        scores = torch.cat([scores, (sinks / scale).to(scores.dtype).expand(scores.shape[:-1])[..., None]], dim=-1)
    if context_kv is None:
        seen, weights = query.new_zeros(*query.shape[:-1], values.shape[-1]), (scores * scale).softmax(-1)
    else:
        seen, weights = context_kv.attend(query, scores, layer, scale)
    shares = weights[..., : len(own)].transpose(-1, -2).unflatten(-1, (groups, -1))[..., None]
    return seen + (shares * values).sum(-4).flatten(-3, -2)


def joined(kv: KV) -> Tensor:
    """Join the key [..., G, D] and the value [..., G, E] of a pair to one vector [..., G (D + E)]."""
    return torch.cat(kv, dim=-1).flatten(-2)


def _at(slots: Tensor, states: Tensor) -> Tensor:
    """Gather keys or values [B, G, S, D] at `slots` [B, N] of each row; numbers outside stand for the nearest slot."""
    inside = slots.clamp(0, states.shape[2] - 1)[:, None, :, None]
    return states.gather(2, inside.expand(-1, states.shape[1], -1, states.shape[3]))


def additive(seen: Tensor, extra: int, keys: Tensor) -> Tensor:
    """Make the mask [B, 1, Q, S + J] of `seen` [B, Q, S] and J = `extra` visible keys, in the dtype of `keys`."""
    hidden = F.pad(~seen, (0, extra))[:, None]
    # Kernels on a GPU need rows that are a multiple of 8 elements apart, or copy the mask in every call.
    shape, width = hidden.shape[:-1], hidden.shape[-1]
    mask = torch.zeros(*shape, -(-width // 8) * 8, dtype=keys.dtype, device=keys.device)[..., :width]
    return mask.masked_fill_(hidden, -torch.inf)


def extended(states: Tensor, unit: Tensor) -> Tensor:
    """Append J unit vectors `unit` [J, J] of new dimensions to keys or values [B, G, S, D]: [B, G, S + J, D + J]."""
    out = F.pad(states, (0, len(unit), 0, len(unit)))
    out[:, :, states.shape[2] :, states.shape[3] :] = unit
    return out


def attention_heads(hidden_size: int) -> int:
    """Choose how many attention heads of equal, even size (about 64) to use; RequestError for an odd `hidden_size`."""
    if hidden_size % 2:
        found = f"heads of kind eagle, and heads.prefix_layers, need an even hidden size, not {hidden_size}"
        raise RequestError(f"{found}; take heads.kind=recurrent, or leave heads.prefix_layers out")
    count = max(hidden_size // 64, 1)
    while hidden_size % (2 * count):
        count -= 1
    return count


def apply_rope(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys x [..., D] by `angles`, the cosines and sines that `Rope.angles` returns."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
