"""From what a user writes to the tree that the heads' guesses are laid out on."""

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

    `stop_drafting`: the path probability below which a dynamic tree drafts no more nodes; 0: it drafts all its nodes.

    Raises:
        RequestError: `tree` describes no tree, or a static tree is asked to stop drafting.
    """
    resolved = _resolved(tree, heads)
    if not stop_drafting:
        return resolved
    if not isinstance(resolved, DynamicTree):
        raise RequestError(
            "stop-drafting needs a tree that is chosen by the heads' confidences in every step; take tree dynamic:N"
        )
    return replace(resolved, min_probability=stop_drafting)


def _resolved(tree: TreeLike, heads: MedusaHeads) -> Layout:
    if isinstance(tree, Tree | DynamicTree):
        return tree
    if tree == "auto":  # callers that can calibrate have looked for a calibrated tree before
        return default_tree(heads)
    if isinstance(tree, str) and tree.startswith("dynamic"):
        return _dynamic_tree(tree, heads)
    if isinstance(tree, str):
        return load_tree(tree, heads.config.num_heads)
    if tree is None:
        return Tree.from_paths(heads.config.tree) if heads.config.tree else default_tree(heads)
    if not isinstance(tree, (list, tuple)):
        raise RequestError(f"{tree!r} is no tree; give a name, a file or a list of paths such as [[0], [1], [0, 0]]")
    return Tree.from_paths(tree)


def _dynamic_tree(spec: str, heads: MedusaHeads) -> DynamicTree:
    name, _, number = spec.partition(":")
    if name != "dynamic" or not number.isdecimal():
        raise RequestError(f"{spec!r} is no tree; write dynamic: and a number of nodes, such as dynamic:16")
    return DynamicTree.over_heads(int(number), heads.config.num_heads)


def default_tree(heads: MedusaHeads) -> Tree:
    """A tree for heads without any measurement: eight nodes on a CPU, the published 64 on a GPU.

    On a GPU, reading the weights takes most of a step, so that nodes are nearly free; a CPU computes them one by one.
    """
    on_cpu = heads.device.type == "cpu"
    return load_tree("eight" if on_cpu else "mc_sim_7b_63", heads.config.num_heads).clip(heads.config.num_heads)
