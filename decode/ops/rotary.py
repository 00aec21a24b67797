"""Rotary position embeddings of a few tokens on a CPU, in 7 operations instead of 16.

In a small model, starting an operation takes longer than computing it. transformers rotates queries and keys one after
the other; here they are rotated together, by the same products and sums, so results are equal bit by bit. The sign of
the sines is changed once for all layers, instead of the sign of numbers in each.

transformers copies `apply_rotary_pos_emb` into the file of each model. A file is changed only if its copy computes what
that of Llama computes, as 116 of the 200 files do.

Shapes: B rows of the batch, H query heads, K key heads, N tokens, D head size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from types import ModuleType

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from decode.ops.shared_setting import Restore, SharedSetting
from decode.ops.stock_code import code_of

NAME = "apply_rotary_pos_emb"
MAX_NUMBERS = 2**16
"""Numbers of all queries and keys up to which fewer operations are faster; joining more takes longer than it saves."""
STOCK = modeling_llama.apply_rotary_pos_emb


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate queries `q` [B, H, N, D] and keys `k` [B, K, N, D] by `cos` and `sin` [B, N, D], as transformers does."""
    is_usual = not torch.compiler.is_compiling() and unsqueeze_dim == 1 and q.is_cpu and q.dtype == k.dtype
    if not is_usual or q.shape[::2] != k.shape[::2] or q.numel() + k.numel() > MAX_NUMBERS:
        return STOCK(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    both, heads = torch.cat([q, k], dim=1), q.shape[1]
    cos, signed = _for_all_heads(cos, sin)
    both = both * cos + both.roll(both.shape[-1] // 2, -1) * signed
    return both[:, :heads], both[:, heads:]


@lru_cache(maxsize=4)  # all layers of a forward give the same tensors, or one of two pairs if some layers have windows
def _for_all_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, N, D]; the sines of the first half are negative."""
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(1), torch.cat([-first, second], dim=-1).unsqueeze(1)


def fast_rotary(decoder: nn.Module, on_cpu: bool) -> AbstractContextManager[None]:
    """While the context is open, rotate by `rotated` in `decoder`, if it is `on_cpu` and rotates as Llama does.

    The context replaces the function in the file of the model, also for other threads, whose results stay the same."""
    file = sys.modules.get(type(decoder).__module__)  # `None`: loaded from a path, without a name
    return _setting(file) if on_cpu and file is not None else nullcontext()


@cache
def _setting(file: ModuleType) -> AbstractContextManager[None]:
    if any(code_of(vars(file).get(name)) != code for name, code in LLAMA.items()):
        return nullcontext()
    return SharedSetting(partial(_replace, file, vars(file)[NAME]))


LLAMA = {name: code_of(vars(modeling_llama)[name]) for name in (NAME, "rotate_half")}


def _replace(file: ModuleType, copied: Callable[..., object]) -> Restore:
    if vars(file)[NAME] is copied:  # a function that somebody else has put there stays
        setattr(file, NAME, rotated)
    return partial(_put_back, file, copied)


def _put_back(file: ModuleType, copied: Callable[..., object]) -> None:
    if vars(file)[NAME] is rotated:
        setattr(file, NAME, copied)
