"""Calibrates heads: finds the tree with which the heads decode the most tokens per second on this machine.

Tokens per second are tau / T. tau is the mean number of tokens per step, which is predicted from recorded texts of the
backbone. T is the time of a step, which is measured in the decoding loop. Both static and dynamic trees are tried
(`decode.drafters.layouts`). Dynamic trees accept more guesses with as many nodes, but choosing the nodes takes time.
If the trees take their nodes from a few candidates (kind `markov`), the number of candidates is chosen, too, with the
best tree, except for compiled steps on a GPU.

Then n-grams alone, and dynamic trees that n-grams and heads share (`decode.drafters.mix`), take part. Their tau is
measured by decoding some of the texts again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from decode.bench.calibration.recording import (
    Recording,
    Text,
    grow,
    highest_tau,
    predicted_tau,
    predicted_tau_held_out,
    record,
)
from decode.bench.calibration.stored import (
    MIN_STEPS,
    Calibration,
    CalibrationPoint,
    RecordedTexts,
    TooFewStepsError,
    situation,
)
from decode.bench.calibration.variants import add_copies, choose_shortlist, with_copies
from decode.bench.machine import stopwatch
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import TOP, DynamicTree, Layout
from decode.drafters.trained_heads import TrainedHeads
from decode.loop import Step
from decode.settings import Settings
from decode.texts import Result, TextGenerator, tau
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Tree

USUAL_NODES = 8  # of the static tree by which texts are compared
SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64)  # numbers of nodes of the trees to try; 1 is plain decoding
COMPILED_SIZES = (1, 2, 4, 8, 16, 32, 64)  # of compiled steps on a GPU
WORTHWHILE = 1.02  # smallest predicted speedup with which a tree is chosen: about the error of timing
NODES = 256  # of a batch, all rows together: the most with which a step on a CPU can pay
WARM_UP = 2  # steps at the beginning of each timing that do not count
TOGETHER = 8  # trees whose steps take turns, each with its own cache
DECODED = 2000  # tokens of the texts that are decoded again, by each tree or drafter whose tau nothing else can show
BETTER = 1.25  # times a static tree's gain that a dynamic one may have; `markov` on SmolLM2 and Gemma: at most 1.12
PROMISING = 0.8  # of the highest speed after one round: slower trees are not timed again, as no error is so large


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
    """Predict the speed of trees from texts that the backbone wrote with `settings`, and choose the fastest tree.

    `sizes`: numbers of nodes of the trees to try; `None`: the result of `sizes_for`. Each tree is timed `rounds` times,
    and numbers of candidates three times as often, in compiled steps if `settings` ask for them. `on_progress` receives
    the name of each stage. TooFewStepsError: fewer than `MIN_STEPS` steps start in the texts."""
    # Timing continues after the end of a text, and uses all nodes of each tree.
    settings = replace(settings, stop=(), stop_drafting=0.0)
    backbone, prompts = Backbone(model), [prompt for prompt, _ in texts]
    on_progress("recording")
    recording = recording_of(model, heads, texts)
    longest = max((len(new) for _, new in texts), default=0)
    temperatures = recording.fit_temperatures()
    sizes = sizes or sizes_for(backbone.device, batch_size, settings.compile)
    # With drawn drafts, the choice of nodes must not depend on the drawn tokens, so dynamic trees are excluded.
    dynamic = settings.draft == "topk" and backbone.vocab_size > TOP
    trees = _trees(recording, sizes, temperatures if dynamic else (), on_progress)
    taus = [predictable_tau(tree, heads, recording) for tree in trees]
    on_progress("timing")
    seconds = time_steps(model, heads, prompts, trees, taus, settings, batch_size, rounds)
    timed = list(zip(trees, seconds, taus, strict=True))
    points = [_point(tree, of_step, predicted) for tree, of_step, predicted in timed if predicted is not None]
    unknown = [(tree, of_step) for tree, of_step, predicted in timed if predicted is None]

    few = first_texts(texts, DECODED)
    scale = tau_ratio(trees, recording, few)

    def measured_tau(tree: Layout | DrafterFactory) -> float:
        on_progress(f"decoding with a draft of {tree.num_nodes} nodes")
        eager = replace(settings, max_new_tokens=longest, compile=False)
        return max(1.0, scale * decoded_tau(model, heads, prompts[:few], tree, eager))

    points = sorted(add_competitive(points, unknown, recording, measured_tau), key=lambda one: (one.dynamic, one.nodes))
    about = RecordedTexts(len(texts), recording.tokens, sum(map(len, prompts)), steps=recording.steps)
    holds_for = situation(model, heads, settings, batch_size)
    found = Calibration(points, best_of(points), list(temperatures), holds_for, about)

    def compared(ways: Sequence[Layout | DrafterFactory], known: Sequence[float], rounds: int) -> list[float]:
        first, *others = time_steps(model, heads, prompts, ways, known, settings, batch_size, rounds)
        return [1.0, *(seconds / first for seconds in others)]

    compiles_long = compiled_on_gpu(backbone.device, settings.compile)  # each number of candidates is another step
    if heads.has_shortlist(heads.config) and found.best.nodes > 1 and not compiles_long:
        # More rounds, because steps with different numbers of candidates differ by a few per cent.
        choose_shortlist(found, measured_tau, partial(compared, rounds=3 * rounds))
    if dynamic and not settings.compile and not heads.comes_with_model and len(points) > 1:
        add_copies(found, with_copies(model, heads, found, sizes), measured_tau, partial(compared, rounds=rounds))
        found.chosen = best_of(points)
    return found


def recording_of(model: PreTrainedModel, heads: MedusaHeads, texts: Sequence[Text]) -> Recording:
    """Record the guesses of the heads. TooFewStepsError: fewer than `MIN_STEPS` steps start in the texts."""
    recording = record(Backbone(model, heads.config.feature_layers), heads, texts)
    require_steps(recording)
    return recording


def first_texts(texts: Sequence[Text], tokens: int) -> int:
    """Return how many of the first texts hold so many new tokens together, or the number of all texts."""
    lengths = accumulate(len(new) for _, new in texts)
    return next((count for count, length in enumerate(lengths, 1) if length >= tokens), len(texts))


def tau_ratio(trees: Sequence[Layout], recording: Recording, few: int) -> float:
    """Return the ratio of a static tree's tau over all texts to that over the first `few`, both predicted."""
    usual = next((tree for tree in trees if isinstance(tree, Tree) and tree.num_nodes >= USUAL_NODES), trees[0])
    return predicted_tau(usual, recording) / predicted_tau(usual, recording.part(range(few)))


def require_steps(recording: Recording) -> None:
    """Raise a TooFewStepsError if fewer than `MIN_STEPS` decoding steps can start in the recorded texts."""
    if recording.steps < MIN_STEPS:
        raise TooFewStepsError(
            f"a calibration needs at least {MIN_STEPS} steps, and {recording.steps} start in the {recording.tokens} "
            f"tokens of {len(recording.ranks)} texts; give more prompts, or a larger --max-new-tokens if the texts did "
            "not end by themselves"
        )


def predictable_tau(tree: Layout, heads: MedusaHeads, recording: Recording) -> float | None:
    """Predict the mean number of tokens per step with `tree`; `None` if only decoding can show it."""
    if isinstance(tree, Tree):
        return predicted_tau_held_out(tree.num_nodes, recording)
    if heads.follows_path:  # these heads guess differently on each path, which the recording cannot show
        return None
    return predicted_tau(tree, recording)  # one temperature per head cannot overfit the texts


def _point(tree: Layout, seconds: float, tau: float) -> CalibrationPoint:
    """Describe a tree by the `seconds` of a step and its tau."""
    paths = tree.to_json() if isinstance(tree, Tree) else []
    return CalibrationPoint(tree.num_nodes, paths, tau, 1000 * seconds, isinstance(tree, DynamicTree))


def add_competitive(
    points: Sequence[CalibrationPoint],
    unknown: Sequence[tuple[Layout, float]],
    recording: Recording,
    measured_tau: Callable[[Layout], float],
) -> list[CalibrationPoint]:
    """Return `points` with those of the trees in `unknown` that can still be the fastest.

    `unknown` lists trees with the seconds of a step. Measuring a tau takes long. So trees are measured in the order of
    the highest speed to expect, until it is below that of the fastest measured tree: that of `highest_tau`, a bound, or
    of `BETTER` times the gain of the best known tree that is not larger, an estimate."""
    points = list(points)
    fastest = max(WORTHWHILE * points[0].tokens_per_second, *(one.tokens_per_second for one in points))

    def highest(nodes: int) -> float:
        gain = max((one.tau - 1 for one in points if one.nodes <= nodes), default=0.0)
        return min(highest_tau(nodes, recording), 1 + BETTER * gain)

    bounds = [(highest(tree.num_nodes) / seconds, tree, seconds) for tree, seconds in unknown]
    for bound, tree, seconds in sorted(bounds, key=lambda entry: entry[0], reverse=True):
        if bound <= fastest:
            break
        points.append(_point(tree, seconds, measured_tau(tree)))
        fastest = max(fastest, points[-1].tokens_per_second)
    return points


def source_of(heads: MedusaHeads, tree: Layout | DrafterFactory) -> DrafterFactory:
    """Return the drafter that fills `tree` with guesses of `heads`, or `tree` itself if it is a drafter."""
    return tree if isinstance(tree, DrafterFactory) else TrainedHeads(heads, tree)


def decoded_tau(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[list[int]],
    tree: Layout | DrafterFactory,
    settings: Settings,
) -> float:
    """Measure tau (mean tokens per step) by decoding the prompts with `tree`, in batches of at most `NODES` nodes."""
    method, seeds = TextGenerator(model, settings, None, source_of(heads, tree)), range(len(prompts))
    size, results = max(NODES // tree.num_nodes, 1), list[Result]()
    for start in range(0, len(prompts), size):
        rows = slice(start, start + size)
        results += method(prompts[rows], seeds=seeds[rows])
    return tau(results)


def compiled_on_gpu(device: torch.device, compiled: bool) -> bool:
    """Whether each tree that is tried costs a long compilation, and steps of trees differ little."""
    return compiled and device.type == "cuda"


def sizes_for(device: torch.device, batch_size: int, compiled: bool) -> list[int]:
    """List the numbers of nodes for which a tree may be faster than plain decoding.

    On a CPU, the time of a step grows with the number of nodes in the batch, so large batches get small trees. For one
    text, trees of 2 or 3 nodes never pay: they turn matrix-vector products into more expensive matrix products. On a
    GPU, the steps of a tree take about 20 seconds to compile with 6 to 8 layers, and for one text, few nodes cost
    little more than one."""
    if compiled_on_gpu(device, compiled):
        return [nodes for nodes in COMPILED_SIZES if batch_size > 1 or nodes not in (2, 4)]
    most = max(NODES // batch_size, 8) if device.type == "cpu" else SIZES[-1]
    return [nodes for nodes in SIZES if nodes <= most and (batch_size > 1 or nodes not in (2, 3))]


def _trees(
    recording: Recording, sizes: Sequence[int], temperatures: tuple[float, ...], on_progress: Callable[[str], object]
) -> list[Layout]:
    """Make the trees to try: the root alone, and of each size a static and (with `temperatures`) a dynamic tree."""
    grown: dict[int, Tree] = {1: Tree.chain(0)}
    sizes = [nodes for nodes in sizes if nodes > 1]
    for nodes in sizes:
        on_progress(f"a tree of {nodes} nodes")
        tree = grow(recording, nodes)
        grown.setdefault(tree.num_nodes, tree)
    trees: list[Layout] = [tree for _, tree in sorted(grown.items())]
    if temperatures and len(grown) > 1:
        most = 1 + TOP if len(temperatures) == 1 else max(sizes)  # the tree of one head holds TOP guesses
        trees += [DynamicTree.over_heads(nodes, len(temperatures), temperatures) for nodes in sizes if nodes <= most]
    return trees


def time_steps(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[list[int]],
    trees: Sequence[Layout | DrafterFactory],
    taus: Sequence[float | None],
    settings: Settings,
    batch_size: int = 1,
    rounds: int = 3,
    steps: int = 24,
) -> list[float]:
    """Measure the seconds of a decoding step with each tree. The trees take turns after each of `steps` steps a round.

    So other work on the machine slows all trees alike. As it only makes steps slower, the result is the lower quartile
    of the measured times. Steps with n-grams differ in length, so a round of them counts with its mean.
    Trees that are not `PROMISING` are timed in one round only; `taus` are the mean numbers of tokens per step, `None`
    where unknown. The batch holds the first `batch_size` prompts, repeated if there are fewer. RequestError: they leave
    no room."""
    endless = replace(settings, max_new_tokens=8 * steps, ignore_eos=True)
    batch, clock = [prompts[row % len(prompts)] for row in range(batch_size)], stopwatch(model.device)

    def round_of(indices: Sequence[int]) -> list[list[float]]:
        """Let the trees with these indices take `steps` steps in turns; return the times of their steps."""
        running, found = dict[int, Iterator[Step]](), dict[int, list[float]]()
        for turn in range(steps):
            for index in indices:
                last = clock()
                if turn == 0:
                    method = TextGenerator(model, endless, None, source_of(heads, trees[index]))
                    running[index], found[index] = iter(method.start(batch, range(batch_size))), []
                step = next(running[index], None)
                if step is not None and len(step.ids) == batch_size:  # finished rows would make the step cheaper
                    found[index].append(clock() - last)
        for index, times in found.items():
            del times[:WARM_UP]
            if times and isinstance(trees[index], DrafterFactory):
                times[:] = [sum(times) / len(times)]
        return [found[index] for index in indices]

    times: list[list[float]] = [[] for _ in trees]
    taking_part = list(range(len(trees)))
    # A GPU has no other work, and needs its memory. Compiled steps keep one cache for all of their texts.
    together = TOGETHER if model.device.type == "cpu" and not settings.compile else 1
    for number in range(rounds):
        turn = number % len(taking_part)
        order = [*taking_part[turn:], *taking_part[:turn]]
        for start in range(0, len(order), together):
            part = order[start : start + together]
            for index, found in zip(part, round_of(part), strict=True):
                times[index] += found
        if not all(times):
            raise RequestError(
                f"the prompts leave room for at most {WARM_UP} steps, too few to time; give shorter prompts"
            )
        taking_part = promising([_lower_quartile(found) for found in times], taus)
    return [_lower_quartile(found) for found in times]


def promising(seconds: Sequence[float], taus: Sequence[float | None]) -> list[int]:
    """Return the indices of the trees that may be the fastest: plain decoding, unknown taus, and all near the best."""
    speeds = [
        None if predicted is None else predicted / of_step for of_step, predicted in zip(seconds, taus, strict=True)
    ]
    least = PROMISING * max(speed for speed in speeds if speed is not None)
    return [index for index, speed in enumerate(speeds) if index == 0 or speed is None or speed >= least]


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


def best_of(points: Sequence[CalibrationPoint]) -> int:
    """Return the index of the fastest tree; 0 (plain decoding) unless another tree is `WORTHWHILE` times as fast."""
    best = max(range(len(points)), key=lambda index: points[index].tokens_per_second)
    return best if points[best].tokens_per_second >= WORTHWHILE * points[0].tokens_per_second else 0
