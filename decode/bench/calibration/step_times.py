"""The time of a step as a function of the tree, measured in the decoding loop itself."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from decode.bench.timers import stopwatch
from decode.drafters.trained_heads import TrainedHeads
from decode.generation import tree_decoding
from decode.request import prepare
from decode.settings import Settings
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout

WARM_UP = 2  # steps of each turn that do not count


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
    """Seconds of a step with each tree, the trees taking turns. A tree of one node is timed as plain decoding.

    The lower quartile is taken, because other work on the machine makes steps longer and never shorter. A batch are
    the first prompts, repeated if there are too few.
    """
    batch = [prompts[row % len(prompts)] for row in range(batch_size)]
    times: list[list[float]] = [[] for _ in trees]
    for number in range(rounds):
        order = list(range(len(trees)))
        for index in [*order[number % len(order) :], *order[: number % len(order)]]:
            times[index] += _times_of_steps(model, heads, batch, trees[index], settings, steps)[WARM_UP:]
    return [sorted(found)[len(found) // 4] for found in times]


def _times_of_steps(
    model: PreTrainedModel,
    heads: MedusaHeads,
    batch: list[list[int]],
    tree: Layout,
    settings: Settings,
    steps: int,
) -> list[float]:
    kwargs = settings.generate_kwargs() | {"max_new_tokens": 8 * steps, "eos_token_id": None}
    requests = prepare(model, batch, list(range(len(batch))), **kwargs)
    clock = stopwatch(model.device)
    times, last = [], clock()
    for step in tree_decoding(
        model, TrainedHeads(heads, tree), requests, settings.rule, amateur=settings.amateur
    ).steps:
        now = clock()
        if len(step.ids) == len(batch):  # rows that have ended would make the step cheaper
            times.append(now - last)
        last = now
        if len(times) >= steps:
            break
    return times or [float("inf")]
