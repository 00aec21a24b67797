"""Which drafted tokens stay: from a draft and the backbone's opinion to an accepted path and the next root.

Every rule walks from the root to deeper nodes and never looks at padding: a node is accepted when it and all nodes
above it are (docs/decoding.md). Shapes: B rows, N nodes, V vocabulary, D the tree's depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft

Draw = Callable[[int, list[int]], int]
"""(row, path of nodes from the root) -> the token that the target decides on after that path."""
TargetProbabilities = Callable[[int, list[int]], Tensor]
"""(row, path of nodes from the root) -> the target probabilities [V] after that path."""


class Acceptance(NamedTuple):
    """What a step decided."""

    path: Tensor
    """[B, D + 1] accepted nodes from the root on, padded with -1."""
    length: Tensor
    """[B] how many nodes that is, the root counted."""
    next_root: Tensor
    """[B] the token that the target decided on where the path ended."""


def accept_greedy(draft: Draft, best: Tensor, room: Tensor | None = None) -> Acceptance:
    """Keep the nodes that hold what greedy decoding would have written (Stern et al. 2018, for trees).

    Args:
        best: [B, N] the target's most probable token after each node.
        room: [B] how deep a node may lie, where the context or cache ends; no limit by default.
    """
    tree = draft.tree
    match = draft.ids == best.index_select(1, tree.parent)
    match[:, 0] = True
    return _deepest(draft, match, best, room)


def _deepest(draft: Draft, match: Tensor, best: Tensor, room: Tensor | None) -> Acceptance:
    tree = draft.tree
    accepted = (match[:, None, :] | ~tree.ancestors).all(-1)  # [B, N]: itself and everything above it matches
    if room is not None:
        accepted &= tree.depth <= room[:, None]
    end = torch.where(accepted, tree.depth, -1).argmax(-1)  # [B]
    return Acceptance(
        tree.paths.index_select(0, end), tree.depth.index_select(0, end) + 1, best.gather(1, end[:, None])[:, 0]
    )


def accept_walk(draft: Draft, draw: Draw, room: Tensor | None = None) -> Acceptance:
    """Let the target write, one token at a time, and follow it down the tree as far as the draft foresaw it.

    At each node reached the target's token is drawn once; a child that holds it is accepted, and otherwise it is the
    next root: drawn tokens are never thrown away, so the text has exactly the target's distribution whatever the
    draft (docs/decoding.md). Being the longest prefix of the target's text inside the tree, the accepted path cannot be
    beaten by any lossless rule on a tree that does not depend on the draws. With a `draw` that takes the most
    probable token it is greedy decoding, and processors see every node with its own prefix.
    """
    ids, parent = draft.ids.tolist(), draft.tree.parent.tolist()
    children = _children(parent)
    limits = [draft.tree.max_depth] * len(ids) if room is None else room.tolist()
    paths, roots = [], []
    for row, tokens in enumerate(ids):
        path, child = [0], 0
        while True:
            token = draw(row, path)
            child = next((node for node in children[path[-1]] if tokens[node] == token), -1)
            if child < 0 or len(path) > limits[row]:
                break
            path.append(child)
        paths.append(path)
        roots.append(token)
    return _acceptance(draft, paths, roots)


def accept_typical(
    draft: Draft, target: TargetProbabilities, epsilon: float, delta: float, room: Tensor | None = None
) -> Acceptance:
    """Typical acceptance (paper section 2.3.1). Lossy: the text is neither greedy nor a sample.

    A token x is accepted after c where p(x | c) > min(epsilon, delta exp(-H(p(. | c)))). The longest accepted path is
    kept, among equally long ones the most probable, and the next root is the target's most probable token there. As
    exp(-H) never exceeds max p, that token always passes, and no step is shorter than a greedy one.
    """
    ids, children = draft.ids.tolist(), _children(draft.tree.parent.tolist())
    limits = [draft.tree.max_depth] * len(ids) if room is None else room.tolist()
    paths, roots = [], []
    for row, tokens in enumerate(ids):
        found: list[tuple[int, float, list[int], int]] = []  # length, log probability, path, next root
        open_paths: list[tuple[list[int], float]] = [([0], 0.0)]
        while open_paths:
            path, log_p = open_paths.pop()
            p = target(row, path).double()
            best = int(p.argmax())
            found.append((len(path), log_p, path, best))
            threshold = min(epsilon, delta * float(torch.exp(torch.special.entr(p).sum().neg())))
            for child in children[path[-1]] if len(path) <= limits[row] else []:
                p_child = float(p[tokens[child]])
                # The argmax passes by the paper's inequality; rounding must not overrule it where delta is 1.
                if p_child > threshold or tokens[child] == best:
                    open_paths.append(([*path, child], log_p + math.log(p_child)))
        _, _, path, root = max(found, key=lambda entry: entry[:2])
        paths.append(path)
        roots.append(root)
    return _acceptance(draft, paths, roots)


def _children(parent: list[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parent]
    for node in range(1, len(parent)):
        children[parent[node]].append(node)
    return children


def _acceptance(draft: Draft, paths: list[list[int]], roots: list[int]) -> Acceptance:
    device = draft.ids.device
    ends = torch.tensor([path[-1] for path in paths], device=device)
    return Acceptance(draft.tree.paths[ends], draft.tree.depth[ends] + 1, torch.tensor(roots, device=device))
