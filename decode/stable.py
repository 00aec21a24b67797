"""Stable numerics (`--numerics stable`): a token gets the same numbers, bit by bit, however many are read with it.

Without it, the bits of a token's logits depend on the other tokens of the forward, and near ties of two logits fall
differently in trees and in plain decoding. In bfloat16, the causes on a CPU are attention, whose kernels depend on the
numbers of queries and of slots, and whose sums run over slots, between which a tree has nodes of other paths; and in
products of large weights, the number of tokens. Norms, activations and rotations work on each token alone.

So products are computed in blocks of one size (`decode.ops.fast_linear`), and attention in float64
(`decode.ops.attention`), as thread-wide switches of `stable_forwards`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.draft import Draft
from decode.ops.attention import SDPA, grouped
from decode.ops.fast_linear import fast_linear
from decode.reader import Reader
from decode.topology import Topology, chain
from decode.tree_check import LINES, TREE
from medusa.backbone import Backbone, by_value
from medusa.errors import RequestError
from medusa.options import dtype_name

HALF = (torch.bfloat16, torch.float16)
WAY_OUT = "leave out numerics 'stable'"
_CHECKED: weakref.WeakKeyDictionary[PreTrainedModel, dict[object, bool]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@contextmanager
def stable_forwards(model: PreTrainedModel) -> Iterator[None]:
    """Compute this thread's forwards of `model` with stable numerics, such as those of `model.generate`."""
    backbone = Backbone(model)
    with grouped(backbone.config, True), fast_linear(backbone.head_weight, 0, True):
        yield


def require_stable(model: PreTrainedModel) -> None:
    """Raise a `RequestError` unless stable numerics work with the model: by its device, its attention, and a test.

    The test reads a tree, and a path of it token by token, and compares the bits; its result is kept for the model."""
    where = f"numerics 'stable' cannot be had from {type(model).__name__}"
    if model.device.type != "cpu":
        raise RequestError(f"{where} on {model.device.type}: it is for models on a CPU; {WAY_OUT}")
    if model.dtype not in HALF:
        needless = "it is for bfloat16 and float16, as in float32 near ties are too rare to be seen"
        raise RequestError(f"{where} in {dtype_name(model.dtype)}: {needless}; {WAY_OUT}")
    backbone = Backbone(model)
    if backbone.config._attn_implementation != SDPA:
        name = backbone.config._attn_implementation
        raise RequestError(f"{where}: its attention is {name}; load it with --attention {SDPA}, or {WAY_OUT}")
    with _LOCK:
        known, key = _CHECKED.setdefault(model, {}), (backbone.dtype, by_value(model.config))
        if key not in known:
            known[key] = _is_stable(backbone)
    if not known[key]:
        differs = f"its numbers in {dtype_name(backbone.dtype)} still depend on the other tokens of a forward"
        raise RequestError(f"{where}: {differs}; {WAY_OUT}")


@torch.inference_mode()
def _is_stable(backbone: Backbone) -> bool:
    """Whether a node at the end of each path of a tree gets the logits of plain decoding, bit by bit."""
    random = torch.Generator().manual_seed(0)
    line = LINES[-1]
    ids = torch.randint(backbone.vocab_size, (1, 9 + TREE.num_nodes), generator=random)
    prompt, nodes = ids[:, :9], ids[:, 9:]
    readers = [Reader(backbone, TreeCache(backbone.model.config, 1, 32, backbone.device)) for _ in range(2)]
    for reader in readers:
        reader.be_stable(True)
        reader.prefill(prompt, [prompt.shape[1]])
    whole = readers[0].read(Draft(nodes, Topology.of(TREE))).logits[0, line]
    alone = list[Tensor]()
    for node in line:
        alone.append(readers[1].read(Draft(nodes[:, node : node + 1], chain(1, backbone.device))).logits[0, 0])
        readers[1].cache.keep([1])
    return torch.equal(whole, torch.stack(alone))
