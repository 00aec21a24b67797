"""The stepper of compiled decoding: each step of `decode.loop.run` is one call of a compiled region."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import EtaLogitsWarper, PretrainedConfig

from decode.compiled.graphs import graphs_for
from decode.compiled.region import Key, Region, Regions, modules_key
from decode.draft import NoDraft
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import DynamicTree, Layout
from decode.drafters.trained_heads import TrainedHeads
from decode.generation_config import text_options, told, way_out
from decode.loop import StepOutcome, Stepper, Timer, unpack
from decode.rules import AcceptanceRule
from decode.session import Session
from decode.settings import ONE_SHAPE
from decode.step import Judge, State
from decode.target import SCORES_ONLY, Target, settings_of
from medusa.backbone import Backbone
from medusa.errors import NotCompilableError, OptionError, RequestError
from medusa.tree import Tree
from medusa.tree_support import LayerTypes, rope_kinds


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
        nodes = tree.candidates
        shape = (tree.num_nodes, nodes.shortlist, tree.temperatures if isinstance(tree, DynamicTree) else None)
        backbone, device = session.backbone, session.backbone.device.type
        self.graphs = graphs
        self.key: Key = (
            len(session.sequences),
            (*shape, *nodes.parent.tolist(), *nodes.rank.tolist()),
            option_key(session.target, rule),
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
        root, hidden = self._prefill()
        if region is None:
            state = State(session.reader, session.heads_cache, root.clone(), hidden.clone())
            drafter = self.drafter if self.factory is None else self.factory.start(session)
            heads = None if self.factory is None else self.factory.heads
            region = self.taken = Region(state, drafter, self.tree, self.graphs, heads)
        self.region, self.state, self.roots = region, region.state, root.tolist()
        self._settle()
        region.begin(self.judge, root, hidden)

    def _settle(self) -> None:
        self.judge = Judge(self.rule, self.session.target, self.session.sequences, lazy=False)

    def step(self, timer: Timer) -> StepOutcome:
        """Run one compiled step; `timer` books all its time, drafting included, as the stage `verify`.

        Raise a `NotCompilableError` if torch.compile fails on this model."""
        region, target = self.region, self.session.target
        region.open()
        if target.do_sample:
            region.u.copy_(target.draws.block(region.u.shape[1], region.u.device))
        try:
            packed = region().tolist()
        except TorchDynamoException as error:
            self.taken = None
            name, cause = type(self.session.backbone.model).__name__, getattr(error, "inner_exception", error)
            reason = f"{type(cause).__name__}: {str(cause).strip()}".split("\n")[0]
            raise NotCompilableError(f"torch.compile fails on {name} ({reason})") from error
        timer.lap("verify")
        outcome = unpack([packed[row] for row in self.rows])
        self.state.count(outcome.lengths)
        self.roots = outcome.roots
        return outcome

    def join(self, other: Stepper, places: Sequence[int]) -> None:
        """Compiled steps have a fixed number of rows, so that no text can join."""
        raise RuntimeError("texts cannot join a compiled batch, whose number of rows is fixed")

    def close(self) -> None:
        """Give the compiled region of this session back, which is kept for reuse as long as the model lives."""
        if self.taken is not None:
            self.taken.detach()
            self.regions.put_back(self.key, self.taken)
            self.taken = None


def option_key(target: Target, rule: AcceptanceRule) -> Key:
    """The options of acceptance and sampling, as part of the key under which a compiled step is kept.

    Raise a `RequestError` if a logits processor reads the text, rows differ in options, or scores are requested."""
    others = [type(p).__name__ for row in target.processors for p in row if not isinstance(p, SCORES_ONLY)]
    if others:
        way_out = "use only temperature, top-k, top-p, min-p and the like, or leave it out"
        raise OptionError("compile", f"cannot be combined with {others[0]}, which reads the text; {way_out}")
    if any(isinstance(p, EtaLogitsWarper) for row in target.processors for p in row):
        raise OptionError("compile", "cannot be combined with eta_cutoff; use epsilon_cutoff, or leave it out")
    kinds = [settings_of(row) for row in target.processors]
    if any(kind != kinds[0] for kind in kinds):
        raise OptionError("compile", "needs the same sampling options in all rows of a batch")
    if target.kept_scores is not None or target.kept_logits is not None:
        raise NotCompilableError("a compiled step gives no output_scores or output_logits")
    return (*rule, target.do_sample, kinds[0])


def why_rope_not_compiled(config: PretrainedConfig) -> str:
    """Say why positions of a model with this config rule out compiled steps, before it is loaded; "" if they do not."""
    types = [kind.get("rope_type") for kind in rope_kinds(config.get_text_config(decoder=True))]
    found = next((name for name in ("longrope", "dynamic") if name in types), None)
    return f"{found} RoPE rotates a text by its length" if found else ""


def why_not_compiled(backbone: Backbone) -> str:
    """Say why steps of this model cannot be compiled on this machine; "" if nothing is known against it."""
    if backbone.rope_boundary is not None:
        return "longrope rotates a text by its length"
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
    if not reason and session.kept_hidden is not None:
        reason = "hidden states are to be recorded"
    if not reason and not all(isinstance(p, SCORES_ONLY) for own in target.processors for p in own):
        own, asked = model.generation_config, target.of_rows[0].config
        of_file = [name for name, value in text_options(own).items() if getattr(asked, name) == value]
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
