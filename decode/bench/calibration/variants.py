"""Compares the fastest tree of a calibration with variants: other numbers of candidates, n-grams, and both together.

Their tau is measured by decoding some of the texts. Their step times are compared with that of the tree within one
session, because the speed of a machine changes with time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from decode.bench.calibration.stored import Calibration, CalibrationPoint
from decode.drafters import parse
from decode.drafters.base import DrafterContext, DrafterFactory
from decode.drafters.layouts import TOP, DynamicTree, Layout, with_shortlist
from medusa.heads.independent import MedusaHeads
from medusa.tree import usual_shortlist

SHORTLISTS = (8, 16, 32, 64)  # numbers of candidates to try if trees have them (`Tree.shortlist`)
CLEARLY = 1.01  # a larger number of candidates must be so many times as fast as a smaller one
LEAST = 0.4  # tokens that heads must add to a step with n-grams: their share of a step's time, times tokens per step
COPIES = "ngram:n=5,tokens=12,matches=2"  # the n-grams that share a tree with heads; chosen by a replay on SmolLM2
Way = Layout | DrafterFactory  # a tree that heads fill, or a drafter
MeasuredTau = Callable[[Way], float]  # tokens per step
Timed = Callable[[Sequence[Way], Sequence[float]], list[float]]
"""Measures step times of ways with known tokens per step, as multiples of the time of the first way."""


def choose_shortlist(found: Calibration, measured_tau: MeasuredTau, timed: Timed) -> None:
    """Choose the number of candidates of each head for the best tree of a calibration, and correct its figures."""
    usual = usual_shortlist(found.best.nodes)
    sizes = [usual, *(size for size in SHORTLISTS if size != usual)]
    shortened = [with_shortlist(found.tree, size) for size in sizes]
    known = [measured_tau(tree) for tree in shortened]
    times, fastest = timed(shortened, known), sizes.index(min(sizes))
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        if known[index] / times[index] > CLEARLY * known[fastest] / times[fastest]:
            fastest = index
    best = found.best
    accepted = best.tau * known[fastest] / known[0]
    found.points[found.chosen] = replace(best, tau=accepted, step_ms=best.step_ms * times[fastest])
    found.shortlist = sizes[fastest]


def with_copies(
    model: PreTrainedModel, heads: MedusaHeads, found: Calibration, sizes: Sequence[int]
) -> dict[str, DrafterFactory]:
    """Make the drafters with n-grams that a calibration tries, by their names in --drafter.

    They are n-grams alone, and mixes whose trees have the size that is best for the heads, or the next size."""
    _, *drafting = found.points
    least = max(drafting, key=lambda point: point.tokens_per_second).nodes
    temperatures = tuple(found.temperatures)
    most = 1 + TOP if len(temperatures) == 1 else max(sizes)
    sources = {"ngram": parse("ngram").factory(DrafterContext(model))}
    for nodes in sorted(size for size in sizes if least <= size <= most)[:2]:
        tree = found.fit(DynamicTree.over_heads(nodes, len(temperatures)))
        name = f"mix:nodes={nodes},least={LEAST},heads+{COPIES}"
        sources[name] = parse(name).factory(DrafterContext(model, heads, tree))
    return sources


def add_copies(
    found: Calibration,
    sources: Mapping[str, DrafterFactory],
    measured_tau: MeasuredTau,
    timed: Timed,
) -> None:
    """Add the drafters with n-grams to the points of a calibration."""
    best, found.chosen_tree = found.best, found.chosen
    taus = [measured_tau(source) for source in sources.values()]
    _, *times = timed([found.tree, *sources.values()], [best.tau, *taus])
    for (name, source), accepted, time in zip(sources.items(), taus, times, strict=True):
        point = CalibrationPoint(source.num_nodes, [], accepted, best.step_ms * time, source.heads is not None, name)
        found.points.append(point)
