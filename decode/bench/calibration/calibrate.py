"""The tree that writes the most tokens per second with given heads on this machine.

    speed(tree) = tau(tree) / T(nodes)

tau is predicted by replaying recorded texts of the backbone (`grow`), T is timed in the decoding loop (`step_times`).
Dynamic trees (`decode.drafters.dynamic_tree`) are tried besides static ones: they accept more with the same number of
nodes, but choosing the nodes takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench.calibration.grow import grow, predicted_tau, predicted_tau_held_out
from decode.bench.calibration.recording import Recording, record
from decode.bench.calibration.step_times import time_steps
from decode.bench.calibration.stored import Calibration, CalibrationPoint, RecordedTexts, situation
from decode.bench.calibration.texts import Text
from decode.bench.methods import medusa_method
from decode.drafters.dynamic_tree import TOP, DynamicTree
from decode.results import tau
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout, Tree

SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64)
"""Trees that may be tried, in nodes; 1 is plain decoding."""
WORTHWHILE = 1.02
"""The speed over plain decoding that a tree must promise to be chosen: timing errs by about as much."""


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
        sizes: in nodes; by default those that may pay on this device at this batch size.
        rounds: of timing.
        on_progress: receives the name of each stage.

    Raises:
        RequestError: no continuation is longer than the heads reach.
    """
    # Steps are also timed and counted after the texts have ended, and with all nodes of their trees.
    settings = replace(settings, stop=(), stop_drafting=0.0)
    backbone = Backbone(model)
    on_progress("recording")
    recording = record(backbone, heads, texts)
    if not recording.has_steps:
        longest, reach = max((len(new) for _, new in texts), default=0), heads.config.num_heads
        raise RequestError(
            f"the longest continuation has {longest} tokens, but {reach} heads need more than {reach}; "
            "give other prompts, or more new tokens"
        )
    temperatures = recording.fit_temperatures()
    sizes = sizes or sizes_for(backbone.device, batch_size)
    # Nodes of drawn drafts must not depend on what is drawn, so they have no dynamic trees.
    dynamic = settings.draft == "topk" and backbone.vocab_size > TOP
    trees = _trees(recording, sizes, temperatures, dynamic, on_progress)
    on_progress("timing")
    seconds = time_steps(model, heads, [prompt for prompt, _ in texts], trees, settings, batch_size, rounds)
    points = [
        CalibrationPoint(
            nodes=tree.num_nodes,
            paths=[] if tree.is_dynamic else tree.candidates.to_json(),
            tau=_expected_tau(model, heads, texts, recording, tree, settings),
            step_ms=1000 * of_step,
            dynamic=tree.is_dynamic,
        )
        for tree, of_step in zip(trees, seconds, strict=True)
    ]
    about = RecordedTexts(len(texts), recording.tokens, sum(len(prompt) for prompt, _ in texts))
    place = situation(model, heads, settings, batch_size)
    return Calibration(points, best_of(points), list(temperatures), place, about)


def sizes_for(device: torch.device, batch_size: int) -> list[int]:
    """The sizes worth trying. A CPU computes nodes one by one, so large batches get small trees.

    With a single row the first nodes cost the most (products of matrices instead of a matrix and a vector), so trees of
    2 or 3 nodes never pay there.
    """
    most = max(256 // batch_size, 8) if device.type == "cpu" else SIZES[-1]
    return [nodes for nodes in SIZES if nodes <= most and (batch_size > 1 or nodes not in (2, 3))]


def _trees(
    recording: Recording,
    sizes: Sequence[int],
    temperatures: tuple[float, ...],
    dynamic: bool,
    on_progress: Callable[[str], object],
) -> list[Layout]:
    """The trees to try: plain decoding, a grown tree of each size and, if `dynamic`, dynamic trees of these sizes."""
    grown: dict[int, Tree] = {1: Tree.chain(0)}
    for nodes in sizes:
        if nodes > 1:
            on_progress(f"a tree of {nodes} nodes")
            tree = grow(recording, nodes)
            grown.setdefault(tree.num_nodes, tree)
    trees: list[Layout] = [tree for _, tree in sorted(grown.items())]
    if dynamic and len(grown) > 1:
        trees += [DynamicTree.over_heads(nodes, len(temperatures), temperatures) for nodes in sizes if nodes > 1]
    return trees


def _expected_tau(
    model: PreTrainedModel,
    heads: MedusaHeads,
    texts: Sequence[Text],
    recording: Recording,
    tree: Layout,
    settings: Settings,
) -> float:
    """The tau of a tree on texts of the kind that was recorded."""
    if isinstance(tree, Tree):
        return predicted_tau_held_out(tree.num_nodes, recording)
    if not heads.follows_path:
        return predicted_tau(tree, recording)  # the temperatures, one number a head, fit no text in particular
    # The children of a node depend on the node, which a recording does not show: the prompts are decoded again.
    settings = replace(settings, max_new_tokens=max(len(new) for _, new in texts))
    return measured_tau(model, heads, [prompt for prompt, _ in texts], tree, settings)


def measured_tau(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[Sequence[int]],
    tree: Layout,
    settings: Settings,
    seeds: Sequence[int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> float:
    """tau of decoding `prompts`, one by one. `seeds`: one for each; by default their numbers."""
    decode = medusa_method(model, heads, settings, tokenizer, tree)
    seeds = range(len(prompts)) if seeds is None else seeds
    return tau(
        [result for prompt, seed in zip(prompts, seeds, strict=True) for result in decode([prompt], seeds=[seed])]
    )


def best_of(points: Sequence[CalibrationPoint]) -> int:
    """Index of the fastest point; 0 (plain decoding) unless another is faster by `WORTHWHILE`."""
    best = max(range(len(points)), key=lambda index: points[index].tokens_per_second)
    return best if points[best].tokens_per_second >= WORTHWHILE * points[0].tokens_per_second else 0
