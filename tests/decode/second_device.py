"""Runs decoding steps on a second device that has no data: FakeTensors of a private backend named `gpu`.

Objects are made and warmed up with real tensors on the CPU. Then all their tensors become fake ones on the device
`gpu`, and steps run on them. Like a GPU, the device cannot mix with the CPU: an operation on tensors of both, and any
other operation on the CPU, is a fault. Only `on_device` may copy numbers of the host to the device.

The backend's name is known to the whole process, so tests call `outcomes` in a copy of theirs."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import decode.loop
import decode.step
import medusa.tree
from decode.compiled import region
from decode.compiled.stepper import CompiledStepper
from decode.draft import NoDraft
from decode.drafters.base import DrafterContext, DrafterFactory
from decode.drafters.layouts import resolve_tree
from decode.drafters.lookahead import LookaheadConfig
from decode.drafters.mix import Mix
from decode.drafters.model import DraftModel
from decode.drafters.ngram import NgramConfig
from decode.drafters.trained_heads import TrainedHeads
from decode.loop import Stepper, Timer
from decode.ops import transfer
from decode.rules import AcceptanceRule
from decode.sequences import Request
from decode.session import Session
from decode.target import truncated
from decode.topology import Topology, chain
from medusa import Tree
from tests.helpers import EAGLE_FORMS, MTP_FORM, random_heads, random_ids, tiny_model

WARPERS = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.9), MinPLogitsWarper(0.01)]
READERS = [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3)]
HEADS: dict[str, dict[str, Any]] = {
    "independent": {},
    "vocabulary": {"vocabulary": 32, "lm_head": "own"},
    "recurrent": {"kind": "recurrent"},
    "markov": {"kind": "markov"},
    "cascade": {"kind": "cascade"},
    "hydra": {"kind": "hydra"},
    "eagle": {"kind": "eagle"},
    "prefix": {"prefix_layers": 1},
    "mtp": MTP_FORM,
} | EAGLE_FORMS
RULES: dict[str, tuple[bool, list[Any], AcceptanceRule]] = {
    # whether tokens are drawn, the processors, and the rule
    "greedy": (False, [], AcceptanceRule("greedy")),
    "greedy, penalties": (False, READERS, AcceptanceRule("greedy")),
    "sampled": (True, WARPERS, AcceptanceRule("rejection")),
    "sampled, penalties": (True, READERS + WARPERS, AcceptanceRule("rejection")),
    "drawn": (True, WARPERS, AcceptanceRule("rejection", draft="sample")),
    "typical": (True, WARPERS, AcceptanceRule("typical")),
    "typical, penalties": (True, READERS + WARPERS, AcceptanceRule("typical")),
    "typical-sampled": (True, WARPERS, AcceptanceRule("typical-sampled")),
    "topk": (False, [], AcceptanceRule("topk", limit=3)),
    "distance": (False, [], AcceptanceRule("distance", limit=3)),
}
OTHERS = ("plain", "ngram", "trie", "lookahead", "model", "model tree", "mix")  # drafters
MODELS: dict[str, dict[str, Any]] = {"MHA": {"num_key_value_heads": 4}, "GQA": {"num_key_value_heads": 2}}
PLANTED: dict[str, Callable[[Tensor], object]] = {
    # done in every step to the tokens of the draft
    "a tensor of the host joins in": lambda ids: ids + torch.ones(ids.shape, dtype=torch.long),
    "an index of the host": lambda ids: ids[:, torch.zeros(1, dtype=torch.long)],
    "a copy to the host": lambda ids: ids.cpu() if ids.device.type != "cpu" else None,
    "numbers of the host, for which it waits": lambda ids: torch.tensor([1], device=ids.device),
    "a value is read": lambda ids: int(ids[0, 0]),
}


class Watch(TorchDispatchMode):
    """Collects the operations that mix devices or work on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.exponential_.default:
            kwargs.pop("generator", None)  # fake tensors take none
        out = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        devices = {t.device.type for t in tensors if t.dim() or t.device.type != "cpu"}  # a number goes with the call
        if "cpu" in devices and func.namespace != "prim":
            self.faults.append(f"{func} on {sorted(devices)}")
        return out


class Mover:
    """Replaces all tensors that can be reached from an object by fake tensors on the second device, in place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved: dict[int, tuple[Any, Any]] = {}  # by id; the original is kept, so that its id is not used again

    def __call__(self, value: Any) -> Any:
        if id(value) not in self.moved:
            self.moved[id(value)] = value, value  # for cycles
            self.moved[id(value)] = value, self._of(value)
        return self.moved[id(value)][1]

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
            return nn.Parameter(fake, requires_grad=False) if isinstance(value, nn.Parameter) else fake
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, dict):
            value.update({key: self(part) for key, part in value.items()})
        elif isinstance(value, list):
            value[:] = map(self, value)
        elif isinstance(value, tuple):
            parts = map(self, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        elif hasattr(value, "__dict__") and not isinstance(value, type | torch.Generator) and not callable_only(value):
            for name, part in vars(value).items():
                vars(value)[name] = self(part)
        return value


def callable_only(value: Any) -> bool:
    return type(value).__name__ in ("function", "builtin_function_or_method", "method", "module", "_lru_cache_wrapper")


def numbers(shape: torch.Size, of_row: int = 1) -> Any:
    """What the host reads from the device: 1 and 2 by row, so that rows accept different lengths."""
    return [numbers(shape[1:], 1 + row % 2) for row in range(shape[0])] if shape else of_row


def on_device(values: Any, device: torch.device) -> Tensor:
    """Stands for `decode.ops.transfer.on_device`."""
    if device.type == "cpu":
        return transfer.on_device(values, device)
    shape, first = [], values
    while isinstance(first, list | tuple):
        shape.append(len(first))
        first = first[0] if first else 0.0
    return torch.empty(shape, dtype=torch.float32 if isinstance(first, float) else torch.long, device=device)


def requests_for(rows: int, rule: str) -> list[Request]:
    do_sample, processors, _ = RULES[rule]
    config = GenerationConfig(do_sample=do_sample)
    prompts = [random_ids(5 + 3 * row, seed=row) for row in range(rows)]
    options = LogitsProcessorList(processors), StoppingCriteriaList(), config, 60
    return [Request(prompt, *options, torch.Generator()) for prompt in prompts]


def eager(model: Any, factory: DrafterFactory | None, rule: str, rows: int) -> tuple[Session, Stepper]:
    session = session_of(model, factory, rule, rows)
    drafter = (
        NoDraft(torch.device("cpu")) if factory is None else factory.start(session, RULES[rule][2].draft == "sample")
    )
    return session, Stepper(session, drafter, RULES[rule][2])


def session_of(model: Any, factory: DrafterFactory | None, rule: str, rows: int, fixed: bool = False) -> Session:
    asked = RULES[rule][2]
    requests = requests_for(rows, rule)
    if asked.kind.truncates:
        requests = [truncated(request, asked) for request in requests]
    slack, heads = (1, None) if factory is None else (factory.num_nodes, factory.heads)
    return Session(model, requests, slack, heads=heads, fixed=fixed)


def compiled(model: Any, factory: DrafterFactory, rule: str, rows: int) -> tuple[Session, Stepper]:
    """Compiled decoding, with a step that is not compiled."""
    session = session_of(model, factory, rule, rows, fixed=True)
    return session, CompiledStepper(session, RULES[rule][2], factory, graphs="off")


@torch.no_grad()
def found_in(session: Session, stepper: Stepper, mode: FakeTensorMode) -> dict[str, Any]:
    """Decode two steps on the CPU, and one on the second device; returns the faults and the reads of the latter.

    One is enough: a step that left a tensor on the CPU behind, for the next one, has made it, which is a fault."""
    steps = inspect.unwrap(decode.loop.run)(stepper, Timer())
    for _ in range(2):
        next(steps)
    reads: list[str] = []

    def tolist(tensor: Tensor) -> Any:
        reads.append(str(tuple(tensor.shape)))
        return numbers(tensor.shape)

    watch = Watch()
    with mode:
        Mover(torch.device("gpu", 0))(stepper)
        FakeTensor.tolist = tolist  # type: ignore[method-assign]
        with watch:
            next(steps)
    return {"faults": sorted(set(watch.faults)), "reads": len(reads)}


def cases() -> Iterator[tuple[str, Callable[[], tuple[Session, Stepper]]]]:
    """The name of each case, and a function that makes its session and stepper."""

    def heads_on(
        tree: str, make: Callable[..., Any], rule: str, rows: int, attention: str, **settings: Any
    ) -> tuple[Session, Stepper]:
        layers = 2 if settings in EAGLE_FORMS.values() else 1  # fake tensors are slow, and all layers are alike
        model = tiny_model(**MODELS[attention], num_hidden_layers=layers)
        heads = random_heads(model, **settings)
        return make(model, TrainedHeads(heads, resolve_tree(tree, heads)), rule, rows)

    for rows, tree, attention in ((1, "topk:3,2,1", "MHA"), (3, "dynamic:8", "GQA")):
        for rule in RULES:
            fitting = "topk:3,2,1" if rule == "drawn" else tree
            yield f"{rule}, {fitting}, {rows} rows", partial(heads_on, fitting, eager, rule, rows, attention)
        for rule in ("greedy", "sampled", "typical"):
            yield f"{rule}, compiled, {tree}, {rows} rows", partial(heads_on, tree, compiled, rule, rows, attention)
        for kind, settings in HEADS.items():
            make, how = (eager, "") if rows == 1 else (compiled, "compiled, ")
            on = partial(heads_on, tree, rows=rows, attention=attention, **settings)
            yield f"{kind}, {how}{tree}, {rows} rows", partial(on, make=make, rule="greedy")
        for drafter in OTHERS:
            yield f"{drafter}, {rows} rows", partial(other, drafter, "greedy" if rows == 1 else "sampled", rows)
    for rows, tree, rule in ((3, "topk:3,2,1", "greedy"), (1, "dynamic:8", "sampled")):
        for make in (eager, compiled):
            yield f"{rule}, {make.__name__}, {tree}, {rows} rows", partial(heads_on, tree, make, rule, rows, "GQA")
    for kind, settings in HEADS.items():
        yield f"{kind}, drawn, 3 rows", partial(heads_on, "topk:3,2,1", eager, "drawn", 3, "MHA", **settings)


def other(drafter: str, rule: str, rows: int) -> tuple[Session, Stepper]:
    """Steps of a drafter that is not the heads alone."""
    model = tiny_model(**MODELS["MHA"], num_hidden_layers=1)
    tree, context = Tree.top_k([3, 2]), DrafterContext(model)
    factories: dict[str, Callable[[], DrafterFactory | None]] = {
        "plain": lambda: None,
        "ngram": lambda: NgramConfig().factory(context),
        "trie": lambda: NgramConfig(n=2, matches=4, tokens=3).factory(context),
        "lookahead": lambda: LookaheadConfig(window=4, n=3).factory(context),
        "model": lambda: DraftModel(tiny_model(seed=1), Tree.chain(3)),
        "model tree": lambda: DraftModel(tiny_model(seed=1), tree),
        "mix": lambda: Mix([TrainedHeads(random_heads(model), tree), NgramConfig(n=2).factory(context)]),
    }
    return eager(model, factories[drafter](), rule, rows)


DAILY = (
    *("greedy, compiled, dynamic:8, 3 rows", "sampled, penalties, dynamic:8, 3 rows", "drawn, topk:3,2,1, 3 rows"),
    *(
        "mix, 3 rows",
        "eagle, compiled, dynamic:8, 3 rows",
        "markov, drawn, 3 rows",
        "lookahead, 3 rows",
        "plain, 3 rows",
    ),
)


def outcomes(full: bool) -> dict[str, dict[str, Any]]:
    """The faults of each case, and how many values the host read from the device; changes the process for good.

    All cases run only if `full`."""
    _setup_privateuseone_for_python_backend("gpu")
    for name, module in list(sys.modules.items()):
        if name.startswith("decode.") and hasattr(module, "on_device") and module is not transfer:
            module.on_device = on_device
    decode.loop.host_waits = lambda device: True
    region.compiled = lambda step, *how: step
    mode = FakeTensorMode()
    outcome = {name: outcome_of(make, mode) for name, make in cases() if name in DAILY or full}
    pack = decode.step.pack
    for name, fault in PLANTED.items():
        decode.step.pack = lambda draft, accepted, fault=fault: (fault(draft.ids), pack(draft, accepted))[1]
        outcome[f"planted: {name}"] = outcome_of(partial(other, "mix", "greedy", 1), mode)
    return outcome


def outcome_of(make: Callable[[], tuple[Session, Stepper]], mode: FakeTensorMode) -> dict[str, Any]:
    for stored in (medusa.tree.tree_of, Topology.of, chain):
        stored.cache_clear()  # the last case has moved the tensors of its tree
    try:
        return found_in(*make(), mode)
    except Exception as error:  # fake tensors raise one for tensors of two devices, and for most reads of values
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/decode/" in f.filename]
        return {"faults": [f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"], "reads": 0}
