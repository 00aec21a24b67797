"""The stepper of compiled decoding: each step of `decode.loop.run` is one call of a compiled region."""

from __future__ import annotations

import torch
from torch._dynamo.exc import TorchDynamoException

from decode.compiled.fixed_cache import AnyCache, AnyHeadsCache, FixedCache, FixedHeadsCache
from decode.compiled.region import Key, Region, Regions, modules_key
from decode.compiled.sampler import FixedSampler
from decode.draft import Frontier, NoDraft
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import DynamicTree, Layout
from decode.drafters.trained_heads import TrainedHeads
from decode.loop import Acceptor, StepOutcome, Stepper, Timer, unpack
from decode.session import AHEAD, Session
from decode.settings import ONE_SHAPE
from medusa.errors import RequestError
from medusa.tree import Tree

MIN_CAPACITY = 256
"""Number of cache slots per row in the smallest cache."""


class CompiledStepper(Stepper):
    """Decodes the texts of a session by compiled steps."""

    def __init__(self, session: Session, acceptor: Acceptor, factory: DrafterFactory | None) -> None:
        """Make a stepper for the texts of `session`, with drafts by `factory`; `None`: drafts of the root alone.

        Raise a `RequestError` if this drafter, model, machine or set of options does not allow compiled steps."""
        if factory is not None and not isinstance(factory, TrainedHeads):
            raise RequestError(
                "only steps of heads can be compiled, as other drafters work on the host; leave one of them out"
            )
        _require_compilable(session)
        self.session, self.acceptor, self.factory = session, acceptor, factory
        heads = None if factory is None else factory.heads
        self.tree: Layout = Tree.chain(0) if factory is None else factory.tree
        tree = self.tree
        if tree.min_probability:
            raise RequestError(ONE_SHAPE)
        self.regions = Regions.of(session.backbone.model)  # before the key, which lists the model's attributes
        self.taken: list[tuple[Key, Region]] = []
        shape = tree.temperatures if isinstance(tree, DynamicTree) else None
        backbone, device = session.backbone, session.backbone.device.type
        self.key = (
            len(session.sequences),
            (tree.num_nodes, shape, *tree.candidates.parent.tolist(), *tree.candidates.rank.tolist()),
            FixedSampler.key(session.target, acceptor),
            (backbone.config._attn_implementation, torch.get_num_threads()),
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            modules_key(backbone.model),
            (heads, modules_key(heads)) if heads is not None else (),  # with the heads, so that no others get their id
        )
        self.lengths = [len(prompt) for prompt in session.sequences.prompts]

    def start(self) -> tuple[list[int], list[int]]:
        session, sequences = self.session, self.session.sequences
        frontier = session.prefill(most_probable_first=self.acceptor.rule == "typical")
        root, self.rows = frontier.root, frontier.rows
        first = max(self.lengths) + min(max(sequences.limits), AHEAD) + self.tree.num_nodes
        self.region = self._region(first, session.verifier.cache, session.heads_cache, frontier)
        self.u = torch.zeros(len(sequences), self.tree.max_depth + 1, dtype=torch.float64, device=root.device)
        return self.rows, root.tolist()

    def step(self, timer: Timer) -> StepOutcome:
        """Run one compiled step; `timer` books all its time, drafting included, as the stage `verify`.

        Raise a `RequestError` if torch.compile fails on this model."""
        region, target = self.region, self.session.target
        if max(self.lengths[row] for row in self.rows) + self.tree.num_nodes > region.cache.capacity:
            region = self._region(2 * region.cache.capacity, region.cache, region.heads_cache, region.frontier())
            self.region = region
        if target.do_sample:
            self.u = target.draws.block(self.tree.max_depth + 1, self.u.device)
        try:
            packed = region(self.u)
        except TorchDynamoException as error:
            del self.taken[-1:]
            name, cause = type(self.session.backbone.model).__name__, getattr(error, "inner_exception", error)
            reason = f"{type(cause).__name__}: {str(cause).strip()}".split("\n")[0]
            raise RequestError(
                f"--compile is not possible: torch.compile fails on {name} ({reason}); leave it out"
            ) from error
        timer.lap("verify")
        outcome = unpack([packed[row] for row in self.rows])
        for row, length in zip(self.rows, outcome.lengths, strict=True):
            self.lengths[row] += length
        return outcome

    def keep(self, left: list[int]) -> None:
        self.rows = [self.rows[place] for place in left]
        self.region.end_rows(self._alive())

    def close(self) -> None:
        """Give all compiled regions of this session back to the model, which keeps them for reuse."""
        for key, region in self.taken:
            self.regions.put_back(key, region)
        self.taken.clear()

    def _alive(self) -> list[bool]:
        return [row in self.rows for row in range(len(self.lengths))]

    def _region(self, capacity: int, cache: AnyCache, heads_cache: AnyHeadsCache | None, frontier: Frontier) -> Region:
        """Take a kept region of at least `capacity` cache slots or make one; copy the caches and `frontier` into it."""
        slots = max(MIN_CAPACITY, 1 << (capacity - 1).bit_length())
        key = (slots, *self.key)
        region = self.regions.take(key)
        if region is None:
            backbone, sampler = self.session.backbone, FixedSampler(self.session.target, self.acceptor)
            drafter = NoDraft(backbone.device) if self.factory is None else self.factory.start(self.session)
            fixed = None if heads_cache is None else FixedHeadsCache(heads_cache, slots, self.tree.max_depth)
            region = Region(backbone, FixedCache(cache, slots), fixed, drafter, sampler, frontier.hidden)
        self.taken.append((key, region))
        region.load(cache, heads_cache, frontier, self._alive())
        return region


def _require_compilable(session: Session) -> None:
    backbone, reason = session.backbone, ""
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
    from torch._inductor import cpp_builder, exc  # slow to import, and needed only here

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False
