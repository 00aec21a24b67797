"""The functions of transformers' model files that update states, and the switch that lets them read token trees.

A model's forward looks these functions up in its file, by five names that all files share. Each is wrapped once, when
a `decode.reader.Reader` of a model in the file is made. The wrapper calls the stock function, except in a thread's
forwards inside `reading`. So nothing is left behind after an error, and other threads and copies are not affected.

Pieces of text go through the stock functions, with the states of our cache; padding after a row's own tokens decays and
adds nothing. Drafts go through `decode.layers.functions`.

Shapes: B rows, N nodes, H heads, C channels, W width of a convolution."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from decode.layers import functions
from decode.layers.functions import NextState, StateOfEach
from decode.layers.reading import Reading, current

TEXT_BLOCK = 64
"""Tokens of a piece whose states Mamba-1 holds at once."""


def convolution(
    here: Reading,
    stock: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """The short convolution of `hidden_states` [B, C, W + N], the columns of the text and of the nodes."""
    if here.topology is None:
        return stock(hidden_states, weight, bias, activation=activation, **kwargs)
    out = functions.convolved(hidden_states, here.taps(weight.shape[-1]).to(hidden_states.device), weight, bias)
    return out if activation is None else ACT2FN[activation](out)


def delta_rule(
    here: Reading,
    stock: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule of GDN and KDA; for shapes see `functions.gated_delta`."""
    layer, number, state = here.next_state(value.shape[2], key.shape[3], value.shape[3], like=value)
    if here.topology is None:
        if (own := here.own_tokens(g.device)) is not None:
            own = own[:, :, None]
            g, beta = g * (own[..., None] if g.dim() == 4 else own), beta * own
        out, final = stock(
            query, key, value, g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs,
        )  # fmt: skip
        layer.updates[number] = NextState(final)
        return out, state
    seen = here.topology.ancestors.to(value.device)
    out, layer.updates[number] = functions.gated_delta(query, key, value, g, beta, state, seen, use_qk_l2norm_in_kernel)
    return out, state


def mamba2_scan(
    here: Reading,
    stock: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan. Drafts do not clamp dt, because the stock step for one token does not."""
    layer, number, state = here.next_state(*hidden_states.shape[2:], B.shape[-1], like=hidden_states)
    if here.topology is None:
        own = here.own_tokens(dt.device)
        if own is not None:  # dt is computed here, because the limits would raise that of padding above 0
            dt = functions.softplus(dt, dt_bias, dt_softplus).clamp(*dt_limit) * own[:, :, None]
            dt_bias, dt_softplus, dt_limit = None, False, (0.0, float("inf"))
        out, final = stock(
            hidden_states, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, initial_states=state,
            dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=True, **kwargs,
        )  # fmt: skip
        layer.updates[number] = NextState(final)
        return out, state
    step, seen = functions.softplus(dt, dt_bias, dt_softplus), here.topology.ancestors.to(dt.device)
    out, layer.updates[number] = functions.mamba2(hidden_states, step, A, B, C, D, state, seen)
    return out, state


def mamba1_scan(
    here: Reading,
    stock: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba-1's scan of `hidden_states` [B, C, N]. The stock function begins without a state, so it serves nothing."""
    layer, number, state = here.next_state(hidden_states.shape[1], A.shape[-1], like=hidden_states)
    bias = None if delta_bias is None else delta_bias[:, None]
    step = functions.softplus(dt, bias, delta_softplus)
    if here.topology is None:
        if (own := here.own_tokens(dt.device)) is not None:
            step = step * own[:, None]
        parts, after = [], state
        for start in range(0, here.count, TEXT_BLOCK):
            block = slice(start, start + TEXT_BLOCK)
            states = functions.mamba1_text(hidden_states[..., block], step[..., block], A, B[..., block], after)
            parts.append(_read_out(states, C[..., block]))
            after = states[:, -1]
        out, layer.updates[number] = torch.cat(parts, dim=-1), NextState(after)
    else:
        parent, depth = here.topology.parent.to(dt.device), here.topology.max_depth
        states = functions.mamba1(hidden_states, step, A, B, state, parent, depth)
        out = _read_out(states, C)
        layer.updates[number] = StateOfEach(states)
    if D is not None:
        out = out + hidden_states * D[:, None]
    if z is not None:
        out = out * nn.functional.silu(z)
    return out.to(hidden_states.dtype), state


def _read_out(states: Tensor, out_of: Tensor) -> Tensor:
    """The outputs [B, C, N] from Mamba-1's states [B, N, C, S] by C [B, S, N], rounded as the stock functions do."""
    return (states.to(out_of.dtype) @ out_of.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba1_scan,
}
"""What replaces the functions of a model's file, by name."""


def prepare_states(model: nn.Module) -> None:
    """Wrap the functions that update states in the files of a model's modules, each of them once."""
    with _LOCK:
        for file in filter(None, map(sys.modules.get, {type(module).__module__ for module in model.modules()})):
            for name in FUNCTIONS.keys() & vars(file).keys():
                _wrap(file, name)


def _wrap(file: ModuleType, name: str) -> None:
    stock, ours = vars(file)[name], FUNCTIONS[name]
    if stock is None or stock in _WRAPPERS:
        return

    @functools.wraps(stock)
    def function(*args: Any, **kwargs: Any) -> Any:
        here = current()
        return stock(*args, **kwargs) if here is None else ours(here, stock, *args, **kwargs)

    _WRAPPERS.add(function)
    setattr(file, name, function)


_WRAPPERS: set[Callable[..., Any]] = set()
_LOCK = threading.Lock()
