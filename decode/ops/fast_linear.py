"""Linear layers of a few tokens on AMD CPUs, by oneDNN instead of MKL.

PyTorch multiplies float32 matrices with MKL, which is as fast as without AVX-512 on AMD CPUs. For one token this does
not matter, because reading the weights takes the time. For 8 tokens, oneDNN takes 0.5 to 0.8 times as long as MKL, and
for 64 tokens half as long (AMD EPYC with AVX-512, one thread). With packed weights (`decode.ops.packed_weights`) it
takes 0.35 to 0.65 times as long for 8 tokens. Results are equal up to rounding.

Shapes: M tokens, K inputs, N outputs of a linear layer."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch import library as operators
from torch.nn import functional as F

from decode.ops.packed_weights import PLAIN_TYPES, pack, packed
from medusa.cpu import cpuinfo

MIN_PRODUCTS = 2**20
"""M x K x N from which oneDNN is faster; a call of it takes 10 us more than one of MKL."""
MIN_PACKED = 2**19
"""M x K x N from which oneDNN is faster with a packed weight."""
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
PREFERS_ONEDNN = "AuthenticAMD" in cpuinfo("vendor_id") and HAS_AVX512 and torch.backends.mkldnn.is_available()
STOCK = F.linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute what `torch.nn.functional.linear` computes: `input` [..., K] times `weight` [N, K], plus `bias` [N]."""
    if not _HERE.depth:
        return STOCK(input, weight, bias)
    products = input.numel() * len(weight)
    if products < MIN_PACKED or products == weight.numel() or torch.is_grad_enabled():
        return STOCK(input, weight, bias)
    if torch.is_autocast_enabled("cpu") or not is_plain(input) or not _is_usual(weight, bias):
        return STOCK(input, weight, bias)
    if torch.compiler.is_compiling():
        return torch.ops.medusa.linear(input, weight, bias) if is_plain(weight) else STOCK(input, weight, bias)
    arranged = packed(weight)
    if arranged is not None or (products >= MIN_PRODUCTS and is_plain(weight)):
        return _by_onednn(input, weight if arranged is None else arranged, bias)
    return STOCK(input, weight, bias)


def _by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return found


def _in_graph(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    arranged = packed(weight)
    return _by_onednn(input, weight if arranged is None else arranged, bias)


def _shape_in_graph(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], len(weight))


# Compiled steps call this operation, because a packed weight cannot be an input of their graphs.
# It can be defined once in a process, but a module can be imported again.
if not hasattr(torch.ops.medusa, "linear"):
    operators.define("medusa::linear", "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
    operators.impl("medusa::linear", "CPU", _in_graph)
    operators.impl("medusa::linear", "Meta", _shape_in_graph)


def is_plain(part: Tensor) -> bool:
    return type(part) in PLAIN_TYPES and part.dtype == torch.float32 and part.is_cpu


def _is_usual(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `weight` is [N, K] and `bias` [N]. oneDNN would read any bias as N numbers that lie side by side."""
    if bias is None or weight.ndim != 2:
        return weight.ndim == 2
    return is_plain(bias) and bias.shape == weight.shape[:1] and bias.is_contiguous()


class _Here(threading.local):
    """Whether this thread is in a forward that takes `linear`."""

    depth = 0


_HERE = _Here()


class fast_linear:
    """While the context is open, this thread computes large products of linear layers by oneDNN, where it is faster.

    It is for a forward over `tokens` tokens in a model whose largest weight is about the size of `largest`. The first
    context replaces `torch.nn.functional.linear` by `linear` for the whole process. Outside of these contexts, `linear`
    only calls the original."""

    def __init__(self, largest: Tensor, tokens: int) -> None:
        """Decide whether it pays."""
        plain = PREFERS_ONEDNN and largest.is_cpu and largest.dtype == torch.float32
        self.pays = plain and tokens >= max(2, MIN_PRODUCTS / largest.numel())

    def __enter__(self) -> None:
        if self.pays:
            if F.linear is STOCK:  # a function that somebody else has put there stays
                F.linear = linear
            _HERE.depth += 1

    def __exit__(self, *error: object) -> None:
        if self.pays:
            _HERE.depth -= 1


def prepare_linear(model: nn.Module) -> None:
    """Prepare the linear layers of `model` for a text: pack their weights on CPUs where `linear` uses oneDNN."""
    if PREFERS_ONEDNN:
        pack(model)
