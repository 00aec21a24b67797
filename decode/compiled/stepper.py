"""The stepper of compiled decoding: each step of `decode.loop.run` is one call of a compiled region."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PretrainedConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from decode.compiled.graphs import graphs_for
from decode.compiled.keys import Key, modules_key
from decode.compiled.region import Region, Regions
from decode.compiled.sampling import UNDECIDED, Kind, Sampler
from decode.draft import NoDraft
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import DynamicTree, Layout
from decode.drafters.trained_heads import TrainedHeads
from decode.generation_config import COMPILED_TEXT, text_options, told, way_out
from decode.loop import StepOutcome, Stepper, Timer, unpack
from decode.ops.transfer import Sent, on_device
from decode.rules import AcceptanceRule
from decode.session import Session
from decode.settings import ONE_SHAPE
from decode.step import State
from decode.target import SCORES_ONLY
from medusa.backbone import Backbone
from medusa.errors import NotCompilableError, OptionError, RequestError
from medusa.tree import Tree
from medusa.tree_support import LayerTypes, longrope_boundary, rope_kinds
from medusa.versions import minor

LONGROPE = 5, 21
"""The first version of transformers that chooses longrope's factors on the device."""
PATIENCE = 8
"""Steps without a decision of the host after which steps start ahead again."""
COMPILED = (*SCORES_ONLY, RepetitionPenaltyLogitsProcessor)
"""Processors that compiled steps may have (`decode.compiled.sampling`)."""


class Launched(NamedTuple):
    """A step that was started: its `Decided.packed`, and where in it the rows are that are live now."""

    packed: Tensor | Sent
    places: list[int]
    may_miss: bool  # whether the host may have to decide on its tokens


class CompiledStepper(Stepper):
    """Decodes the texts of a session by compiled steps."""

    def __init__(
        self,
        session: Session,
        rule: AcceptanceRule,
        factory: DrafterFactory | None,
        graphs: str,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Make a stepper for the texts of `session`, with drafts by `factory`; `None`: drafts of the root alone.

        `graphs`, one of `CUDA_GRAPHS`, says how steps on a GPU use CUDA graphs. `sizes`, in ascending order: texts may
        join, and steps have one of so many rows; the caches of `session` are then not fixed. `None`: none joins. The
        thread that reads the prompts must also run the steps. Raise a `RequestError` if this drafter, model, machine or
        set of options does not allow compiled steps."""
        if factory is not None and not isinstance(factory, TrainedHeads):
            raise RequestError(
                "only steps of heads can be compiled, as other drafters work on the host; leave one of them out"
            )
        _require_compilable(session)
        super().__init__(session, NoDraft(session.backbone.device), rule)
        self.factory = factory
        self.tree: Layout = Tree.chain(0) if factory is None else factory.tree
        if self.tree.min_probability:
            raise OptionError("compile", ONE_SHAPE, "stop_drafting")
        self.graphs, self.joins = graphs, sizes is not None
        self.sizes = (len(session.sequences),) if sizes is None else tuple(sizes)
        self.kinds = Kind.of_rows(session.target, rule, session.backbone.vocab_size)  # of the live rows
        if not self.joins:  # no row that ends makes another kind do
            self.kinds = [functools.reduce(Kind.joined, self.kinds)] * len(self.kinds)
        self.regions = Regions.of(session.backbone.model)
        self.region: Region | None = None
        self.ahead: Launched | None = None  # the step that runs while the host handles the one before
        self.is_awaited = False  # whether texts wait until no step runs
        self.steps_alone = PATIENCE  # that decided all tokens themselves, since the host last decided on one
        self.lender: Region | None = None  # the region of the batch that these texts are to join

    def start(self) -> None:
        """Read the prompts, into the caches of a region or, if texts may join, into those of the session."""
        self.graphs = graphs_for(self.graphs, self.session.backbone.device)
        if self.joins:
            self._start_alone()
            return
        session = self.session
        region = self._taken()
        if region is not None:  # the prompts go into its caches
            region.restart(session.capacity)
            session.reader, session.heads_cache = region.state.reader, region.state.heads_cache
        root, hidden = self._prefill(None if region is None else region.read)
        if region is None:
            region = self._made(State(session.reader, session.heads_cache, root.clone(), hidden.clone()))
        self.state, self.roots = region.state, root.tolist()
        region.begin(session, root, hidden)

    def _start_alone(self) -> None:
        """Read the prompts into caches from which their texts can join a region."""
        session = self.session
        region = self._taken() if self.lender is None else self.lender
        lent = None if region is None else region.lend([len(prompt) for prompt in session.sequences.prompts])
        if lent is None or region is None:
            super().start()
            return
        session.reader, session.heads_cache = lent.reader, lent.heads_cache
        root, hidden = self._prefill(region.read)
        self.state, self.roots = State(lent.reader, lent.heads_cache, root, hidden), root.tolist()

    def _taken(self) -> Region | None:
        """Take a region that is kept for such texts, if there is one."""
        nodes, tree, backbone = self.tree.candidates, self.tree, self.session.backbone
        shape = (tree.num_nodes, nodes.shortlist, tree.temperatures if isinstance(tree, DynamicTree) else None)
        device, heads = backbone.device.type, None if self.factory is None else self.factory.heads
        self.key: Key = (
            self.graphs,
            (self.joins, self.sizes),
            (*shape, *nodes.parent.tolist(), *nodes.rank.tolist()),
            self.kinds[0].rest if self.joins else self.kinds[0],
            torch.get_num_threads(),
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            modules_key(backbone.model),
            (heads, modules_key(heads)) if heads is not None else (),  # with the heads, so that no others get their id
        )
        self.region = self.regions.take(self.key)
        if self.region is not None:
            self.region.attach(backbone)
        return self.region

    def _made(self, state: State) -> Region:
        """Make a region of `state`."""
        session, kind = self.session, self.kinds[0]
        drafter = self.drafter if self.factory is None else self.factory.start(session)
        heads = None if self.factory is None else self.factory.heads
        size = self.sizes[-1], self.tree.max_depth, session.backbone.vocab_size, session.backbone.device
        sampler = Sampler(kind, session.target, *size, self.joins)
        self.region = Region(state, drafter, sampler, self.tree, self.graphs, heads, self.sizes, self.joins)
        return self.region

    def _enter(self) -> Region:
        """Let the texts join the rows of a region, if they have not; returns it."""
        region, texts = self.region, self.state
        if region is not None and region.state is texts:
            return region
        if region is None:  # none was kept
            region = self._made(texts.like(self.sizes[-1], self.session.capacity))
        region.start()
        region.state.empty()
        region.join(texts, self.session, texts.rows)
        region.decide_by(self.kinds)
        self.state = region.state
        return region

    def step(self, timer: Timer) -> StepOutcome:
        """Run one compiled step; `timer` books all its time, drafting included, as the stage `verify`.

        Raise a `NotCompilableError` if torch.compile fails on this model."""
        region = self._enter()
        found = self._read_next(region) or self._read_next(region)
        assert found, "a step waits, and no token is undecided"
        self.is_awaited = False
        timer.lap("verify")
        outcome = unpack(found)
        self.state.count(outcome.lengths)
        self.roots = outcome.roots
        return outcome

    def _read_next(self, region: Region) -> list[list[int]]:
        """Read what the next step has decided; nothing if it had started while a token was undecided."""
        try:
            launched = self.ahead or self._launched(region)
            self.ahead = self._launched(region, 1) if self._goes_ahead(region, launched) else None
        except TorchDynamoException as error:
            self.region = None
            name, cause = type(self.session.backbone.model).__name__, getattr(error, "inner_exception", error)
            reason = f"{type(cause).__name__}: {str(cause).strip()}".split("\n")[0]
            raise NotCompilableError(f"torch.compile fails on {name} ({reason})") from error
        rows = launched.packed.tolist()
        found = [rows[place] for place in launched.places]
        if not found[0][0]:  # the step waited, as for all rows
            return []
        self.steps_alone += 1
        if any(row[1] == UNDECIDED for row in rows):  # also of a text that has ended: all steps wait for it
            self.steps_alone = 0
            root = region.state.root
            decided = region.sampler.finish(on_device([row[1] for row in found], root.device), launched.places)
            root[: len(decided)] = decided.clamp_min(0)
            found = [[length, one, *ids] for (length, _, *ids), one in zip(found, decided.tolist(), strict=True)]
        return found

    def _launched(self, region: Region, unread: int = 0) -> Launched:
        """Start a step, when the results of `unread` steps are not read yet."""
        region.open(unread)
        packed = region()
        sent = packed if region.graphed is None else Sent(packed)
        assert not unread or isinstance(sent, Sent), "rows may move while the step runs"
        return Launched(sent, list(range(len(self.rows))), region.may_miss)

    def _goes_ahead(self, region: Region, running: Launched) -> bool:
        """Whether the next step starts before the host has read the `running` one, so that the GPU need not wait.

        The host then sees a step too late that a text has ended, and drops what that step decides. So no step starts
        ahead where this one may end all texts by their lengths. Nor does it while texts wait to join, where buffers
        would move under the running step, or if it would not wait for a token that the running step may leave
        undecided. A step that waits is lost, so none starts ahead soon after one whose token the host decided."""
        sequences = self.session.sequences
        if self.is_awaited or region.graphed is None or self.steps_alone < PATIENCE:
            return False
        if running.may_miss and not region.may_miss:
            return False
        fits = region.end(1) <= min(cache.capacity for cache in region.caches)
        return fits and any(sequences.tokens_left(row) > region.longest for row in self.rows)

    def select(self, left: Sequence[int]) -> None:
        """Keep only the live rows at the places `left`; also those of a step that runs."""
        region = self._enter()
        self.roots, self.kinds = [self.roots[place] for place in left], [self.kinds[place] for place in left]
        if self.ahead is not None:
            self.ahead = self.ahead._replace(places=[self.ahead.places[place] for place in left])
        region.select(left)
        region.decide_by(self.kinds)

    def takes(self, other: Stepper) -> bool:
        """Whether the texts of `other` can join now; if a step runs, they can after the next one.

        Raise a RuntimeError if there is no room for them, and a RequestError if their options do not go together."""
        assert isinstance(other, CompiledStepper)
        if len(self.rows) + len(other.kinds) > self.sizes[-1] or not self.joins:
            raise RuntimeError("texts cannot join a full batch of compiled steps, or one whose rows are fixed")
        functools.reduce(Kind.joined, other.kinds, self.kinds[0])
        other.lender = self._enter()
        self.is_awaited = self.ahead is not None
        return self.ahead is None

    def join(self, other: Stepper, places: Sequence[int]) -> None:
        """Take over the texts of `other`, which has just started, as the rows `places`; for errors see `takes`."""
        assert isinstance(other, CompiledStepper)
        region = self._enter()
        self.session.join(other.session, places, self.rows)
        region.join(other.state, other.session, places)
        self.roots, self.kinds = [*self.roots, *other.roots], [*self.kinds, *other.kinds]
        region.decide_by(self.kinds)

    def close(self) -> None:
        """Give the compiled region of this session back, which is kept for reuse as long as the model lives."""
        if self.ahead is not None:
            self.ahead.packed.tolist()  # the step is done before other texts take its region, maybe in another thread
        if self.region is not None:
            self.region.detach()
            self.regions.put_back(self.key, self.region)
            self.region = None


def sizes_of(room: int) -> tuple[int, ...]:
    """The numbers of rows of compiled steps for up to `room` texts: the powers of two below it, and itself."""
    return (*(size for size in (1 << n for n in range(room.bit_length())) if size < room), room)


def why_rope_not_compiled(config: PretrainedConfig) -> str:
    """Say why positions of a model with this config rule out compiled steps, before it is loaded; "" if they do not.

    Phi-3.5-MoE's own factors, `dynamic` ones and those of earlier versions of transformers are chosen on the host."""
    for kind in rope_kinds(config.get_text_config(decoder=True)):
        if (name := kind.get("rope_type")) == "dynamic" or "long_mscale" in kind:
            return f"{name} RoPE rotates a text by its length"
        if name == "longrope" and minor(version("transformers")) < LONGROPE:
            return f"longrope needs transformers {'.'.join(map(str, LONGROPE))} or later in compiled steps"
    return ""


def why_too_long(model: PreTrainedModel, prompt: int, new: int) -> str:
    """Say why `new` tokens after a `prompt` of so many are not written by compiled steps; "" if they are."""
    boundary = longrope_boundary(model)
    if boundary is None or prompt + new <= boundary:
        return ""
    told = f"a prompt of {prompt} tokens and {new} new ones may be longer; write fewer new tokens"
    return f"longrope rotates texts of more than {boundary} tokens differently, and {told}"


def why_not_compiled(backbone: Backbone) -> str:
    """Say why steps of this model cannot be compiled on this machine; "" if nothing is known against it."""
    if reason := why_rope_not_compiled(backbone.config):
        return reason
    if LayerTypes(backbone.config).has_states:
        return "its recurrent layers keep states, whose steps are eager"
    if len(set((getattr(backbone.model, "hf_device_map", None) or {"": 0}).values())) > 1:
        return "the model is spread over devices"
    if backbone.device.type == "cpu" and not _has_compiler():
        return "this machine has no C++ compiler (g++ or clang++)"
    return ""


def require_compilable(reason: str) -> None:
    """Raise a `NotCompilableError` if there is a `reason` against compiled steps."""
    if reason:
        raise NotCompilableError(reason)


def _require_compilable(session: Session) -> None:
    model, target = session.backbone.model, session.target
    reason = why_not_compiled(session.backbone)
    for request in target.of_rows:
        reason = reason or why_too_long(model, len(request.prompt), request.max_new_tokens)
    if not reason and session.kept_hidden is not None:
        reason = "hidden states are to be recorded"
    if not reason and any(not isinstance(p, COMPILED) for request in target.of_rows for p in request.processors):
        own, asked = model.generation_config, target.of_rows[0].config
        texts = text_options(own).items()
        of_file = [name for name, value in texts if name not in COMPILED_TEXT and getattr(asked, name) == value]
        for name in of_file[:1]:
            field = name, getattr(own, name), own
            reason = f"{told(*field)}, which reads the text ({way_out(*field)})"
    require_compilable(reason)


@functools.cache
def _has_compiler() -> bool:
    from torch._inductor import cpp_builder, cpu_vec_isa, exc  # slow to import, and needed only here

    try:
        found = bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False
    # To find the CPU's vector instructions, torch starts Python several times (0.8 s). A step is traced meanwhile.
    threading.Thread(target=cpu_vec_isa.valid_vec_isa_list, daemon=True).start()
    return found
