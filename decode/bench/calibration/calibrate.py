"""Finds the tree that writes the most tokens per second with given heads on this machine.

    speed(tree) = tau(tree) / T(tree)

tau is predicted by replaying recorded texts of the backbone, and T, the time of a step, is measured in the
decoding loop. Dynamic trees (`decode.drafters.layouts`) are tried as well as static ones. They accept more with
the same number of nodes, but choosing the nodes takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from decode.bench.calibration.recording import Recording, Text, grow, predicted_tau, predicted_tau_held_out, record
from decode.bench.calibration.stored import Calibration, CalibrationPoint, RecordedTexts, situation
from decode.bench.machine import stopwatch
from decode.bench.methods import Method, medusa_method, one_by_one
from decode.drafters.layouts import TOP, DynamicTree
from decode.drafters.trained_heads import TrainedHeads
from decode.generation import decoding
from decode.request import prepare
from decode.results import tau
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout, Tree

SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64)
"""Sizes of the trees to try, in nodes; 1 is plain decoding."""
WORTHWHILE = 1.02
"""The predicted speed over plain decoding that a tree needs to be chosen: timing errs by about as much."""
WARM_UP = 2  # steps of each timing that do not count


def calibrate(
    model: PreTrainedModel,
    heads: MedusaHeads,
    texts: Sequence[Text],
    settings: Settings,
    batch_size: int = 1,
    sizes: Sequence[int] | None = None,
    rounds: int = 3,
    on_progress: Callable[[str], object] = lambda what: None,
) -> Calibration:
    """Find the best tree from texts that the backbone wrote under `settings`.

    Args:
        sizes: of the trees, in nodes; by default those that may pay off on this device at this batch size.
        rounds: of timing.
        on_progress: receives the name of each stage.

    Raises:
        RequestError: all continuations are too short for the heads.
    """
    # Steps are also timed and counted after the texts have ended, eagerly and with all nodes of their trees.
    settings = replace(settings, stop=(), stop_drafting=0.0, compile=False)
    backbone, prompts = Backbone(model), [prompt for prompt, _ in texts]
    on_progress("recording")
    recording = record(backbone, heads, texts)
    longest, reach = max((len(new) for _, new in texts), default=0), heads.config.num_heads
    if not recording.has_steps:
        raise RequestError(
            f"the longest continuation has {longest} tokens, but {reach} heads need more than {reach}; "
            "give other prompts, or more new tokens"
        )
    temperatures = recording.fit_temperatures()
    sizes = sizes or sizes_for(backbone.device, batch_size)
    # Drawn drafts exclude dynamic trees: which nodes are chosen must not depend on the tokens drawn.
    dynamic = settings.draft == "topk" and backbone.vocab_size > TOP
    trees = _trees(recording, sizes, temperatures if dynamic else (), on_progress)
    on_progress("timing")
    seconds = time_steps(model, heads, prompts, trees, settings, batch_size, rounds)
    again = partial(medusa_method, model, heads, replace(settings, max_new_tokens=longest))
    points = [
        CalibrationPoint(
            nodes=tree.num_nodes,
            paths=[] if tree.is_dynamic else tree.candidates.to_json(),
            tau=_expected_tau(tree, recording, heads, again, prompts),
            step_ms=1000 * of_step,
            dynamic=tree.is_dynamic,
        )
        for tree, of_step in zip(trees, seconds, strict=True)
    ]
    about = RecordedTexts(len(texts), recording.tokens, sum(map(len, prompts)))
    place = situation(model, heads, settings, batch_size)
    return Calibration(points, best_of(points), list(temperatures), place, about)


def sizes_for(device: torch.device, batch_size: int) -> list[int]:
    """The sizes that may pay off. A CPU computes nodes one by one, so large batches get small trees.

    With a single row, trees of 2 or 3 nodes never pay off: the step from a matrix-vector product to a matrix-matrix
    product costs more than they gain.
    """
    most = max(256 // batch_size, 8) if device.type == "cpu" else SIZES[-1]
    return [nodes for nodes in SIZES if nodes <= most and (batch_size > 1 or nodes not in (2, 3))]


def _trees(
    recording: Recording, sizes: Sequence[int], temperatures: tuple[float, ...], on_progress: Callable[[str], object]
) -> list[Layout]:
    """The trees to try: plain decoding, a grown tree per size and, with `temperatures`, a dynamic tree per size."""
    grown: dict[int, Tree] = {1: Tree.chain(0)}
    for nodes in sizes:
        if nodes > 1:
            on_progress(f"a tree of {nodes} nodes")
            tree = grow(recording, nodes)
            grown.setdefault(tree.num_nodes, tree)
    trees: list[Layout] = [tree for _, tree in sorted(grown.items())]
    if temperatures and len(grown) > 1:
        trees += [DynamicTree.over_heads(nodes, len(temperatures), temperatures) for nodes in sizes if nodes > 1]
    return trees


def _expected_tau(
    tree: Layout, recording: Recording, heads: MedusaHeads, method: Callable[..., Method], prompts: list[list[int]]
) -> float:
    """The tau of a tree on texts like those recorded. `method`: makes a decoding method for a tree."""
    if isinstance(tree, Tree):
        return predicted_tau_held_out(tree.num_nodes, recording)
    if not heads.follows_path:
        return predicted_tau(tree, recording)  # one temperature per head cannot overfit the texts
    # The recording does not show guesses that depend on the path, so the prompts are decoded again.
    return measured_tau(method(tree=tree), prompts, range(len(prompts)))


def time_steps(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[list[int]],
    trees: Sequence[Layout],
    settings: Settings,
    batch_size: int = 1,
    rounds: int = 3,
    steps: int = 24,
) -> list[float]:
    """Seconds of a step with each tree. The trees take turns; a tree of one node is timed as plain decoding.

    The result is the lower quartile, because other work on the machine only makes steps longer. The batch holds the
    first prompts, repeated if there are too few. Each turn times up to `steps` steps.
    """
    kwargs = settings.generate_kwargs() | {"max_new_tokens": 8 * steps, "eos_token_id": None}
    batch, clock = [prompts[row % len(prompts)] for row in range(batch_size)], stopwatch(model.device)

    def times_of(tree: Layout) -> list[float]:
        requests = prepare(model, batch, list(range(batch_size)), **kwargs)
        times, last = [], clock()
        for step in decoding(model, TrainedHeads(heads, tree), requests, settings).steps:
            now = clock()
            if len(step.ids) == batch_size:  # finished rows would make the step cheaper
                times.append(now - last)
            last = now
            if len(times) >= steps:
                break
        return times or [float("inf")]

    times: list[list[float]] = [[] for _ in trees]
    for number in range(rounds):
        for turn in range(len(trees)):
            index = (number + turn) % len(trees)
            times[index] += times_of(trees[index])[WARM_UP:]
    return [sorted(found)[len(found) // 4] for found in times]


def measured_tau(method: Method, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> float:
    """tau of decoding `prompts` one by one, with a seed for each."""
    return tau(one_by_one(method, prompts, seeds))


def best_of(points: Sequence[CalibrationPoint]) -> int:
    """Index of the fastest point; 0 (plain decoding) unless another is faster by `WORTHWHILE`."""
    best = max(range(len(points)), key=lambda index: points[index].tokens_per_second)
    return best if points[best].tokens_per_second >= WORTHWHILE * points[0].tokens_per_second else 0
