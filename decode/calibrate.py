"""The tree that writes most tokens per second with these heads on this machine: measured, not assumed.

    speed(tree) = tau(tree) / T(nodes)

tau is foretold by walking recorded continuations of the backbone with the tree: a step starts where the last one ended,
which is just behind a wrong guess, so averages over all positions promise too much (5 to 22 % on stories260K). Which
paths are worth a node therefore depends on where steps start, and that on the tree: counted, grown and walked again
until it stays. T(n) is timed in the loop itself.

Shapes: P positions of a recorded text, K heads, N nodes.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.benchmark import machine
from decode.drafters.heads import head_logits
from decode.front import medusa_session
from decode.loop import Step
from decode.reference import plain_session
from decode.request import prepare
from decode.results import plain_method
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.files import read_json, write_json
from medusa.heads import MedusaHeads
from medusa.tree import RankPath, Tree

SIZES = (1, 4, 6, 8, 11, 16, 24, 32, 48, 64)
"""Trees that are tried, in nodes; 1 is plain decoding. Below 4 a CPU pays for many tokens and gets few."""
TOP = 16
"""Guesses of a head that a tree may take."""
FILE = "calibration.json"
OWN_TEXTS, OPENING_TOKENS, OWN_TOKENS = 32, 16, 96  # what `auto` lets the backbone write
ROUNDS_AT_MOST = 8  # of growing and walking; three are usual


@dataclass
class Recording:
    """Texts that the backbone wrote itself, and how the heads would have guessed them.

    Per text: [P, K] the rank of the token that came, in the guesses of head k at the hidden state before a root that
    stands at position p; TOP where it is not among them, or where the text has ended.
    """

    ranks: list[Tensor]

    @property
    def tokens(self) -> int:
        return sum(len(ranks) for ranks in self.ranks)


@torch.no_grad()
def record(backbone: Backbone, heads: MedusaHeads, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Recording:
    """Record (prompt, continuation) pairs, one forward each."""
    ranks = []
    for prompt, new in texts:
        ids = torch.tensor([[*prompt, *new]], device=backbone.device)
        hidden = backbone.hidden_states(ids[:, :-1], use_cache=False)[0, len(prompt) - 1 :]  # before each new token
        ranks.append(_ranks(heads, backbone, hidden, list(new)))
    return Recording(ranks)


def _ranks(heads: MedusaHeads, backbone: Backbone, hidden: Tensor, new: list[int]) -> Tensor:
    """hidden [P, H] before each of the P tokens `new` -> [P, K]; head k guesses the token k + 1 behind the root."""
    num_heads = heads.config.num_heads
    found = torch.full((len(new), num_heads), TOP)
    guesses = []
    for part in hidden.split(64):  # K x P x V logits are never held
        logits = head_logits(heads, backbone, part)
        guesses.append(logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices.cpu())
    table = torch.cat(guesses, dim=1)  # [K, P, TOP]
    came = torch.tensor(new)
    for head in range(min(num_heads, len(new) - 1)):
        match = table[head, : len(new) - head - 1] == came[head + 1 :, None]
        found[: len(match), head] = torch.where(match.any(-1), match.int().argmax(-1), TOP)
    return found


def accepted(tree: Tree, ranks: Tensor) -> Tensor:
    """How many drafted tokens a step from each position would accept [P], for ranks [P, K]."""
    child = torch.full((tree.num_nodes + 1, TOP + 1), -1)  # the last row: nothing is below what is not there
    for index, path in enumerate(tree.rank_paths, 1):
        if path[-1] < TOP:
            child[int(tree.parent[index]), path[-1]] = index
    node = torch.zeros(len(ranks), dtype=torch.long)
    length = torch.zeros_like(node)
    for head in range(min(tree.max_depth, ranks.shape[1])):
        node = child[node, ranks[:, head]]
        length += node >= 0
    return length


def starts(tree: Tree, ranks: Tensor) -> list[int]:
    """The positions of the roots of the steps that decode a recorded text, but for those that might pass its end."""
    lengths, at, found = accepted(tree, ranks).tolist(), 0, []
    while at < len(lengths) - ranks.shape[1]:
        found.append(at)
        at += 1 + lengths[at]
    return found


def foretold_tau(tree: Tree, recording: Recording) -> float:
    """Mean tokens per step, the root included, over the recorded texts."""
    steps = sum(len(starts(tree, ranks)) for ranks in recording.ranks)
    tokens = sum(int((1 + accepted(tree, ranks))[starts(tree, ranks)].sum()) for ranks in recording.ranks)
    return tokens / max(steps, 1)


def grow(recording: Recording, nodes: int, tree: Tree | None = None) -> Tree:
    """The best tree of `nodes` nodes (root included), from where the steps of `tree` start, or all positions.

    A node's worth is how often its whole path is right; a path is never right more often than its beginning, so the
    most frequent paths hang together. Starts and paths are fitted to each other until the tree stays; of the trees on
    the way, the one with the greatest foretold tau is taken.
    """
    best, best_tau, seen = Tree.chain(0), 0.0, set()
    for _ in range(ROUNDS_AT_MOST):
        counts = _path_counts(recording, tree)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
        paths = [path for path, _ in ranked[: nodes - 1]]
        tree = Tree.from_paths(paths)
        if (found := foretold_tau(tree, recording)) > best_tau:
            best, best_tau = tree, found
        if tuple(sorted(paths)) in seen:
            break
        seen.add(tuple(sorted(paths)))
    return best


def _path_counts(recording: Recording, tree: Tree | None) -> Counter[RankPath]:
    """How often each path of ranks is right, at the starts of `tree`'s steps or at all positions."""
    counts: Counter[RankPath] = Counter()
    for ranks in recording.ranks:
        rows = ranks if tree is None else ranks[starts(tree, ranks)]
        for line in rows.tolist():
            for depth, rank in enumerate(line, 1):
                if rank >= TOP:
                    break
                counts[tuple(line[:depth])] += 1
    return counts


@dataclass
class Point:
    """One size of tree."""

    nodes: int
    paths: list[list[int]]
    tau: float
    """Foretold."""
    step_ms: float
    """Measured; see `time_steps`."""

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tau / self.step_ms


@dataclass
class Calibration:
    """The trees that were tried, and on what."""

    points: list[Point]
    chosen: int
    """Index of the best of them."""
    holds_for: dict[str, Any]
    """Machine, dtype, batch size, heads and the like: another one needs a calibration of its own."""
    texts: dict[str, Any]
    """What was recorded, and where it came from."""

    @property
    def tree(self) -> Tree:
        return Tree.from_paths(self.points[self.chosen].paths)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Calibration:
        return cls(**content | {"points": [Point(**point) for point in content["points"]]})


def calibrate(
    model: PreTrainedModel,
    heads: MedusaHeads,
    texts: Sequence[tuple[list[int], list[int]]],
    settings: Settings,
    batch_size: int = 1,
    sizes: Sequence[int] = SIZES,
    rounds: int = 3,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Find the best tree from (prompt, continuation) pairs that the backbone wrote under `settings`."""
    backbone = Backbone(model)
    on_progress("recording")
    recording = record(backbone, heads, texts)
    trees = {1: Tree.chain(0)}
    for nodes in sizes:
        if nodes > 1:
            on_progress(f"a tree of {nodes} nodes")
            tree = grow(recording, nodes)
            trees.setdefault(tree.num_nodes, tree)  # few hits give fewer nodes than were asked for
    on_progress("timing")
    seconds = time_steps(model, heads, [prompt for prompt, _ in texts], trees, settings, batch_size, rounds)
    points = [
        Point(nodes, [list(path) for path in tree.rank_paths], foretold_tau(tree, recording), 1000 * seconds[nodes])
        for nodes, tree in sorted(trees.items())
    ]
    chosen = max(range(len(points)), key=lambda index: points[index].tokens_per_second)
    about = {"texts": len(texts), "tokens": recording.tokens, "prompt_tokens": sum(len(p) for p, _ in texts)}
    return Calibration(points, chosen, situation(model, heads, settings, batch_size), about)


def time_steps(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[list[int]],
    trees: dict[int, Tree],
    settings: Settings,
    batch_size: int = 1,
    rounds: int = 3,
    steps: int = 24,
) -> dict[int, float]:
    """Seconds of a step for each tree, the sizes taking turns; 1 node is timed as plain decoding.

    The lower quartile: other work on the machine makes steps longer, never shorter. A batch is the first prompts,
    repeated if there are too few. The first two steps of each turn warm up.
    """
    batch = [prompts[row % len(prompts)] for row in range(batch_size)]
    times: dict[int, list[float]] = {nodes: [] for nodes in trees}
    for number in range(rounds):
        order = sorted(trees)
        for nodes in [*order[number % len(order) :], *order[: number % len(order)]]:
            times[nodes] += _times_of_steps(model, heads, batch, trees[nodes], settings, steps)[2:]
    return {nodes: sorted(found)[len(found) // 4] for nodes, found in times.items()}


def _times_of_steps(
    model: PreTrainedModel, heads: MedusaHeads, batch: list[list[int]], tree: Tree, settings: Settings, steps: int
) -> list[float]:
    kwargs = settings.generate_kwargs() | {"max_new_tokens": 8 * steps, "eos_token_id": None}
    requests = prepare(model, batch, list(range(len(batch))), **kwargs)
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    if tree.max_depth == 0:
        iterator: Iterable[Step] = plain_session(model, requests)[1]
    else:
        iterator = medusa_session(model, heads, requests, tree, settings.acceptor)[1]
    times, last = [], perf_counter()
    for step in iterator:
        wait()
        now = perf_counter()
        if len(step.ids) == len(batch):  # rows that have ended would make it cheaper
            times.append(now - last)
        last = now
        if len(times) >= steps:
            break
    return times or [float("inf")]


def situation(model: PreTrainedModel, heads: MedusaHeads, settings: Settings, batch_size: int) -> dict[str, Any]:
    """What a calibration depends on."""
    here = machine()
    flat = [parameter.detach().flatten() for parameter in heads.parameters()]
    some = torch.cat([values[:: max(1, len(values) // 16)][:16].float().cpu() for values in flat])
    return {
        **{name: here[name] for name in ("processor", "gpu", "threads", "torch", "transformers")},
        "backbone": type(model).__name__ + f" {model.config.get_text_config(decoder=True).hidden_size}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(model.config, "_attn_implementation", None),
        "batch_size": batch_size,
        "temperature": settings.temperature,
        "acceptance": settings.acceptor.rule,
        "heads": hashlib.sha256(some.numpy().tobytes()).hexdigest()[:16],
    }


def own_texts(model: PreTrainedModel, settings: Settings, bos: int | None) -> list[tuple[list[int], list[int]]]:
    """Pairs of an opening and its continuation, both in the backbone's own words, the same at every call.

    Openings are sampled behind BOS (without one, behind random tokens), continuations written under `settings`.
    """
    random_ids = torch.randint(Backbone(model).vocab_size, (OWN_TEXTS,), generator=torch.Generator().manual_seed(0))
    first = [[token if bos is None else bos] for token in random_ids.tolist()]
    seeds = list(range(OWN_TEXTS))
    length = min(OWN_TOKENS, max((Backbone(model).context or 1 << 30) - OPENING_TOKENS - 1, 1))
    opening = plain_method(model, Settings(max_new_tokens=OPENING_TOKENS, temperature=1.0, ignore_eos=True))
    openings = [result.input_ids + result.new_ids for result in opening(first, seeds=seeds)]
    written = plain_method(model, replace(settings, max_new_tokens=length, stop=(), ignore_eos=True))
    return [(result.input_ids, result.new_ids) for result in written(openings, seeds=seeds)]


def stored(places: Sequence[Path], wanted: dict[str, Any]) -> Calibration | None:
    """The calibration that was made for this very situation, from the first of these files that has it."""
    for place in places:
        for entry in read_json(place) if place.is_file() else []:
            if entry["holds_for"] == wanted:
                return Calibration.from_dict(entry)
    return None


def store(places: Sequence[Path], calibration: Calibration) -> Path:
    """Write it into the first of these files that can be written, beside those made for other situations.

    Raises:
        OSError: none of them can.
    """
    for index, place in enumerate(places):
        try:
            kept = read_json(place) if place.is_file() else []
            kept = [entry for entry in kept if entry["holds_for"] != calibration.holds_for]
            write_json(place, [*kept, calibration.to_dict()])
            return place
        except OSError:
            if index + 1 == len(places):
                raise
    raise OSError("there is no place to keep a calibration")


def files_for(heads_folder: Path | None) -> list[Path]:
    """Where calibrations of heads are kept: beside them, if they lie in a folder of the user's, and in his cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa-heads" / FILE
    return [cache] if heads_folder is None else [heads_folder / FILE, cache]
