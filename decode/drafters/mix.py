"""Several drafters at once: the union of their trees, which is verified in one forward.

Nodes are the same where the ways to them from the root hold the same tokens. Of equal ones the first stays, in the
order in which the drafters were named, so a budget takes from the last ones first.

Shapes: B rows, M nodes of all drafts together (the root once), D the greatest depth, N nodes that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig

from decode.draft import Draft, Drafter, Frontier
from decode.drafters import parse
from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, require_at_least, require_no_tree
from decode.drafters.layouts import TreeLike
from decode.session import Session
from decode.topology import Topology
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.memory import bytes_of
from medusa.tree import Layout


@dataclass(frozen=True)
class MixConfig(DrafterConfig):
    """Drafters by name, the most trusted first."""

    parts: str
    """As each would be asked for alone, joined by `+`: `heads+ngram:n=2,tokens=5`. They come last."""
    nodes: int = 0
    """Of the union at most, root included; 0: all."""

    rest = "parts"

    def __post_init__(self) -> None:
        require_at_least(0, "mix", nodes=self.nodes)
        if self.nodes == 1:
            raise RequestError("drafter mix: nodes is 1, the root alone; give at least 2, or 0 for all")
        names = self.parts.split("+")
        if len(names) < 2:
            raise RequestError(f"drafter mix: {self.parts!r} is one drafter; join several by +, as in mix:heads+ngram")
        if len(set(names)) < len(names):
            raise RequestError(f"drafter mix: of {self.parts} one is given twice")
        if any(isinstance(plan, MixConfig) for plan in self.plans):
            raise RequestError("drafter mix: a mix in a mix; name all drafters in one, joined by +")

    @cached_property
    def plans(self) -> list[DrafterConfig]:
        return [parse(name) for name in self.parts.split("+")]

    @property
    def needs_heads(self) -> bool:
        return any(plan.needs_heads for plan in self.plans)

    @property
    def takes_tree(self) -> bool:
        return any(plan.takes_tree for plan in self.plans)

    @property
    def needs(self) -> str:
        found = dict.fromkeys(plan.needs for plan in self.plans)
        return " and ".join([name for name in found if name != "nothing"]) or "nothing"

    def check(self, config: PretrainedConfig) -> None:
        for plan in self.plans:
            plan.check(config)

    def layouts(self, heads: MedusaHeads, tree: TreeLike = None, stop_drafting: float = 0.0) -> tuple[Layout, ...]:
        return tuple(found for plan in self.plans for found in plan.layouts(heads, tree, stop_drafting))

    def factory(self, context: DrafterContext) -> DrafterFactory:
        if not self.takes_tree:
            require_no_tree(context.tree, context.stop_drafting)
        without = context._replace(tree=None, stop_drafting=0.0)
        return Mix([plan.factory(context if plan.takes_tree else without) for plan in self.plans], self.nodes)


class Mix(DrafterFactory):
    """Sources whose drafts are joined."""

    def __init__(self, parts: Sequence[DrafterFactory], nodes: int = 0) -> None:
        """`nodes`: of the union at most, root included; 0: all.

        Raises:
            RequestError: two different sets of heads; a session's text is read along for one."""
        self.parts, self.budget = list(parts), nodes
        several = {id(part.heads): part.heads for part in parts if part.heads is not None}
        if len(several) > 1:
            raise RequestError("a mix holds two sets of heads; the text is read along for one only")
        self.heads = next(iter(several.values()), None)
        self.warm_up = max(part.warm_up for part in parts)

    @property
    def num_nodes(self) -> int:
        everything = 1 + sum(part.num_nodes - 1 for part in self.parts)
        return min(self.budget or everything, everything)

    @property
    def num_bytes(self) -> int:
        own = sum(part.num_bytes for part in self.parts if part.heads is None)
        return own + (0 if self.heads is None else bytes_of(self.heads))  # one set, whoever asks it

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        """
        Raises:
            RequestError: drafts are to be drawn."""
        if drawn:  # siblings would come from several distributions, and p / q asks for one
            raise RequestError("a mix of drafters is not drawn; use draft topk")
        return MixDrafter([part.start(session) for part in self.parts], self.num_nodes)

    def reshaped(self, change: Callable[[Layout], Layout]) -> Mix:
        return Mix([part.reshaped(change) for part in self.parts], self.budget)


class MixDrafter:
    """Asks every part, and joins what they say."""

    def __init__(self, parts: Sequence[Drafter], num_nodes: int) -> None:
        self.parts, self.num_nodes = parts, num_nodes

    def propose(self, frontier: Frontier) -> Draft:
        drafts = [part.propose(frontier) for part in self.parts]
        speaking = [draft for draft in drafts if draft.topology.num_nodes > 1]
        if not speaking:
            draft = drafts[0]
        elif len(speaking) == 1 and speaking[0].topology.num_nodes <= self.num_nodes:
            draft = speaking[0]
        else:
            draft = union(speaking, self.num_nodes)
        side_branches = tuple(aside for part in drafts for aside in part.side_branches)
        return draft._replace(side_branches=side_branches) if side_branches else draft


def union(drafts: Sequence[Draft], most: int) -> Draft:
    """Drafts from the same roots -> one with every node of theirs once, the first `most` (root included) of them.

    A parent stands before its children in every draft, and the first of its equals before that, so none is lost by
    keeping the first ones. Rows with fewer nodes than others get guesses behind their last one.
    """
    root, deepest = drafts[0].ids[:, :1], max(draft.topology.max_depth for draft in drafts)
    rows, count = len(root), 1
    ids, parents, depths = [root], [torch.zeros_like(root)], [torch.zeros_like(root)]
    words = [F.pad(root[:, :, None], (0, deepest), value=-1)]  # on the way to each node [B, M, D + 1], padded with -1
    for draft in drafts:
        topology = draft.topology
        ids.append(draft.ids[:, 1:])
        above = topology.parent[:, 1:].expand(rows, -1)
        parents.append(torch.where(above > 0, above + (count - 1), 0))
        depths.append(topology.depth[:, 1:].expand(rows, -1))
        paths = topology.paths[:, 1:].expand(rows, -1, -1)
        held = draft.ids.gather(1, paths.clamp_min(0).flatten(1)).view(paths.shape).masked_fill(paths < 0, -1)
        words.append(F.pad(held, (0, deepest - topology.max_depth), value=-1))
        count += topology.num_nodes - 1
    said, number = torch.cat(words, dim=1), torch.arange(count, device=root.device).expand(rows, -1)
    same = (said[:, :, None] == said[:, None]).all(-1)  # [B, M, M]
    first = same.to(torch.uint8).argmax(-1)  # [B, M] the first of each node's equals
    place = (first == number).cumsum(-1) - 1  # of those, in the union
    found = place[:, -1] + 1  # [B]
    least, greatest = torch.stack(found.aminmax()).tolist()
    nodes = min(most, greatest)
    chosen = torch.zeros(rows, count + 1, dtype=torch.long, device=root.device)
    chosen = chosen.scatter_(1, torch.where(first == number, place, count), number)[:, :nodes]
    parent = place.gather(1, first.gather(1, torch.cat(parents, dim=1).gather(1, chosen)))
    depth, drafted = torch.cat(depths, dim=1).gather(1, chosen), torch.cat(ids, dim=1).gather(1, chosen)
    missing = max(nodes - least, 0)
    if missing:
        lacks, last = number[:, :nodes] >= found[:, None], (found - 1).clamp_max(nodes - 1)[:, None]
        parent = torch.where(lacks, last, parent)
        depth = torch.where(lacks, depth.gather(1, last) + 1, depth)
        drafted = drafted.masked_fill(lacks, 0)
    widest = min(sum(draft.topology.max_children for draft in drafts) + missing, nodes - 1)
    return Draft(drafted, Topology.from_parents(parent, depth, deepest + bool(missing), widest))
