"""RMS norms on a CPU, in 4 operations instead of 6.

In a small model, starting an operation takes longer than computing it. Llama's norm is x / sqrt(mean(x^2) + eps) times
the weight w. For H numbers this is x / hypot(|x|, sqrt(H eps)) times sqrt(H) w, and sqrt(H) w is computed once a text.
Results are equal up to rounding.

transformers copies the norm into the file of each model. A norm is changed only if its class computes what that of
Llama computes, as 141 classes in 134 files do. It is changed as an object, because each change of a class empties
Python's caches of attributes.

Shapes: H hidden size, or head size for norms of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.ops.fast_linear import is_plain
from decode.ops.shared_setting import Restore, SharedSetting
from decode.ops.stock_code import code_of

Forward = Callable[[Tensor], Tensor]
STOCK = code_of(LlamaRMSNorm.forward)


def normed(norm: nn.Module, scaled: Tensor, least: Tensor, hidden_states: Tensor) -> Tensor:
    """Compute what `norm` computes of `hidden_states` [..., H].

    `scaled` [H] is sqrt(H) times its weight, and `least`, one number, is sqrt(H eps)."""
    is_usual = hidden_states.is_cpu and hidden_states.dtype == torch.float32 and not torch.is_grad_enabled()
    if not is_usual or torch.compiler.is_compiling():
        return type(norm).forward(norm, hidden_states)
    return hidden_states.div(vector_norm(hidden_states, 2, -1, True).hypot_(least)).mul_(scaled)


def fast_norms(decoder: nn.Module) -> AbstractContextManager[None]:
    """While the context is open, normalise by `normed` in `decoder`, where it has norms like Llama's in float32.

    The context is for one text, because weights may change between texts. It replaces `forward` of each norm, also for
    other threads; their results stay equal up to rounding, and their gradients the same."""
    forwards = [(vars(norm), forward) for norm in decoder.modules() if (forward := _forward(norm)) is not None]
    return SharedSetting(partial(_replace, forwards)) if forwards else nullcontext()


def is_normed(value: object) -> bool:
    """Whether `value` is what `fast_norms` puts in place of a norm's `forward`."""
    return isinstance(value, partial) and value.func is normed


def _forward(module: nn.Module) -> Forward | None:
    if "variance_epsilon" not in vars(module) or not _is_stock(type(module).forward):
        return None
    weight = module._parameters.get("weight")
    # Llama's norm may multiply numbers of any size by a single weight.
    if weight is None or not is_plain(weight) or weight.ndim != 1 or len(weight) == 1:
        return None
    size = len(weight)
    least = torch.tensor((size * vars(module)["variance_epsilon"]) ** 0.5)
    return partial(normed, module, weight.detach() * size**0.5, least)


@cache
def _is_stock(forward: Callable[..., object]) -> bool:
    return code_of(forward) == STOCK


def _replace(forwards: Sequence[tuple[dict[str, object], Forward]]) -> Restore:
    for attributes, forward in forwards:
        attributes.setdefault("forward", forward)  # a function that somebody else has put there stays
    return partial(_put_back, forwards)


def _put_back(forwards: Sequence[tuple[dict[str, object], Forward]]) -> None:
    for attributes, forward in forwards:
        if attributes.get("forward") is forward:
            del attributes["forward"]
