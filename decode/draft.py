"""What a drafter hands to verification: candidate tokens, their tree, and the distributions they were drawn from.

Shapes: B rows of the batch, N nodes of a draft, node 0 the root, M nodes of a side branch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from decode.topology import Topology, chain
from medusa.heads.context_kv import ContextKV


class Frontier(NamedTuple):
    """The state before a decoding step: each unfinished text's last token (the root) and the hidden state before it."""

    root: Tensor  # [B] the token that is already decided and not yet read by the backbone
    hidden: Tensor  # [B, H] the hidden state of the token before the root, from which heads guess what follows the root
    rows: list[int]  # the index in the session of each live row; compiled steps keep all B rows
    context_kv: ContextKV | None = None  # keys and values of the text so far, for heads that look back at it


class Proposal(NamedTuple):
    """The distributions q from which a draft's tokens were drawn; siblings are drawn in order, without replacement."""

    q: Tensor  # [Q, V] draft probabilities; rows, and nodes with the same past, may share one of the Q distributions
    of_children: Tensor  # [B, N] which distribution the children of each node were drawn from; any value for leaves


class SideBranch(NamedTuple):
    """Nodes below the root of a draft that are never accepted; lookahead decoding needs the logits after them."""

    ids: Tensor  # [B, M] the token of each node, without the root
    topology: Topology  # how the root and the M nodes are connected
    on_logits: Callable[[Tensor], None]  # receives the logits [B, M, V] after the nodes, in every forward over them


class Draft(NamedTuple):
    """The tree of candidate tokens that one decoding step verifies, for each row of a batch."""

    ids: Tensor  # [B, N] the token of each node
    topology: Topology  # how the N nodes are connected, on the device of `ids`
    proposal: Proposal | None = None  # what the tokens were drawn from; `None` if they were chosen, as the best guesses
    side_branches: tuple[SideBranch, ...] = ()  # what else the verifying forward reads; acceptance does not see it
    log_probs: Tensor | None = None
    """[B, N] how probable the drafter thinks each node's path is, falling from parent to child; `None`: unknown."""

    @property
    def whole(self) -> Draft:
        """The tree that the verifying forward reads: the candidates, followed by all side branches."""
        ids, topology = self.ids, self.topology
        for branch in self.side_branches:
            ids, topology = torch.cat([ids, branch.ids], dim=1), topology.beside(branch.topology)
        return Draft(ids, topology)

    def records(self, path: Tensor, lengths: Sequence[int]) -> list[DraftRecord]:
        """Copy each row's draft to the host, with the first `lengths[b]` nodes of the accepted path, `path[b]`."""
        parents = self.topology.parent.expand_as(self.ids)
        rows = zip(self.ids.tolist(), parents.tolist(), path.tolist(), lengths, strict=True)
        return [DraftRecord(ids, above, accepted[:length]) for ids, above, accepted, length in rows]


class DraftRecord(NamedTuple):
    """The draft of one text in one step, as plain numbers, with the nodes that were accepted. Node 0 is the root."""

    ids: list[int]  # the token of each of the N nodes
    parents: list[int]  # the index of each node's parent, which comes before the node; 0 for the root
    accepted: list[int]  # the nodes of the accepted path, from the root on

    @property
    def grid(self) -> tuple[list[int], list[int]]:
        """The row [N] and the depth [N] at which a picture shows each node.

        The accepted path is the first row, so that a reader finds it also in a large tree. The first child of any other
        node stands in the node's own row, and each further child starts a new row."""
        accepted, depths = set(self.accepted), [0] * len(self.parents)
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self.parents)):
            children[self.parents[node]].append(node)
            depths[node] = depths[self.parents[node]] + 1
        for siblings in children:
            siblings.sort(key=lambda node: node not in accepted)
        rows, next_row, waiting = [0] * len(self.parents), 0, [0]
        while waiting:
            node = waiting.pop()
            if node == 0 or children[self.parents[node]][0] == node:
                rows[node] = rows[self.parents[node]]
            else:
                next_row += 1
                rows[node] = next_row
            waiting += reversed(children[node])
        return rows, depths


class Drafter(Protocol):
    """Proposes the next tokens of each text. Acceptance, not the drafter, decides which of these tokens are written.

    A drafter that needs the whole text reads it from the session's `Sequences`, where the root is the last token."""

    def propose(self, frontier: Frontier) -> Draft:
        """Propose a draft for each text of `frontier`; node 0 of a draft is the root, the text's last decided token."""


@runtime_checkable
class KeepsProducts(Protocol):
    """A drafter that keeps copies or products of weights; the weights may have changed since the last text."""

    def refresh(self) -> None:
        """Make them again if a weight may have changed. A compiled step cannot do it, and reads them."""


@runtime_checkable
class KeepsTexts(Protocol):
    """A drafter that keeps what it has read of the texts, by their rows in the session."""

    def forget(self, rows: Sequence[int]) -> None:
        """Forget the texts of `rows`, which were not drafted for yet, or whose places other texts have taken."""


def forget(drafter: Drafter, rows: Sequence[int]) -> None:
    """Let a drafter forget the texts of `rows` of the session, in whose places other texts begin."""
    if isinstance(drafter, KeepsTexts):
        drafter.forget(rows)


class NoDraft:
    """A drafter that proposes only the root (the last decided token), so that a step writes one token per text."""

    def __init__(self, device: torch.device) -> None:
        self.topology = chain(1, device)

    def propose(self, frontier: Frontier) -> Draft:
        return Draft(frontier.root[:, None], self.topology)
