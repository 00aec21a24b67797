"""Compiled decoding: one step of `decode.loop` is one call of a compiled region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from decode.cache import TreeCache
from decode.compiled.fixed_cache import FixedCache
from decode.compiled.fixed_heads_cache import FixedHeadsCache
from decode.compiled.region import Region
from decode.compiled.regions import Key, Regions, state, surroundings
from decode.compiled.sampler import FixedSampler
from decode.draft import Drafter
from decode.drafters.dynamic_tree import DynamicTree
from decode.heads_cache import HeadsCache
from decode.loop import Acceptor, StepOutcome, Timer, unpack
from decode.session import Session
from decode.settings import ONE_SHAPE
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout

MIN_CAPACITY = 256
"""Slots of the smallest cache."""


class CompiledStepper:
    """Decodes a session in compiled regions (`decode.loop.Stepper`)."""

    ahead = 1024
    """New tokens for which the first cache has room, at most."""

    def __init__(
        self,
        session: Session,
        acceptor: Acceptor,
        tree: Layout,
        heads: MedusaHeads | None,
        make_drafter: Callable[[], Drafter],
    ) -> None:
        """
        Args:
            heads: the drafting heads; `None` if the tree is a root alone.

        Raises:
            RequestError: something cannot be compiled."""
        require_compilable(session)
        if tree.min_probability:
            raise RequestError(ONE_SHAPE)
        self.session, self.acceptor, self.tree, self.make_drafter = session, acceptor, tree, make_drafter
        self.regions = Regions.of(session.backbone.model)
        self.taken: list[tuple[Key, Region]] = []
        # The heads themselves are part of the key, so that no others take the place of heads that were freed.
        self.key = (
            len(session.sequences),
            heads,
            _content(tree),
            *FixedSampler.key(session.target, acceptor),
            *surroundings(session.backbone),
            state(session.backbone.model),
            state(heads) if heads is not None else (),
        )
        self.lengths = [len(prompt) for prompt in session.sequences.prompts]

    def start(self) -> tuple[list[int], list[int]]:
        session, sequences, nodes = self.session, self.session.sequences, self.tree.num_nodes
        frontier = session.prefill(most_probable_first=self.acceptor.rule == "typical")
        first = max(self.lengths) + min(max(sequences.limits), self.ahead) + nodes
        with self._refusing():
            self.region = self._take(first, session.verifier.cache, session.heads_cache, frontier.hidden)
        self.region.load(session, frontier)
        device = session.backbone.device
        self.u = torch.zeros(len(sequences), self.tree.max_depth + 1, dtype=torch.float64, device=device)
        self.rows = frontier.rows
        return frontier.rows, frontier.root.tolist()

    def step(self, timer: Timer) -> StepOutcome:
        """Run one region; all of the time counts as `verify`."""
        region, target = self.region, self.session.target
        if max(self.lengths[row] for row in self.rows) + self.tree.num_nodes > region.cache.capacity:
            region = self._take(2 * region.cache.capacity, region.cache, region.heads_cache, region.hidden)
            region.take(self.region)
            self.region = region
        if target.do_sample:
            self.u = target.draws.block(self.tree.max_depth + 1, self.u.device)
        with self._refusing():
            packed = region(self.u)
        timer.lap("verify")
        outcome = unpack([packed[row] for row in self.rows])
        for row, length in zip(self.rows, outcome.lengths, strict=True):
            self.lengths[row] += length
        return outcome

    def keep(self, left: list[int]) -> None:
        self.rows = [self.rows[place] for place in left]
        self.region.end_rows([row in self.rows for row in range(len(self.lengths))])

    def close(self) -> None:
        """Give all regions back to the model."""
        for key, region in self.taken:
            self.regions.put_back(key, region)
        self.taken.clear()

    def _take(
        self,
        capacity: int,
        cache: TreeCache | FixedCache,
        heads_cache: HeadsCache | FixedHeadsCache | None,
        hidden: Tensor,
    ) -> Region:
        """A region with at least `capacity` slots, for what these caches hold."""
        slots = max(MIN_CAPACITY, 1 << (capacity - 1).bit_length())

        def make() -> Region:
            backbone, sampler = self.session.backbone, FixedSampler(self.session.target, self.acceptor)
            fixed = None if heads_cache is None else FixedHeadsCache(heads_cache, slots, self.tree.max_depth)
            return Region(backbone, FixedCache(cache, slots), fixed, self.make_drafter(), sampler, hidden)

        key = (slots, *self.key)
        self.taken.append((key, self.regions.take(key, make)))
        return self.taken[-1][1]

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raises:
        RequestError: torch.compile fails on this model; its region is dropped."""
        try:
            yield
        except TorchDynamoException as error:
            del self.taken[-1:]
            name, cause = type(self.session.backbone.model).__name__, getattr(error, "inner_exception", error)
            reason = f"{type(cause).__name__}: {str(cause).strip()}".split("\n")[0]
            raise RequestError(
                f"--compile is not possible: torch.compile fails on {name} ({reason}); leave it out"
            ) from error


def require_compilable(session: Session) -> None:
    """Raises:
    RequestError: this model, these heads or this machine do not allow compiled steps."""
    backbone = session.backbone
    reason = None
    if backbone.rope_boundary is not None:
        reason = "longrope rotates a text by its length"
    elif len(set((getattr(backbone.model, "hf_device_map", None) or {"": 0}).values())) > 1:
        reason = "the model is spread over devices"
    elif session.kept_hidden is not None:
        reason = "hidden states are to be recorded"
    elif backbone.device.type == "cpu" and not _has_compiler():
        reason = "this machine has no C++ compiler (g++ or clang++)"
    if reason:
        raise RequestError(f"--compile is not possible: {reason}; leave it out")


def _has_compiler() -> bool:
    from torch._inductor import cpp_builder, exc  # slow to import, and needed for compiled steps only

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


def _content(tree: Layout) -> Key:
    """What two trees have in common that draft the same."""
    nodes = (*tree.candidates.parent.tolist(), *tree.candidates.rank.tolist())
    return (tree.num_nodes, tree.temperatures, *nodes) if isinstance(tree, DynamicTree) else nodes
