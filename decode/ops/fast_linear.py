"""Linear layers of a few tokens on a CPU, by oneDNN, with weights that are packed once; those of heads, too.

In bfloat16, PyTorch multiplies by oneDNN, which rearranges a weight in each product. With packed weights, the layers of
SmolLM2-135M take 0.6 to 0.7 times as long for 1 to 36 tokens, and results are equal bit by bit (Intel Xeon with AMX,
one thread). In float32, PyTorch multiplies with MKL, which on AMD CPUs is as fast as without AVX-512. For one token
this does not matter, because reading the weights takes the time. For 8 tokens, oneDNN takes 0.5 to 0.8 times as long as
MKL, and for 64 tokens half as long (AMD EPYC with AVX-512, one thread). Without AVX-512, packed weights take 0.5 to
1.05 times as long for 2 to 32 tokens, and weights that are not packed longer than with MKL (AMD EPYC with AVX2): a step
of SmolLM2-135M with 4, 8 and 16 nodes takes 0.81, 0.85 and 0.82 times as long. Results are equal up to rounding.

Packed weights are a second copy of the weights, in the order in which oneDNN multiplies them. They are packed when a
model's first text begins, if the copies fit in `SHARE` of the memory. A weight may change later, and not all changes
are counted by PyTorch (`weight.data += delta` is not). So each text begins with a check: the sums of each row's bits,
read as integers, must be those of the weight that was packed. This reads the weights once. An uncounted change is
missed only if it leaves all of these sums alone, for example if eight bytes of a row change places with eight others.

With `--numerics stable`, `linear` multiplies in blocks of `ROWS` tokens, in any dtype, because libraries choose their
kernel, and with it the order of sums, by the number of tokens (`decode.stable`).

Shapes: M tokens, K inputs, N outputs of a linear layer."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import library as operators
from torch.nn import functional as F

from medusa.cpu import cpuinfo, has_fast_bfloat16
from medusa.heads import stacked
from medusa.memory import total_memory

MIN_PRODUCTS = 2**20
"""M x K x N from which oneDNN is faster in float32; a call of it takes 10 us more than one of MKL."""
MIN_PACKED = 2**19
"""M x K x N from which oneDNN is faster in float32 with a packed weight."""
MIN_NUMBERS = 1 << 16
"""Size of a weight from which packing pays in drafts of 8 tokens."""
SHARE = 1 / 8
"""Part of the memory that the packed weights of one model may fill."""
ROWS = 32
"""Tokens of a block of stable products. oneDNN's bfloat16 kernels take as long for 32 tokens as for one."""
PLAIN_TYPES = (Tensor, nn.Parameter)  # subclasses, for example quantised weights, have their own products
CAPABILITY = torch.backends.cpu.get_cpu_capability()
UNPACKED = CAPABILITY == "AVX512"
"""Whether oneDNN is faster in float32 with weights that are not packed, too."""
TYPES = {
    dtype
    for dtype, is_faster in (
        (torch.float32, "AuthenticAMD" in cpuinfo("vendor_id") and CAPABILITY in ("AVX512", "AVX2")),
        (torch.bfloat16, has_fast_bfloat16() and CAPABILITY == "AVX512"),
    )
    if is_faster and torch.backends.mkldnn.is_available()
}
"""The dtypes whose weights are packed on this machine."""
STOCK = F.linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute what `torch.nn.functional.linear` computes: `input` [..., K] times `weight` [N, K], plus `bias` [N]."""
    if not _HERE.depth:
        return STOCK(input, weight, bias)
    if _HERE.stable:
        return _in_blocks(input, weight, bias)
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not _is_usual(input, weight, bias):
        return STOCK(input, weight, bias)
    float32, products = weight.dtype == torch.float32, input.numel() * weight.shape[0]
    if float32 and (products < MIN_PACKED or products == weight.numel()):
        return STOCK(input, weight, bias)
    if torch.compiler.is_compiling():
        return torch.ops.medusa.linear(input, weight, bias) if is_plain(weight) else STOCK(input, weight, bias)
    arranged = packed(weight)
    if arranged is not None or (UNPACKED and float32 and products >= MIN_PRODUCTS and is_plain(weight)):
        return _by_onednn(input, weight if arranged is None else arranged[0], bias)
    return STOCK(input, weight, bias)


def stacked_linear(input: Tensor, weight: Tensor, heads: slice, bias: Tensor | None) -> Tensor | None:
    """Compute `medusa.heads.stacked.product` with packed weights; `None`: there are none, or PyTorch is as fast."""
    if torch.compiler.is_compiling() or not _HERE.depth or _HERE.stable:
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not is_plain(input) or not input.numel():
        return None
    if (copies := packed(weight)) is None or input.dtype != weight.dtype:
        return None
    if input.dtype == torch.float32 and (input.shape[1] == 1 or input.numel() * weight.shape[2] < MIN_PACKED):
        return None
    biases = [None] * len(input) if bias is None else bias[heads, 0].unbind()
    return torch.stack([_by_onednn(*each) for each in zip(input, copies[heads], biases, strict=True)])


def _in_blocks(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    parts = input.reshape(-1, input.shape[-1]).split(ROWS)
    found = [STOCK(F.pad(part, (0, 0, 0, ROWS - len(part))), weight, bias)[: len(part)] for part in parts]
    return (found[0] if len(found) == 1 else torch.cat(found)).view(*input.shape[:-1], -1)


def _by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return found


def _in_graph(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    arranged = packed(weight)
    return _by_onednn(input, weight if arranged is None else arranged[0], bias)


def _shape_in_graph(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], len(weight))


# Compiled steps call this operation, because a packed weight cannot be an input of their graphs.
# It can be defined once in a process, but a module can be imported again.
if not hasattr(torch.ops.medusa, "linear"):
    operators.define("medusa::linear", "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
    operators.impl("medusa::linear", "CPU", _in_graph)
    operators.impl("medusa::linear", "Meta", _shape_in_graph)


stacked.FASTER.append(stacked_linear)


def is_plain(part: Tensor) -> bool:
    return type(part) in PLAIN_TYPES and part.dtype in TYPES and part.is_cpu


def _is_usual(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `input` is [..., M, K], `weight` [N, K], and `bias` [N].

    oneDNN would read any bias as N numbers that lie side by side."""
    if not is_plain(input) or input.ndim < 2 or not input.numel() or weight.ndim != 2 or weight.dtype != input.dtype:
        return False
    if bias is None:
        return True
    return is_plain(bias) and bias.dtype == weight.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()


class _Here(threading.local):
    """Whether this thread is in a forward that takes `linear`, and in a stable one, and starts texts that join."""

    depth = stable = 0
    joins = False


_HERE = _Here()


class fast_linear:
    """While the context is open, this thread computes large products of linear layers by oneDNN, where it is faster.

    It is for a forward over `tokens` tokens in a model whose largest weight is about the size of `largest`. The first
    context replaces `torch.nn.functional.linear` by `linear` for the whole process. Outside of these contexts, `linear`
    only calls the original."""

    def __init__(self, largest: Tensor, tokens: int, stable: bool = False) -> None:
        """Decide whether it pays. `stable`: compute all products in blocks of `ROWS` tokens instead."""
        fewest = max(2, MIN_PRODUCTS / largest.numel()) if largest.dtype == torch.float32 else 1
        self.stable = stable
        self.used = stable or (largest.is_cpu and largest.dtype in TYPES and tokens >= fewest)

    def __enter__(self) -> None:
        if self.used:
            if F.linear is STOCK:  # a function that somebody else has put there stays
                F.linear = linear
            _HERE.depth += 1
            _HERE.stable += self.stable

    def __exit__(self, *error: object) -> None:
        if self.used:
            _HERE.depth -= 1
            _HERE.stable -= self.stable


def prepare_linear(model: nn.Module) -> None:
    """Prepare the layers of a model or of heads for a text: pack their weights on CPUs where oneDNN multiplies."""
    if TYPES and not _HERE.joins:
        pack(model)


@contextmanager
def joining(running: bool) -> Iterator[None]:
    """Start texts that join `running` ones of the same models, at whose start the weights were packed and checked."""
    _HERE.joins = running
    try:
        yield
    finally:
        _HERE.joins = False


class Packed(NamedTuple):
    """A packed weight: [N, K] of a linear layer, or [heads, K, N] of stacked ones."""

    of: weakref.ref[Tensor]
    version: int  # how often the weight had been written to
    sums: Tensor  # of its bits (`_sums`)
    copies: tuple[Tensor, ...]  # the weight in oneDNN's order, or that of each head


_PACKED: dict[int, Packed] = {}  # by the identity of the weight, because a search by a weak reference takes longer
_LOCK = threading.Lock()


def packed(weight: Tensor) -> tuple[Tensor, ...] | None:
    """Return the packed copy of `weight`, or those of its heads.

    `None`: there is none, or the weight has been written to since."""
    found = _PACKED.get(id(weight))
    if found is None or found.of() is not weight or found.version != weight._version:
        return None
    return found.copies


def pack(model: nn.Module) -> None:
    """Pack the weights of the linear layers and stacked ones of `model` that are not packed yet, or have changed since.

    Copies are dropped whose weights may no longer be packed, for example after `model.to(...)`."""
    found_in = {id(weight): weight for module in model.modules() for weight in weights_of(module)}
    weights = {key: weight for key, weight in found_in.items() if _fits(weight)}
    if sum(weight.nbytes for weight in weights.values()) > _limit():
        weights = {}
    for key in found_in.keys() - weights.keys():
        _PACKED.pop(key, None)
    with _LOCK, torch.inference_mode(False), torch.no_grad():
        for key, weight in weights.items():
            sums, found = _sums(weight), _PACKED.get(key)
            same = found is not None and found.of() is weight and found.version == weight._version
            if found is None or not same or not torch.equal(found.sums, sums):
                parts = [weight] if weight.ndim == 2 else weight.mT.contiguous()
                copies = tuple(map(torch.ops.mkldnn._reorder_linear_weight, parts))
                _PACKED[key] = Packed(weakref.ref(weight, partial(_forget, key)), weight._version, sums, copies)


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the weight [N, K] of a linear layer, or the stacked weights [heads, K, N] of a module of heads."""
    names = ("weight",) if isinstance(module, nn.Linear) else getattr(module, "stacked_weights", ())
    return [weight for name in names if type(weight := getattr(module, name)) in PLAIN_TYPES]


def _fits(weight: Tensor) -> bool:
    """Whether packing makes the products of a weight faster."""
    fits = is_plain(weight) and weight.is_contiguous() and not weight.is_inference()
    return fits and math.prod(weight.shape[-2:]) >= MIN_NUMBERS and weight.shape[-1] * weight.itemsize % 8 == 0


def _sums(weight: Tensor) -> Tensor:
    """The sums [...] of the rows of a weight [..., K], whose bits are read as integers of eight bytes, modulo 2^64."""
    return weight.view(torch.int64).sum(-1)


@cache
def _limit() -> float:
    """The number of bytes that the packed weights of a model may fill."""
    return SHARE * total_memory(torch.device("cpu"))


def _forget(key: int, of: weakref.ref[Tensor]) -> None:
    """Drop the copy of a weight that is no more. Takes no lock: a garbage collection inside of `pack` may call this."""
    found = _PACKED.get(key)
    if found is not None and found.of is of:
        _PACKED.pop(key, None)
