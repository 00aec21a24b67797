"""Triton's interpreter for kernels of bfloat16, and fast enough for tests.

The interpreter keeps bfloat16 as bits in integers, which it multiplies as integers, and cuts off instead of rounding to
it. It also looks through Triton's language for each call of a function."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which comes with PyTorch for CUDA")


class Kept:
    """What the interpreter has prepared, which stays as it is for the next call."""

    def restore(self) -> None:
        pass


def kernels_on_cpu(patch: pytest.MonkeyPatch) -> ModuleType:
    """Let the kernels run on CPUs until `patch` is undone; returns their module."""
    from triton import language as tl
    from triton.runtime import interpreter

    from decode.ops import tree_attention, tree_kernels

    builder, prepared = interpreter.InterpreterBuilder, set[int]()
    multiply, convert, prepare = builder.create_dot, interpreter._convert_float, interpreter._patch_lang

    def widened(part: Any) -> Any:
        if part.dtype.scalar != tl.bfloat16:
            return part
        return interpreter.TensorHandle((part.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def converted(data: Any, old: Any, new: Any, rounding: Any) -> Any:
        if (old, new) != (tl.float32, tl.bfloat16):
            return convert(data, old, new, rounding)
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def once(function: Any) -> Kept:
        if id(function.__globals__) not in prepared:
            prepared.add(id(function.__globals__))
            prepare(function)
        return Kept()

    patch.setattr("decode.ops.tree_attention.DEVICES", {"cpu"})
    patch.setattr("decode.tree_check.runs_on", tree_attention.runs_on.__wrapped__)  # it keeps what it found for a CPU
    patch.setattr(builder, "create_dot", lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest))
    patch.setattr(interpreter, "_convert_float", converted)
    patch.setattr(interpreter, "_patch_lang", once)
    return tree_kernels


def compile_kernels(dtype: str, size: int) -> None:
    """Compile the kernels for GPUs, without one at hand, in a process without `TRITON_INTERPRET`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from decode.ops import tree_kernels

    def compiled(kernel: Any, types: dict[str, str], capability: int, **constants: Any) -> Any:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values)
        options = {"num_warps": tree_kernels.warps(size), "num_stages": 2}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

    own = dict.fromkeys(("query", "key", "value"), f"*{dtype}")
    parts = {"sums": "*fp32", "parts": "*fp32", "scale": "fp32", "sees": "*i64"}
    rows, keys = tree_kernels.block(4 if dtype == "fp32" else 2, size)
    shapes = {"SIZE": size, "VALUE_SIZE": size, "DIMS": size, "VALUE_DIMS": size, "ROWS": rows, "KEYS": keys}
    for capability, limit in ((80, 99 << 10), (90, 227 << 10)):
        for splits in (True, False):
            types = own | parts | {"out": "*fp32" if splits else f"*{dtype}"}
            made = compiled(tree_kernels.attend_split, types, capability, **shapes, SPLIT=splits)
            assert made.metadata.shared <= limit
        compiled(tree_kernels.join_splits, parts | {"out": f"*{dtype}"}, capability, ROWS=4, SPLITS=8, DIMS=size)
