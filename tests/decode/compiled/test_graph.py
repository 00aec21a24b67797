"""The graph that inductor makes machine code of: no operation copies the KV cache, in whole or layer by layer.

The compile ends where the graph is final, before any code is generated, so each test takes a second or two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.fx_passes import post_grad

from decode.drafters.trained_heads import TrainedHeads
from decode.ops import tree_attention
from decode.ops.tree_attention import TRIED
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.texts import Decoding, stepper_for
from decode.tree_check import require_tree_forward
from medusa import Tree
from tests.helpers import random_heads, random_ids, random_tree, tiny_model


class Stop(BaseException):
    """Ends a compile; not an `Exception`, which torch.compile would wrap."""


def final_graph(model: Any, heads: Any, tree: Tree, batch: int) -> torch.fx.Graph:
    """The graph of a compiled step, as it is after `reinplace_inplaceable_ops`, inductor's last pass over it."""
    found: list[torch.fx.Graph] = []
    stock = post_grad.reinplace_inplaceable_ops

    def last(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        found.extend(arg for arg in args if isinstance(arg, torch.fx.Graph))
        raise Stop

    requests = prepare(model, [random_ids(4 + row) for row in range(batch)], max_new_tokens=20, do_sample=False)
    factory = TrainedHeads(heads, tree) if tree.num_nodes > 1 else None
    with pytest.MonkeyPatch.context() as patch, inductor.patch(fx_graph_cache=False):
        patch.setattr(post_grad, "reinplace_inplaceable_ops", last)
        with pytest.raises(Stop):
            next(iter(Decoding(stepper_for(model, factory, requests, AcceptanceRule("greedy"), compile=True))))
    return found[0]


def copies(graph: torch.fx.Graph, size: int) -> Iterator[str]:
    """The operations that fill new memory of at least `size` numbers, or copy so many."""

    def written(node: Any) -> Any:  # operations in place return what they have written
        while isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            node = node.args[0]
        return node

    for node in graph.nodes:
        made, target = node.meta.get("val"), node.target
        if isinstance(target, torch._ops.OpOverload) and isinstance(made, torch.Tensor) and made.numel() >= size:
            copied = target is torch.ops.aten.copy_.default and written(node.args[1]) is not node.args[0]
            if copied or not (target._schema.is_mutable or target.is_view):
                yield f"{target} {tuple(made.shape)}"


@pytest.mark.parametrize(
    ("tree", "batch"),
    [
        pytest.param(random_tree(6, max_depth=2), 1, id="tree-1"),
        pytest.param(Tree.chain(0), 4, id="plain-4", marks=pytest.mark.full),
        pytest.param(random_tree(6, max_depth=2), 4, id="tree-4", marks=pytest.mark.full),
        pytest.param(Tree.chain(0), 1, id="plain-1", marks=pytest.mark.full),
    ],
)
def test_no_copy_of_the_cache(tree: Tree, batch: int) -> None:
    model = tiny_model("llama", num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    graph = final_graph(model, random_heads(model, 2), tree, batch)
    layer = batch * 2 * 256 * 64
    assert not list(copies(graph, layer))
    assert masks(graph)


def masks(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The operations whose results, for rows, heads and nodes, have an element for each of the window's 256 slots."""
    made = [(node, node.meta.get("val")) for node in graph.nodes]
    return [node for node, value in made if isinstance(value, Tensor) and value.dim() == 4 and value.shape[3] == 256]


@pytest.mark.full
def test_the_kernel_reads_the_cache_in_place_and_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph calls it once in each layer; Triton is not needed for this."""
    model = tiny_model("llama", num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    require_tree_forward(model)
    TRIED[model] = {torch.float32}
    monkeypatch.setattr(tree_attention, "DEVICES", {"cpu"})
    graph = final_graph(model, random_heads(model, 2), Tree.top_k([2, 1]), 4)
    assert [node.target for node in graph.nodes].count(torch.ops.medusa.tree_attention.default) == 1
    assert not masks(graph)
    assert not list(copies(graph, 4 * 2 * 256 * 64))
