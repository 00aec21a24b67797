"""The tree that writes most tokens per second with these heads on this machine: measured, not assumed.

    speed(tree) = tau(tree) / T(nodes)

tau is foretold by walking recorded continuations of the backbone with the tree: a step starts where the last one ended,
which is just behind a wrong guess, so averages over all positions promise too much (5 to 22 % on stories260K). Which
paths are worth a node therefore depends on where steps start, and that on the tree: counted, grown and walked again
until it stays. T(n) is timed in the loop itself.

Dynamic trees (`decode.drafters.dynamic_tree`) are tried beside static ones: they accept more with the same nodes,
and choosing them takes time.

Shapes: P positions of a recorded text, K heads, N nodes, G temperatures.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.bench.machine import machine
from decode.bench.methods import medusa_method, plain_method
from decode.drafters.dynamic_tree import TOP, DynamicTree, Layout
from decode.generation import medusa_session
from decode.request import prepare
from decode.results import tau
from decode.settings import Settings
from decode.timers import stopwatch
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import read_json, write_json
from medusa.heads.guesses import MISSED, accepted, ranks_of
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.tree import RankPath, Tree
from medusa.vocabulary import lm_head_for, places_of, token_ids

SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64)
"""Trees that may be tried, in nodes; 1 is plain decoding."""
WORTHWHILE = 1.02
"""What a tree must promise against plain decoding to be chosen: about what timing errs by."""
FILE = "calibration.json"
OWN_TEXTS, OPENING_TOKENS, OWN_TOKENS = 32, 16, 96  # what `auto` lets the backbone write
ROUNDS_AT_MOST = 8  # of growing and walking; three are usual
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)
"""Among which each head's is chosen."""


@dataclass
class Recording:
    """Texts that the backbone wrote itself, and how the heads would have guessed them.

    Each list has an entry per text, with a line for every position p where a root may stand.
    """

    ranks: list[Tensor]
    """[P, K] the rank of the token that came, in the guesses of head k at the hidden state before the root; MISSED
    where it is not among the TOP best, or where the text has ended."""
    best: list[Tensor] = field(default_factory=list)
    """[P, K, TOP] the logits of each head's best guesses."""
    log_z: list[Tensor] = field(default_factory=list)
    """[P, K, G] log of the sum of all exponentials, at each of TEMPERATURES."""
    came: list[Tensor] = field(default_factory=list)
    """[P, K] the logit of the token that came; NaN where the text has ended, or where the heads do not know it."""

    @property
    def tokens(self) -> int:
        return sum(len(ranks) for ranks in self.ranks)

    @property
    def has_steps(self) -> bool:
        """Whether some text goes on for longer than the heads reach, so that a step can be followed (`starts`)."""
        return any(len(ranks) > ranks.shape[1] for ranks in self.ranks)

    def part(self, texts: Sequence[int]) -> Recording:
        """Some of the texts."""
        columns = (self.ranks, self.best, self.log_z, self.came)
        return Recording(*([column[text] for text in texts] if column else [] for column in columns))

    def temperatures(self) -> tuple[float, ...]:
        """For each head the temperature at which it gave the most probability to what came (Guo et al. 2017)."""
        came, log_z = torch.cat(self.came), torch.cat(self.log_z)  # [P, K], [P, K, G]
        loss = (log_z - came[:, :, None] / torch.tensor(TEMPERATURES)).nanmean(0)  # [K, G]
        return tuple(TEMPERATURES[index] for index in loss.argmin(-1).tolist())

    def accepted(self, tree: Layout, text: int) -> Tensor:
        """How many drafted tokens a step from each position of a text would accept [P]."""
        if isinstance(tree, Tree):
            return accepted(tree, self.ranks[text])
        chosen = [TEMPERATURES.index(t) for t in tree.temperatures[: tree.max_depth]]
        scale, heads = torch.tensor(tree.temperatures)[: tree.max_depth], range(tree.max_depth)
        log_z = self.log_z[text][:, heads, chosen][:, :, None]
        guesses = self.best[text][:, : tree.max_depth, : tree.candidates.max_rank + 1]
        taken, _ = tree.choose(tree.worth(guesses / scale[:, None] - log_z))
        return accepted(tree.candidates, self.ranks[text], taken)


@torch.no_grad()
def record(backbone: Backbone, heads: MedusaHeads, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Recording:
    """Record (prompt, continuation) pairs, one forward each."""
    recording = Recording([])
    for prompt, new in texts:
        ids = torch.tensor([[*prompt, *new]], device=backbone.device)
        states = backbone.hidden_states(ids[:, :-1], use_cache=False)
        before = torch.arange(len(prompt) - 1, states.shape[1], device=states.device)  # the place before each new token
        _record(recording, heads, backbone, heads.inputs(states, ids, backbone.embed, place=before), list(new))
    return recording


def _record(recording: Recording, heads: MedusaHeads, backbone: Backbone, inputs: HeadInputs, new: list[int]) -> None:
    """Record the heads' guesses from P positions, those before each of the P tokens `new`.

    Head k guesses the token k + 1 places after the root.
    """
    num_heads, ahead = heads.config.num_heads, torch.tensor(new, device=inputs.hidden.device)
    aims = torch.stack([ahead.roll(-k) for k in range(1, num_heads + 1)])  # [K, P]; what is rolled in is masked below
    features, parts, lm_head = heads.features(inputs), [], lm_head_for(heads, backbone)
    # K x P x V logits are never held
    for part, aim in zip(features.split(64, dim=1), aims.split(64, dim=1), strict=True):
        logits = heads.logits(part, lm_head).float()
        top = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
        ranks = ranks_of(aim, token_ids(heads, top.indices))
        log_z = torch.stack([(logits / t).logsumexp(-1) for t in TEMPERATURES], dim=-1)
        place = aim.to(logits.device)
        if heads.vocabulary is not None:
            place = places_of(heads.vocabulary, place, backbone.vocab_size)
        came = logits.gather(2, place.clamp_min(0)[:, :, None])[:, :, 0].masked_fill(place < 0, torch.nan)
        parts.append([found.transpose(0, 1).cpu() for found in (ranks, top.values, log_z, came)])
    ranks, best, log_z, came = (torch.cat(column) for column in zip(*parts, strict=True))
    for head in range(num_heads):
        unknown = slice(max(len(new) - head - 1, 0), None)
        ranks[unknown, head], came[unknown, head] = MISSED, torch.nan
    recording.ranks.append(ranks)
    recording.best.append(best)
    recording.log_z.append(log_z)
    recording.came.append(came)


def starts(lengths: Tensor, num_heads: int) -> list[int]:
    """Accepted lengths [P] -> where the steps that decode the text start, but for those that might pass its end."""
    numbers, at, found = lengths.tolist(), 0, []
    while at < len(numbers) - num_heads:
        found.append(at)
        at += 1 + numbers[at]
    return found


def predicted_tau(tree: Layout, recording: Recording) -> float:
    """Mean tokens per step, the root included, over the recorded texts."""
    steps = tokens = 0
    for text, ranks in enumerate(recording.ranks):
        lengths = recording.accepted(tree, text)
        at = starts(lengths, ranks.shape[1])
        steps, tokens = steps + len(at), tokens + len(at) + int(lengths[at].sum())
    return tokens / max(steps, 1)


def foretold_tau_elsewhere(nodes: int, recording: Recording) -> float:
    """What a grown tree of `nodes` nodes gives on texts that it was not grown from: each half by the other's tree.

    On its own texts it looks better than it is, the more so the fewer they are and the more nodes it has.
    """
    halves = [recording.part(range(first, len(recording.ranks), 2)) for first in range(2)]
    if not all(half.has_steps for half in halves):
        return predicted_tau(grow(recording, nodes), recording)
    steps = tokens = 0.0
    for of, on in (halves, halves[::-1]):
        steps += on.tokens / predicted_tau(grow(of, nodes), on)
        tokens += on.tokens
    return tokens / steps


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
        if (found := predicted_tau(tree, recording)) > best_tau:
            best, best_tau = tree, found
        if tuple(sorted(paths)) in seen:
            break
        seen.add(tuple(sorted(paths)))
    return best


def _path_counts(recording: Recording, tree: Tree | None) -> Counter[RankPath]:
    """How often each path of ranks is right, at the starts of `tree`'s steps or at all positions."""
    counts: Counter[RankPath] = Counter()
    for ranks in recording.ranks:
        rows = ranks if tree is None else ranks[starts(accepted(tree, ranks), ranks.shape[1])]
        for line in rows.tolist():
            for depth, rank in enumerate(line, 1):
                if rank == MISSED:
                    break
                counts[tuple(line[:depth])] += 1
    return counts


@dataclass
class Point:
    """One tree."""

    nodes: int
    paths: list[list[int]]
    """Empty for a dynamic tree."""
    tau: float
    """Foretold."""
    step_ms: float
    """Measured; see `time_steps`."""
    dynamic: bool = False

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tau / self.step_ms


@dataclass
class Calibration:
    """The trees that were tried, and on what."""

    points: list[Point]
    chosen: int
    """Index of the best of them."""
    temperatures: list[float]
    """Of each head's confidences, for dynamic trees."""
    holds_for: dict[str, Any]
    """Machine, dtype, batch size, heads and the like: another one needs a calibration of its own."""
    texts: dict[str, Any]
    """What was recorded, and where it came from."""

    @property
    def tree(self) -> Layout:
        point = self.points[self.chosen]
        if point.dynamic:
            return DynamicTree.over_heads(point.nodes, len(self.temperatures), tuple(self.temperatures))
        return Tree.from_paths(point.paths)

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
    sizes: Sequence[int] | None = None,
    rounds: int = 3,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Find the best tree from (prompt, continuation) pairs that the backbone wrote under `settings`.

    `sizes`: in nodes; by default those that may pay on this device at this batch size.

    Raises:
        RequestError: no continuation is longer than the heads reach.
    """
    backbone = Backbone(model)
    sizes = sizes or sizes_for(backbone.device, batch_size)
    # Steps are timed and counted behind the end of the texts, too, and with all nodes of their trees.
    settings = replace(settings, stop=(), stop_drafting=0.0)
    on_progress("recording")
    recording = record(backbone, heads, texts)
    if not recording.has_steps:
        longest, reach = max((len(new) for _, new in texts), default=0), heads.config.num_heads
        raise RequestError(
            f"the longest continuation has {longest} tokens, but {reach} heads need more than {reach}; "
            "give other prompts, or more new tokens"
        )
    temperatures = recording.temperatures()
    grown: dict[int, Tree] = {1: Tree.chain(0)}
    for nodes in sizes:
        if nodes > 1:
            on_progress(f"a tree of {nodes} nodes")
            tree = grow(recording, nodes)
            grown.setdefault(tree.num_nodes, tree)  # few hits give fewer nodes than were asked for
    trees: list[Layout] = [tree for _, tree in sorted(grown.items())]
    if settings.draft == "topk" and backbone.vocab_size > TOP:  # nodes of a drawn tree must not depend on what is drawn
        dynamic = [nodes for nodes in sizes if nodes > 1 and len(grown) > 1]
        trees += [DynamicTree.over_heads(nodes, heads.config.num_heads, temperatures) for nodes in dynamic]
    on_progress("timing")
    seconds = time_steps(model, heads, [prompt for prompt, _ in texts], trees, settings, batch_size, rounds)

    def expected(tree: Layout) -> float:
        if isinstance(tree, Tree):
            return foretold_tau_elsewhere(tree.num_nodes, recording)
        # The temperatures, a number a head, fit no text in particular.
        return (
            measured_tau(model, heads, texts, tree, settings) if heads.follows_path else predicted_tau(tree, recording)
        )

    points = [
        Point(
            nodes=tree.num_nodes,
            paths=[list(path) for path in tree.rank_paths] if isinstance(tree, Tree) else [],
            tau=expected(tree),
            step_ms=1000 * of_step,
            dynamic=isinstance(tree, DynamicTree),
        )
        for tree, of_step in zip(trees, seconds, strict=True)
    ]
    about = {"texts": len(texts), "tokens": recording.tokens, "prompt_tokens": sum(len(p) for p, _ in texts)}
    return Calibration(
        points, best_of(points), list(temperatures), situation(model, heads, settings, batch_size), about
    )


def sizes_for(device: torch.device, batch_size: int) -> list[int]:
    """The sizes worth a try. A CPU computes nodes one by one: small trees for large batches.

    A single row's first further node costs it most (products of matrices instead of a matrix and a vector), so that
    trees of 2 or 3 nodes never pay there.
    """
    most = max(256 // batch_size, 8) if device.type == "cpu" else SIZES[-1]
    return [nodes for nodes in SIZES if nodes <= most and (batch_size > 1 or nodes not in (2, 3))]


def best_of(points: Sequence[Point]) -> int:
    """Index of the fastest; the first, plain decoding, unless another one is clearly faster."""
    best = max(range(len(points)), key=lambda index: points[index].tokens_per_second)
    return best if points[best].tokens_per_second >= WORTHWHILE * points[0].tokens_per_second else 0


def measured_tau(
    model: PreTrainedModel,
    heads: MedusaHeads,
    texts: Sequence[tuple[list[int], list[int]]],
    tree: Layout,
    settings: Settings,
) -> float:
    """Tau of decoding the prompts again: where a node's children depend on it, a recording does not say all."""
    longest = max(len(new) for _, new in texts)
    decode = medusa_method(model, heads, replace(settings, max_new_tokens=longest), tree=tree)
    return tau([result for number, (prompt, _) in enumerate(texts) for result in decode([prompt], seeds=[number])])


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
    """Seconds of a step for each tree, the trees taking turns; 1 node is timed as plain decoding.

    The lower quartile: other work on the machine makes steps longer, never shorter. A batch is the first prompts,
    repeated if there are too few. The first two steps of each turn warm up.
    """
    batch = [prompts[row % len(prompts)] for row in range(batch_size)]
    times: list[list[float]] = [[] for _ in trees]
    for number in range(rounds):
        order = list(range(len(trees)))
        for index in [*order[number % len(order) :], *order[: number % len(order)]]:
            times[index] += _times_of_steps(model, heads, batch, trees[index], settings, steps)[2:]
    return [sorted(found)[len(found) // 4] for found in times]


def _times_of_steps(
    model: PreTrainedModel, heads: MedusaHeads, batch: list[list[int]], tree: Layout, settings: Settings, steps: int
) -> list[float]:
    kwargs = settings.generate_kwargs() | {"max_new_tokens": 8 * steps, "eos_token_id": None}
    requests = prepare(model, batch, list(range(len(batch))), **kwargs)
    clock = stopwatch(model.device)
    times, last = [], clock()
    for step in medusa_session(model, heads, requests, tree, settings.acceptor, amateur=settings.amateur)[1]:
        now = clock()
        if len(step.ids) == len(batch):  # rows that have ended would make it cheaper
            times.append(now - last)
        last = now
        if len(times) >= steps:
            break
    return times or [float("inf")]


def situation(model: PreTrainedModel, heads: MedusaHeads, settings: Settings, batch_size: int) -> dict[str, Any]:
    """What a calibration depends on."""
    here = machine()
    return {
        **{name: getattr(here, name) for name in ("processor", "gpu", "threads", "torch", "transformers")},
        "backbone": type(model).__name__ + f" {model.config.get_text_config(decoder=True).hidden_size}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(model.config, "_attn_implementation", None),
        "batch_size": batch_size,
        "temperature": settings.temperature,
        "acceptance": settings.acceptor.name,
        "version": 2,
        "heads": fingerprint(heads),
        **({"amateur": settings.amateur.to_dict()} if settings.amateur else {}),
    }


def fingerprint(heads: MedusaHeads) -> str:
    """Of a few of each tensor's values."""
    flat = [parameter.detach().flatten() for parameter in heads.parameters()]
    some = torch.cat([values[:: max(1, len(values) // 16)][:16].float().cpu() for values in flat])
    return hashlib.sha256(some.numpy().tobytes()).hexdigest()[:16]


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


def stored_temperatures(places: Sequence[Path], heads: MedusaHeads) -> tuple[float, ...] | None:
    """The temperatures that were fitted for these heads, in whatever situation."""
    for place in places:
        for entry in read_json(place) if place.is_file() else []:
            if entry["holds_for"].get("heads") == fingerprint(heads) and "temperatures" in entry:
                return tuple(entry["temperatures"])
    return None


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
