"""A mix of several drafters: the union of their trees is verified in one forward.

If all parts know how probable their nodes are, as dynamic trees of heads and n-grams do, the union keeps the most
probable nodes: the parts share the nodes by expected gain.

Shapes: B rows (texts of the batch), M nodes of all drafts together (the root once), D the greatest depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from decode.draft import Draft, Drafter, Frontier, forget
from decode.drafters import parse
from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, require_at_least
from decode.drafters.layouts import Layout, TreeLike
from decode.drafters.ngram import NgramConfig, NgramDrafter, NgramIndex
from decode.session import Session
from decode.topology import Topology
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import MAX_NODES

GAINS = (0.6, 0.5, 0.35, 0.3, 0.25, 0.2, 0.2, 0.2, 0.1)
"""Tokens that heads add to those of n-grams in a step, by the matching tokens before a copy, until a session knows."""
WEIGHT = 4  # steps of a session that change a gain as much as `GAINS` does
NO_PLUS = "a mix is split at each +, so a path in it cannot hold one"
UNKNOWN = -1e9  # the log probability of nodes that only fill up a draft


def union(drafts: Sequence[Draft], most: int) -> Draft:
    """Join several drafts for a batch: for each text, one tree of at most `most` nodes, root included.

    Nodes are equal if their paths from the root hold the same tokens, and count once, as probable as the most probable
    of them. The most probable nodes are kept; if a draft has no probabilities, the first nodes in the order of the
    drafts. A parent is no less probable than its child and precedes it, so these nodes form a tree. A tree smaller than
    the largest of the batch is padded with children of its last node."""
    root, deepest = drafts[0].ids[:, :1], max(draft.topology.max_depth for draft in drafts)
    rows, count = len(root), 1
    ids, parents, depths = [root], [torch.zeros_like(root)], [torch.zeros_like(root)]
    texts = [F.pad(root[:, :, None], (0, deepest), value=-1)]  # tokens on each node's path [B, M, D + 1], or -1
    for draft in drafts:
        topology = draft.topology
        ids.append(draft.ids[:, 1:])
        above = topology.parent[:, 1:].expand(rows, -1)
        parents.append(torch.where(above > 0, above + (count - 1), 0))
        depths.append(topology.depth[:, 1:].expand(rows, -1))
        paths = topology.paths[:, 1:].expand(rows, -1, -1)
        held = draft.ids.gather(1, paths.clamp_min(0).flatten(1)).view(paths.shape).masked_fill(paths < 0, -1)
        texts.append(F.pad(held, (0, deepest - topology.max_depth), value=-1))
        count += topology.num_nodes - 1
    text, number = torch.cat(texts, dim=1), torch.arange(count, device=root.device).expand(rows, -1)
    same = (text[:, :, None] == text[:, None]).all(-1)  # [B, M, M]
    first = same.to(torch.uint8).argmax(-1)  # [B, M] the first node equal to each node
    value = _probabilities(drafts, first)
    order = value.masked_fill(first != number, -torch.inf).argsort(dim=1, descending=True, stable=True)
    place = torch.zeros_like(order).scatter_(1, order, number)  # [B, M] the index of each first node in the union
    found = (first == number).sum(-1)  # [B] number of nodes of each row's union
    fewest, greatest = torch.stack(found.aminmax()).tolist()
    nodes = min(most, greatest)
    chosen = order[:, :nodes]
    parent = place.gather(1, first.gather(1, torch.cat(parents, dim=1).gather(1, chosen)))
    depth, drafted = torch.cat(depths, dim=1).gather(1, chosen), torch.cat(ids, dim=1).gather(1, chosen)
    missing = max(nodes - fewest, 0)
    if missing:
        lacks, last = number[:, :nodes] >= found[:, None], (found - 1).clamp_max(nodes - 1)[:, None]
        parent = torch.where(lacks, last, parent)
        depth = torch.where(lacks, depth.gather(1, last) + 1, depth)
        drafted = drafted.masked_fill(lacks, 0)
    widest = min(sum(draft.topology.max_children for draft in drafts) + missing, nodes - 1)
    return Draft(drafted, Topology.from_parents(parent, depth, deepest + bool(missing), widest))


def _probabilities(drafts: Sequence[Draft], first: Tensor) -> Tensor:
    """Return the log probability of each of M nodes, [B, M], that of the most probable node equal to it; else zeros.

    `first` [B, M]: the first node equal to each node."""
    known = [draft.log_probs for draft in drafts if draft.log_probs is not None]
    value = torch.zeros(first.shape, device=first.device)
    if len(known) < len(drafts):
        return value
    parts = [part if number == 0 else part[:, 1:] for number, part in enumerate(known)]
    return value.scatter_reduce_(1, first, torch.cat(parts, dim=1).clamp_min(UNKNOWN), "amax", include_self=False)


@dataclass
class MixConfig(DrafterConfig):
    """Options of `--drafter mix`: several drafters, whose drafts are joined."""

    parts: str  # the drafters joined by `+`, best first, such as `heads+ngram:n=2,tokens=5`; this option comes last
    nodes: int = 0  # maximum number of nodes of the union, root included; 0: no limit
    least: float = 0.0  # n-grams draft alone in steps in which the other parts add fewer tokens, on average
    rest = "parts"

    def __post_init__(self) -> None:
        require_at_least(0, "mix", nodes=self.nodes)
        if self.nodes == 1:
            raise RequestError("drafter mix: nodes is 1, the root alone; give at least 2, or 0 for all")
        if not self.least >= 0:
            raise RequestError(f"drafter mix: least is {self.least}; it must be at least 0")
        names = self.parts.split("+")
        if len(names) < 2:
            raise RequestError(f"drafter mix: {self.parts!r} is one drafter; join several by +, as in mix:heads+ngram")
        if not all(names):
            why = f"; {NO_PLUS}" if "/" in self.parts else ""
            raise RequestError(f"drafter mix: {self.parts!r} has an empty part{why}")
        if len(set(names)) < len(names):
            raise RequestError(f"drafter mix: {self.parts!r} names a drafter twice; name each once")
        if (cut := next((name for name in names if "/" in name.partition(":")[0]), None)) is not None:
            raise RequestError(f"drafter mix: {cut!r} is no drafter; {NO_PLUS}")
        self.configs = [parse(name) for name in names]
        if any(isinstance(config, MixConfig) for config in self.configs):
            raise RequestError("drafter mix: a mix cannot contain a mix; name all drafters in one, joined by +")
        if self.least and not any(isinstance(config, NgramConfig) for config in self.configs):
            raise RequestError("drafter mix: least is for a mix with ngram; add +ngram, or leave it out")
        self.needs_heads = any(config.needs_heads for config in self.configs)
        self.takes_tree = any(config.takes_tree for config in self.configs)
        needs = dict.fromkeys(config.needs for config in self.configs if config.needs != "nothing")
        self.needs = " and ".join(needs) or "nothing"

    def title(self, name: str) -> str:
        return " and ".join(part.partition(":")[0] for part in self.parts.split("+"))

    def check(self, config: PretrainedConfig) -> None:
        for part in self.configs:
            part.check(config)
        self.planned_heads(config)

    def own_heads(self, model: PreTrainedModel) -> MedusaHeads | None:
        return next((heads for part in self.configs if (heads := part.own_heads(model)) is not None), None)

    def planned_heads(self, config: PretrainedConfig) -> MedusaHeads | None:
        planned = [heads for part in self.configs if (heads := part.planned_heads(config)) is not None]
        if len(planned) > 1 or (planned and self.needs_heads):
            raise RequestError(
                f"drafter mix: {self.parts} has two sets of heads, and a mix drafts with one; leave one out"
            )
        return planned[0] if planned else None

    def layouts(self, heads: MedusaHeads, tree: TreeLike = None, stop_drafting: float = 0.0) -> tuple[Layout, ...]:
        return tuple(layout for part in self.configs for layout in part.layouts(heads, tree, stop_drafting))

    def factory(self, context: DrafterContext) -> DrafterFactory:
        without = context._replace(tree=None, stop_drafting=0.0)
        return Mix(
            [part.factory(context if part.takes_tree else without) for part in self.configs], self.nodes, self.least
        )


class Mix(DrafterFactory):
    """A factory of drafters, each of which joins the drafts of several drafters."""

    def __init__(self, parts: Sequence[DrafterFactory], nodes: int = 0, least: float = 0.0) -> None:
        """Make a mix of `parts`; a draft has at most `nodes` nodes, root included (0: no limit).

        `least`: n-grams draft alone in steps in which the other parts add fewer tokens, on average (0: never).
        Raise a `RequestError` if two parts have different heads: a session has KV caches for one set of heads only."""
        self.parts, self.limit, self.least = list(parts), nodes, least
        several = {id(part.heads): part.heads for part in parts if part.heads is not None}
        if len(several) > 1:
            raise RequestError("a mix holds two sets of heads; give all its parts the same heads")
        self.heads = next(iter(several.values()), None)
        self.tree = next((part.tree for part in parts if part.tree is not None), None)
        self.warm_up = max(part.warm_up for part in parts)
        everything = 1 + sum(part.num_nodes - 1 for part in parts)
        if everything > MAX_NODES:  # also with `nodes`, because all nodes are compared before the best ones are kept
            raise RequestError(f"the parts of a mix draft up to {everything} nodes; at most {MAX_NODES} can be joined")
        self.num_nodes = min(nodes or everything, everything)
        self.num_bytes = sum({id(part.heads or part): part.num_bytes for part in parts}.values())  # heads count once

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        """Make a drafter that joins the drafts of all parts. Raise a `RequestError` if drafts are `drawn` (sampled)."""
        if drawn:  # siblings would come from several distributions, and p / q needs one
            raise RequestError("guesses of a mix cannot be drawn; use draft topk")
        return MixDrafter([part.start(session) for part in self.parts], self.num_nodes, self.least)

    def reshaped(self, change: Callable[[Layout], Layout]) -> Mix:
        parts = [part.reshaped(change) for part in self.parts]
        limit, trees = self.limit, [part.tree for part in parts if part.tree is not None]
        if limit and trees:  # fewer nodes for all parts together
            limit = min(limit, max(tree.num_nodes for tree in trees))
        return Mix(parts, limit, self.least)


class MixDrafter:
    """Joins the drafts of several drafters into one tree of at most `num_nodes` nodes."""

    def __init__(self, parts: Sequence[Drafter], num_nodes: int, least: float = 0.0) -> None:
        self.parts, self.num_nodes, self.least = parts, num_nodes, least
        self.copies = next((part for part in parts if isinstance(part, NgramDrafter)), None)
        self.added = [[WEIGHT * gain, float(WEIGHT)] for gain in GAINS]
        """By the matching tokens before a copy: tokens that the other parts have added, and steps."""
        self.shared, self.depth = False, 0  # whether all parts took part in the last draft, and its depth

    def forget(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            forget(part, rows)

    def propose(self, frontier: Frontier) -> Draft:
        """Propose the union of the mixed drafters' drafts; if only one of them has guesses, its draft is unchanged."""
        copies, parts, copied = self.copies, self.parts, None
        if self.least and copies is not None:
            copied = copies.propose(frontier)
            self.shared = self._pays([copies.rows[row] for row in frontier.rows])
            parts = parts if self.shared else [copies]
        drafts = [copied if copied and part is copies else part.propose(frontier) for part in parts]
        filled = [draft for draft in drafts if draft.topology.num_nodes > 1] or drafts[:1]
        fits = len(filled) == 1 and filled[0].topology.num_nodes <= self.num_nodes
        draft = filled[0] if fits else union(filled, self.num_nodes)
        self.depth = draft.topology.max_depth
        side_branches = tuple(branch for part in drafts for branch in part.side_branches)
        return draft._replace(side_branches=side_branches) if side_branches else draft

    def _pays(self, texts: Sequence[NgramIndex]) -> bool:
        """Whether the other parts are expected to add at least `least` tokens to those of the n-grams, per text."""
        for text in texts if self.shared else ():
            if text.missed is not None and text.missed[1] <= self.depth:  # more come from steps of other drafters
                level, tokens = text.missed
                self.added[level][0] += tokens
                self.added[level][1] += 1
        gains = [tokens / steps for tokens, steps in self.added]
        return sum(gains[text.matching] for text in texts) >= self.least * len(texts)
