"""The stepper of compiled decoding: each step of `decode.loop.run` is one call of a compiled region."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from importlib.metadata import version

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PretrainedConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from decode.compiled.graphs import graphs_for
from decode.compiled.region import Key, Region, Regions, modules_key
from decode.compiled.sampling import UNDECIDED, Kind, Sampler
from decode.draft import NoDraft
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import DynamicTree, Layout
from decode.drafters.trained_heads import TrainedHeads
from decode.generation_config import COMPILED_TEXT, text_options, told, way_out
from decode.loop import StepOutcome, Stepper, Timer, unpack
from decode.ops.transfer import Sent
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
COMPILED = (*SCORES_ONLY, RepetitionPenaltyLogitsProcessor)
"""Processors that compiled steps may have (`decode.compiled.sampling`)."""


class CompiledStepper(Stepper):
    """Decodes the texts of a session by compiled steps."""

    def __init__(self, session: Session, rule: AcceptanceRule, factory: DrafterFactory | None, graphs: str) -> None:
        """Make a stepper for the texts of `session`, with drafts by `factory`; `None`: drafts of the root alone.

        `graphs`, one of `CUDA_GRAPHS`, says how steps on a GPU use CUDA graphs. The thread that reads the prompts must
        also run the steps. Raise a `RequestError` if this drafter, model, machine or set of options does not allow
        compiled steps."""
        if factory is not None and not isinstance(factory, TrainedHeads):
            raise RequestError(
                "only steps of heads can be compiled, as other drafters work on the host; leave one of them out"
            )
        _require_compilable(session)
        super().__init__(session, NoDraft(session.backbone.device), rule)
        self.factory = factory
        heads = None if factory is None else factory.heads
        self.tree: Layout = Tree.chain(0) if factory is None else factory.tree
        tree = self.tree
        if tree.min_probability:
            raise OptionError("compile", ONE_SHAPE, "stop_drafting")
        self.regions = Regions.of(session.backbone.model)
        self.taken: Region | None = None
        self.ahead: Tensor | Sent | None = None  # the step that runs while the host handles the one before
        nodes = tree.candidates
        shape = (tree.num_nodes, nodes.shortlist, tree.temperatures if isinstance(tree, DynamicTree) else None)
        backbone, device = session.backbone, session.backbone.device.type
        self.graphs = graphs
        self.kind = Kind.of(session.target, rule, backbone.vocab_size)
        self.key: Key = (
            len(session.sequences),
            (*shape, *nodes.parent.tolist(), *nodes.rank.tolist()),
            self.kind,
            torch.get_num_threads(),
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            modules_key(backbone.model),
            (heads, modules_key(heads)) if heads is not None else (),  # with the heads, so that no others get their id
        )

    def start(self) -> None:
        session = self.session
        self.graphs = graphs_for(self.graphs, session.backbone.device)
        self.key = (self.graphs, *self.key)
        region = self.taken = self.regions.take(self.key)
        if region is not None:  # the prompts go into its caches
            region.attach(session.backbone, session.capacity)
            session.reader, session.heads_cache = region.state.reader, region.state.heads_cache
        root, hidden = self._prefill(None if region is None else region.read)
        if region is None:
            state = State(session.reader, session.heads_cache, root.clone(), hidden.clone())
            drafter = self.drafter if self.factory is None else self.factory.start(session)
            heads = None if self.factory is None else self.factory.heads
            vocab, device = session.backbone.vocab_size, session.backbone.device
            sampler = Sampler(self.kind, session.target, len(root), self.tree.max_depth, vocab, device)
            region = self.taken = Region(state, drafter, sampler, self.tree, self.graphs, heads)
        self.region, self.state, self.roots = region, region.state, root.tolist()
        region.begin(session, root, hidden)

    def step(self, timer: Timer) -> StepOutcome:
        """Run one compiled step; `timer` books all its time, drafting included, as the stage `verify`.

        Raise a `NotCompilableError` if torch.compile fails on this model."""
        region = self.region
        try:
            packed = self._launched() if self.ahead is None else self.ahead
            self.ahead = self._launched(1) if self._goes_ahead() else None
        except TorchDynamoException as error:
            self.taken = None
            name, cause = type(self.session.backbone.model).__name__, getattr(error, "inner_exception", error)
            reason = f"{type(cause).__name__}: {str(cause).strip()}".split("\n")[0]
            raise NotCompilableError(f"torch.compile fails on {name} ({reason})") from error
        found = packed.tolist()
        if isinstance(packed, Tensor) and any(found[row][1] == UNDECIDED for row in self.rows):
            roots = region.sampler.finish(packed[:, 1])
            region.state.root.copy_(roots.clamp_min(0))
            found = [[length, root, *ids] for (length, _, *ids), root in zip(found, roots.tolist(), strict=True)]
        timer.lap("verify")
        outcome = unpack([found[row] for row in self.rows])
        self.state.count(outcome.lengths)
        self.roots = outcome.roots
        return outcome

    def _launched(self, unread: int = 0) -> Tensor | Sent:
        """Start a step, when the results of `unread` steps are not read yet; returns its `Decided.packed`."""
        self.region.open(unread)
        packed = self.region()
        return packed if self.region.graphed is None or self.region.sampler.may_miss else Sent(packed)

    def _goes_ahead(self) -> bool:
        """Whether the next step starts before the host has read this one, so that the GPU need not wait for the host.

        The host then sees a step too late that a text has ended, and drops what that step decides. So no step starts
        ahead where this one may end all texts by their lengths. Nor does it while the host decides on tokens, or where
        buffers would move under the running step."""
        region, sequences = self.region, self.session.sequences
        if region.graphed is None or region.sampler.may_miss or region.end(1) > region.caches[0].capacity:
            return False
        return any(sequences.tokens_left(row) > region.longest for row in self.rows)

    def join(self, other: Stepper, places: Sequence[int]) -> None:
        """Compiled steps have a fixed number of rows, so that no text can join."""
        raise RuntimeError("texts cannot join a compiled batch, whose number of rows is fixed")

    def close(self) -> None:
        """Give the compiled region of this session back, which is kept for reuse as long as the model lives."""
        if self.ahead is not None:
            self.ahead.tolist()  # the step is done before other texts take its region, maybe in another thread
        if self.taken is not None:
            self.taken.detach()
            self.regions.put_back(self.key, self.taken)
            self.taken = None


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
