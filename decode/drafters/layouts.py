"""The tree for the heads' guesses, from what a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decode.drafters.dynamic_tree import DynamicTree
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout, Tree
from medusa.tree_files import load_tree

TreeLike = Layout | str | Sequence[Sequence[int]] | None
"""A tree, its name or file, its paths, or `None` for the tree saved with the heads."""


def resolve_tree(tree: TreeLike, heads: MedusaHeads, stop_drafting: float = 0.0) -> Layout:
    """The given tree (object, name, file or paths), else the one saved with the heads, else a default.

    `stop_drafting`: the path probability below which a dynamic tree prunes nodes; 0: it drafts all its nodes.

    Raises:
        RequestError: `tree` describes no tree, or a static tree is asked to stop drafting.
    """
    resolved = _resolved(tree, heads)
    if not stop_drafting:
        return resolved
    if not isinstance(resolved, DynamicTree):
        raise RequestError("stop-drafting needs a tree that the heads' confidences choose; take tree dynamic:N")
    return replace(resolved, min_probability=stop_drafting)


def _resolved(tree: TreeLike, heads: MedusaHeads) -> Layout:
    if isinstance(tree, Tree | DynamicTree):
        return tree
    num_heads, saved = heads.config.num_heads, heads.config.tree
    if tree == "auto" or (tree is None and not saved):  # callers that can calibrate replace "auto" before
        return default_tree(heads)
    if isinstance(tree, str) and tree.startswith("dynamic"):
        name, _, number = tree.partition(":")
        if name != "dynamic" or not number.isdecimal():
            raise RequestError(f"{tree!r} is no tree; write dynamic: and a number of nodes, such as dynamic:16")
        return DynamicTree.over_heads(int(number), num_heads)
    if isinstance(tree, str):
        return load_tree(tree, num_heads)
    paths = saved if tree is None else tree
    if not isinstance(paths, (list, tuple)):
        raise RequestError(f"{tree!r} is no tree; give a name, a file or a list of paths such as [[0], [1], [0, 0]]")
    return Tree.from_paths(paths)


def default_tree(heads: MedusaHeads) -> Tree:
    """A tree for heads without any measurement: eight nodes on a CPU, the published 64 on a GPU.

    On a GPU, reading the weights takes most of a step, so nodes are nearly free. A CPU computes them one by one.
    """
    name = "eight" if heads.device.type == "cpu" else "mc_sim_7b_63"
    return load_tree(name, heads.config.num_heads).clip(heads.config.num_heads)
