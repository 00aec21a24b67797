"""Static candidate trees, made from paths of ranks, from a name, from a description or from a file.

Node 0 is the root: the next token, which the backbone has already chosen. A node at depth d is a guess of the d-th
head (index d - 1). Nodes are sorted by depth, so that a parent comes before its children. N counts the root, too.

    >>> tree = Tree.from_paths([[0], [1], [0, 0]])
    >>> tree.parent.tolist(), tree.depth.tolist(), tree.rank.tolist()
    ([0, 0, 0, 1], [0, 1, 1, 2], [0, 0, 1, 0])
    >>> tree.ancestors.int().tolist()           # True for the node itself and the nodes above it
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    >>> tree.paths.tolist()                     # the nodes from the root to each node, padded with -1
    [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3]]
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, product
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from medusa.errors import RequestError, first_line
from medusa.shipped import named_trees, no_tree, tree_files

RankPath = tuple[int, ...]  # a node's path: the rank of the guess at each depth, from depth 1; 0 is the best guess
MAX_NODES = 4096  # in one tree
MAX_RANK = 2**31 - 1  # no vocabulary is as large


def usual_shortlist(nodes: int) -> int:
    """The default number of candidates of each head from which a tree of `nodes` nodes of `markov` heads is made.

    Measured by tokens per step (docs/log.md): 16 give at most 1 % less than 32 in trees of up to 32 nodes, and up to
    3 % less with 64 nodes."""
    return 16 if nodes <= 32 else 32


@dataclass(frozen=True, eq=False)
class Tree:
    """A static tree as tensors. Shapes: N nodes, D the largest depth (0 for a tree of the root alone)."""

    parent: Tensor
    """[N] the index of each node's parent; 0 for the root."""
    depth: Tensor
    """[N] the depth of each node; 0 for the root."""
    rank: Tensor
    """[N] the rank of each node among the guesses of its head, from 0 for the best guess; 0 for the root."""
    ancestors: Tensor
    """[N, N] True where the column's node is the row's node or one of its ancestors."""
    paths: Tensor
    """[N, D + 1] the indices of the nodes from the root to each node, padded with -1."""
    shortlist: int | None = None
    """The number of candidates of each head from which the nodes are taken, for heads of kind `markov`; `None`:
    `usual_shortlist`."""
    min_probability: ClassVar[float] = 0.0  # 0: static trees keep all nodes; dynamic trees may prune improbable ones

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Make a tree from the paths of all nodes except the root (the `medusa_choices` of the original Medusa).

        Raise RequestError if a path is empty or listed twice, contains something other than ranks, or has no parent."""
        return tree_of(tuple(sorted(map(_checked, paths), key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> Tree:
        """Make a chain of the best guesses of the first `depth` heads. With depth 0 the tree is only the root."""
        _require_size(depth + 1, f"chain:{depth}")
        return cls.from_paths([(0,) * d for d in range(1, depth + 1)])

    @classmethod
    def top_k(cls, widths: Sequence[int]) -> Tree:
        """Make a tree whose nodes at depth d have the `widths[d]` best guesses of the head with index d as children."""
        name = f"topk:{','.join(map(str, widths))}"
        if not widths or min(widths) < 1:
            raise RequestError(f"{name} is no tree; give a width of 1 or more per head")
        _require_size(1 + sum(accumulate(widths, operator.mul)), name)  # topk:100,100,100 would fill the memory
        levels = (product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
        return cls.from_paths(chain.from_iterable(levels))

    def to(self, device: torch.device | str) -> Tree:
        if self.depth.device == torch.device(device):
            return self  # with its cached tables
        tensors = {name: getattr(self, name).to(device) for name in ("parent", "depth", "rank", "ancestors", "paths")}
        return replace(self, **tensors)

    def clip(self, max_depth: int) -> Tree:
        """Return this tree without the nodes deeper than `max_depth`."""
        clipped = Tree.from_paths([path for path in self.rank_paths if len(path) <= max_depth])
        return replace(clipped, shortlist=self.shortlist)

    def to_json(self) -> list[list[int]]:
        """Return the paths of ranks of all nodes except the root, in the form of `config.json`."""
        return [list(path) for path in self.rank_paths]

    @property
    def rank_paths(self) -> list[RankPath]:
        """The paths of ranks of all nodes except the root, in the order of the nodes."""
        rank, paths = self.rank.tolist(), self.paths.tolist()
        return [tuple(rank[n] for n in line[1:] if n >= 0) for line in paths[1:]]

    @cached_property
    def children(self) -> Tensor:
        """The indices [N, C] of each node's children, sorted by rank, padded with -1; C: most children of a node."""
        most = int(torch.bincount(self.parent[1:], minlength=1).max())
        children = self.parent.new_full((self.num_nodes, most), -1)
        children[self.parent[1:], self.order[1:]] = torch.arange(1, self.num_nodes, device=children.device)
        return children

    @cached_property
    def order(self) -> Tensor:
        """The number [N] of siblings with a lower rank that each of the N nodes has; 0 for the root."""
        siblings = self.parent[:, None] == self.parent[1:]  # without the root, which is its own parent
        return (siblings & (self.rank[1:] < self.rank[:, None])).sum(1)

    @property
    def candidates(self) -> Tree:
        """The tree whose nodes a step may draft: this tree itself, because a static tree is always drafted whole."""
        return self

    @property
    def num_nodes(self) -> int:
        return self.parent.numel()

    @property
    def max_depth(self) -> int:
        return self.paths.shape[1] - 1

    @cached_property
    def max_rank(self) -> int:
        return int(self.rank.max())

    def require_fit(self, num_heads: int, vocab_size: int) -> None:
        """Raise RequestError if the tree is deeper than the number of heads, or has ranks of at least `vocab_size`."""
        if self.max_depth > num_heads:
            sizes = f"{self.max_depth} deep but there are {num_heads} heads"
            raise RequestError(f"the tree is {sizes}; take depth {num_heads} or less (the tree chain fits any heads)")
        if (rank := self.max_rank) >= vocab_size:
            raise RequestError(f"the tree takes guess {rank + 1} of a head, but the vocabulary is {vocab_size}")


@lru_cache(maxsize=8)
def tree_of(paths: tuple[RankPath, ...]) -> Tree:
    """Make the tree of `from_paths`; it is stored, because every text that is decoded asks for the same tree again."""
    index: dict[RankPath, int] = {(): 0}
    for path in paths:
        if path in index:
            raise RequestError(f"the tree lists the path {list(path)} twice; remove one")
        if path[:-1] not in index:
            raise RequestError(f"the tree's path {list(path)} has no parent; add the path {list(path[:-1])}")
        index[path] = len(index)
    _require_size(len(index), "the tree")
    # Outside of the caller's contexts, because the tree is also for others: models are planned on the meta device.
    with torch.device("cpu"), torch.inference_mode(False):
        lines = torch.full((len(index), max(map(len, index)) + 1), -1)
        ancestors = torch.zeros(len(index), len(index), dtype=torch.bool)
        for node, path in enumerate(index):
            line = [index[path[:depth]] for depth in range(len(path) + 1)]
            lines[node, : len(line)] = torch.tensor(line)
            ancestors[node, line] = True
        parent = torch.tensor([index[path[:-1]] for path in index])
        depth = torch.tensor([len(path) for path in index])
        rank = torch.tensor([path[-1] if path else 0 for path in index])
    return Tree(parent, depth, rank, ancestors, lines)


def _require_size(nodes: int, name: str) -> None:
    """Raise RequestError if the tree `name` has more than `MAX_NODES` nodes."""
    if nodes > MAX_NODES:
        raise RequestError(f"{name} has {nodes} nodes; at most {MAX_NODES} can be verified in one forward")


def _checked(path: Sequence[int]) -> RankPath:
    """Return a node's path as a tuple; RequestError unless it is a non-empty list of ranks."""
    if isinstance(path, (str, bytes)) or not isinstance(path, Sequence) or not path:
        raise RequestError(f"the tree's path {path!r} is no path; write a list of ranks such as [0, 1]")
    if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in path):
        raise RequestError(f"the tree's path {list(path)} holds something that is no rank; ranks are 0, 1, 2, ...")
    if max(path) > MAX_RANK:
        raise RequestError(f"the tree's path {list(path)} holds a rank above {MAX_RANK}, and no vocabulary is as large")
    return tuple(path)


def load_tree(spec: str, num_heads: int) -> Tree:
    """Load the tree that `spec` describes: `chain`, `chain:3`, `topk:3,3,2`, the name of a shipped tree or a file.

    A `chain` without a number has the depth `num_heads`. A JSON or YAML file contains `{"paths": [[0], [0, 0], ...]}`.
    A wrong `spec` or file raises RequestError."""
    name, _, argument = spec.partition(":")
    if name == "chain":
        lengths = _whole_numbers(spec, argument) if argument else [num_heads]
        if len(lengths) > 1:
            raise RequestError(f"the tree {spec!r} has two depths; write chain:{lengths[0]} or topk:{argument}")
        return Tree.chain(lengths[0])
    if name == "topk":
        return Tree.top_k(_whole_numbers(spec, argument))
    if name in ("auto", "dynamic"):
        raise RequestError(f"the tree {spec!r} is chosen while decoding; take a static one, such as topk:3,3,2")
    named = named_trees()
    if spec in named:
        return Tree.from_paths(named[spec])
    file = Path(spec) if Path(spec).is_file() else tree_files().get(spec)
    if file is None:
        raise no_tree(spec)
    return Tree.from_paths(_read_paths(file))


def _whole_numbers(spec: str, text: str) -> list[int]:
    """Parse the numbers in a tree's description, such as 3,3,2 in `topk:3,3,2`; raise RequestError for other text."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise RequestError(f"the tree {spec!r} needs whole numbers after the colon, as in chain:3 or topk:3,3,2")
    return numbers


def _read_paths(path: Path) -> list[list[int]]:
    """Read the paths of a tree from a JSON or YAML file."""
    import yaml  # JSON is a subset of YAML

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise RequestError(f"the tree file {path} is neither JSON nor YAML ({first_line(error)})") from None
    if not isinstance(content, dict) or not isinstance(content.get("paths"), list):
        raise RequestError(f'the tree file {path} must hold {{"paths": [[0], [0, 0], [1], ...]}}')
    return content["paths"]
