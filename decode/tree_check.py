"""Self-test: checks once per model that a forward over a tree gives the same logits as forwards without a tree.

A check of the configuration (`medusa.backbone.require_tree_support`) cannot find every unsuitable model. The self-test
reads two trees with the cache, masks and positions of decoding; the second tree follows an accepted path of the first.
Every node must get the logits that a plain forward, without cache or mask, gives at the end of the node's path.

Shapes: R trees, N nodes of each tree, V vocabulary."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from decode.cache import TreeCache
from decode.draft import Draft
from decode.ops.attention import uses_own_sdpa
from decode.ops.fast_linear import prepare_linear
from decode.ops.tree_attention import TRIED, Shape, is_right, recorded, runs_on
from decode.reader import Reader
from decode.topology import Topology
from medusa.backbone import Backbone, by_value, require_tree_support
from medusa.errors import RequestError, first_line
from medusa.options import dtype_name
from medusa.tree import Tree
from medusa.tree_support import LayerTypes, updates_by_functions

# Eight nodes, three deep. With siblings and cousins, slots and positions differ from node 2 on.
TREE = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0]])
LEAVES = [node for node in range(TREE.num_nodes) if node not in TREE.parent.tolist()]
LINES = [[node for node in TREE.paths[leaf].tolist() if node >= 0] for leaf in LEAVES]  # nodes from the root to leaves
PROMPTS = (13, 9)  # tokens: two rows of a ragged batch
KEPT = ([0, 2, 5, 7], [0, 1])  # nodes of the first tree that each row commits: not adjacent, and of uneven number
WINDOW = 5  # ends inside the text and inside a path of the tree
# Rounding errors reach 1e-6 in float64 and float32 (softmax and norms are float32 in most models, whatever their dtype)
# and 1e-2 in bfloat16, more in deep models. A wrong mask or position gives an error of 0.1 to 1.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
HALF_TOLERANCE = 4e-2
# The greatest share of the control that an error may have. Measured in bfloat16: rounding is up to 0.06 of the control
# in trained models and 0.13 in a deep untrained one; wrong masks and windows are 0.34 or more.
SHARE = 0.2


@dataclass(frozen=True)
class TreeCheck:
    """Result of the tree self-test. An error is the greatest difference of logits, divided by the greatest logit."""

    error: float  # of tree forwards, compared with plain forwards; nan if there are no logits to compare
    control: float  # the error of reading the same nodes as one line of text, as a model without tree masks would
    tolerance: float  # the greatest error that rounding may cause in the model's dtype
    reason: str | None = None  # why the model cannot hold a tree; `None` where it can

    @property
    def limit(self) -> float:
        """The `error` allowed for rounding: `tolerance`, or 0.2 x `control` if less, but at least `tolerance` / 4."""
        # If masks do not matter in a model (for example, if all embeddings are equal), the control is rounding, too.
        return min(self.tolerance, max(SHARE * self.control, self.tolerance / 4))

    @property
    def ok(self) -> bool:
        return self.reason is None


def require_tree_forward(model: PreTrainedModel) -> None:
    """Check a model's structure, and run the self-test of tree attention unless its result for the model is stored.

    Raise a `RequestError` if the model does not support trees, or computes wrong logits over them."""
    require_tree_support(model)
    backbone = Backbone(model)
    key = (backbone.dtype, backbone.device, model.training, _tolerance(backbone), by_value(model.config))
    with _LOCK:
        known = _CHECKS.setdefault(model, {})
        if key not in known:
            known[key] = check_tree_forward(model)
    if not known[key].ok:
        name = f"{type(model).__name__} ({backbone.config.model_type})"
        raise RequestError(f"{name} cannot hold a tree: {known[key].reason}")


def check_tree_forward(model: PreTrainedModel) -> TreeCheck:
    """Test whether a model's logits over trees are right, by three short forwards with the KV cache and two without.

    Attention windows and chunks of real models are longer than a quick test, so the test shortens them in a copy of
    the model that shares its tensors. Other threads may run the model meanwhile."""
    prepare_linear(model)
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    # Dropout and routing noise may draw random numbers; the caller's generators stay as they were.
    with _LOCK, torch.random.fork_rng(devices), torch.no_grad():
        tried, backbone = TRIED.setdefault(model, set()), Backbone(model)
        tried.discard(backbone.dtype)
        short, config = _with_short_windows(model), backbone.config
        check = _check(short)
        if check.ok and runs_on(model.device) and uses_own_sdpa(config):
            with recorded() as shapes:
                by_kernel = _check(short, by_kernel=True)
            if by_kernel.ok:
                by_kernel = replace(by_kernel, reason=_trial(shapes))
            if by_kernel.ok:
                tried.add(backbone.dtype)
            else:
                name = f"{type(model).__name__} ({config.model_type})"
                warnings.warn(f"attention of {name} takes masks, not the kernel: {by_kernel.reason}", stacklevel=2)
        return check


def _trial(shapes: Iterable[Shape]) -> str | None:
    """Say for which of the shapes the kernel fails with a full tree after a long text; `None`: for none."""
    for shape in shapes:
        try:
            if not is_right(shape):
                return f"it is wrong after a long text, for {shape}"
        except torch.OutOfMemoryError:
            raise
        except Exception as raised:  # a GPU may lack the fast memory for so many nodes, for example
            return f"with a full tree it raises {type(raised).__name__}: {first_line(raised)}"
    return None


def _check(model: PreTrainedModel, by_kernel: bool = False) -> TreeCheck:
    backbone = Backbone(model)
    tolerance, nan = _tolerance(backbone), float("nan")
    ends = [end for end in (backbone.context, backbone.rope_boundary) if end is not None]
    # The last position is that of the deepest node in the second tree; some contexts end before it.
    short = max(0, PROMPTS[0] + len(KEPT[0]) + TREE.max_depth + 1 - min(ends, default=1 << 30))
    if short >= PROMPTS[0]:
        return TreeCheck(nan, nan, tolerance, f"its context of {min(ends)} tokens is too short for a tree")
    random = torch.Generator().manual_seed(0)
    counts = [max(1, length - short) for length in PROMPTS] + 4 * [TREE.num_nodes]
    ids = [torch.randint(backbone.vocab_size, (count,), generator=random).tolist() for count in counts]
    prompts, first, second = ids[:2], ids[2:4], ids[4:]
    longer_by = [[], [], *([ids[n] for n in kept] for ids, kept in zip(first, KEPT, strict=True))]
    texts = [prompt + more for prompt, more in zip(prompts * 2, longer_by, strict=True)]
    trees = list(zip(texts, first + second, strict=True))

    right = _plain(backbone, trees, LINES)
    wrong = _plain(backbone, trees[:2], [list(range(TREE.num_nodes))])
    control = _difference(wrong, right[:2], right, tolerance)
    if not right.isfinite().all():
        dtype = dtype_name(backbone.dtype)
        return TreeCheck(nan, control, tolerance, f"its logits are not finite in {dtype}; load it with another --dtype")
    try:
        got = _through_trees(backbone, by_kernel, prompts, first, second)
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:  # a model without support for trees may raise anything
        lines = str(raised).splitlines() or [""]
        reason = f"a tree forward raises {type(raised).__name__}: {lines[0]}"
        if model.training:
            reason = f"the model is in train mode, and {reason}; call model.eval()"
        return TreeCheck(nan, control, tolerance, reason)
    check = TreeCheck(_difference(got, right, right, tolerance), control, tolerance)
    if check.error > check.limit and LayerTypes(backbone.config).has_states and updates_by_functions(model):
        # Some recurrent layers compute a text otherwise than the same tokens one by one, as `generate` reads them.
        right = _one_by_one(backbone, [*zip(prompts * 2, longer_by, first + second, strict=True)])
        check = replace(check, error=_difference(got, right, right, tolerance))
    if check.error <= check.limit:
        return check
    what = "recurrent layers do" if LayerTypes(backbone.config).has_states else "attention does"
    reason = f"its {what} not follow our masks and positions"
    if getattr(backbone.config, "is_decoder", None) is False:  # BERT and others, whose tokens see later ones
        reason = "is_decoder is false in its config, so it reads texts as an encoder"
    if model.training:
        reason = "the model is in train mode, where dropout changes every forward; call model.eval()"
    differs = f"a tree forward differs from plain forwards by {check.error:.2g} (at most {check.limit:.2g})"
    return replace(check, reason=f"{differs}: {reason}")


def _difference(some: Tensor, others: Tensor, scale: Tensor, tolerance: float) -> float:
    """The greatest difference between logits `some` and `others` [R, N, V], divided by the greatest of logits `scale`.

    In half precision, the median over a tree's N nodes counts: in a mixture of experts, rounding may send a few tokens
    to other experts and change their logits much. A wrong mask changes six of the N = 8 nodes, so also the median."""
    by_node = (some - others).abs().amax(-1)  # [R, N]
    by_tree = by_node.median(dim=1).values if tolerance == HALF_TOLERANCE else by_node.amax(dim=1)
    return float(by_tree.max() / scale.abs().max())


def _plain(backbone: Backbone, trees: list[tuple[list[int], list[int]]], lines: list[list[int]]) -> Tensor:
    """Compute the logits [R, N, V] of R trees by one forward over plain texts, without cache or mask.

    Each of `trees` is a pair: ids of the text before the tree, and ids of its N nodes. For each tree and each list of
    node indices in `lines`, the batch has this text followed by these nodes, padded on the right (not attended to)."""
    texts = [torch.tensor(prefix + [ids[node] for node in line]) for prefix, ids in trees for line in lines]
    ids = pad_sequence(texts, batch_first=True).to(backbone.device)
    logits = backbone.model(input_ids=ids, use_cache=False).logits
    found = torch.zeros(len(trees), TREE.num_nodes, logits.shape[-1], dtype=torch.float64)
    lines_of_trees = itertools.product(range(len(trees)), lines)
    for (tree, line), text, after in zip(lines_of_trees, texts, logits, strict=True):
        found[tree, line] = after[len(text) - len(line) : len(text)].cpu().double()
    return found


def _one_by_one(backbone: Backbone, trees: list[tuple[list[int], list[int], list[int]]]) -> Tensor:
    """Compute the same logits as `_plain`, of texts that are read with a cache of transformers, as `generate` does.

    Each of `trees` has the ids of a prompt, those of tokens after it, read one by one, and those of its N nodes."""
    found = torch.zeros(len(trees), TREE.num_nodes, backbone.vocab_size, dtype=torch.float64)
    for tree, (prompt, more, nodes) in enumerate(trees):
        lines = [[*more, *(nodes[node] for node in line)] for line in LINES]
        tokens = pad_sequence([torch.tensor(line) for line in lines], batch_first=True).to(backbone.device)
        cache, after = {backbone.cache_name: DynamicCache(config=backbone.config)}, list[Tensor]()
        for part in (torch.tensor([prompt] * len(lines)).to(tokens), *tokens.split(1, dim=1)):
            after.append(backbone.model(input_ids=part, use_cache=True, **cache).logits[:, -1])
        for line, text, logits in zip(LINES, lines, torch.stack(after[1:], dim=1).cpu().double(), strict=True):
            found[tree, line] = logits[len(text) - len(line) : len(text)]
    return found


def _through_trees(backbone: Backbone, by_kernel: bool, prompts: list[list[int]], *drafts: list[list[int]]) -> Tensor:
    """Compute the logits [R, N, V] at the N nodes of all R trees as decoding does, in one step per draft.

    Each draft has a tree per prompt, given as the token ids of its nodes. The first step reads its trees after the
    prompts. After each step, the cache keeps the nodes `KEPT`, as if they had been accepted."""
    topology, device = Topology.of(TREE.to(backbone.device)), backbone.device
    lengths = [len(prompt) for prompt in prompts]
    cache = TreeCache(backbone.model.config, len(prompts), lengths[0] + 2 * TREE.num_nodes, device)
    reader = Reader(backbone, cache)
    reader.by_kernel = by_kernel
    padded = torch.tensor([prompt + [0] * (lengths[0] - len(prompt)) for prompt in prompts], device=device)
    reader.prefill(padded, lengths)
    logits = []
    for draft in drafts:
        logits.append(reader(Draft(torch.tensor(draft, device=device), topology)).logits.cpu().double())
        cache.keep([*map(len, KEPT)], KEPT)
    return torch.cat(logits)


def _with_short_windows(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model that shares its tensors, with shorter windows and chunks in its own configurations."""
    if any(isinstance(vars(module).get("forward"), FunctionType) for module in model.modules()):
        return model  # the function may run the modules that it was made for, whose windows must not change
    copies: dict[nn.Module, nn.Module] = {module: object.__new__(type(module)) for module in model.modules()}
    configs: dict[int, Any] = {}  # one copy of each; parts of a model may hold the same configuration

    def own(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copies.get(value, value)
        if isinstance(value, PretrainedConfig):
            return copy.deepcopy(value, configs)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, own(value.__self__))
        if isinstance(value, partial):  # so accelerate replaces `forward`
            return partial(own(value.func), *map(own, value.args), **value.keywords)
        if type(value) in (dict, OrderedDict):  # of modules, parameters, buffers and hooks
            return type(value)((name, own(part)) for name, part in value.copy().items())
        return value

    for module, copied in copies.items():
        vars(copied).update({name: own(value) for name, value in vars(module).copy().items()})
        copied._compiled_call_impl = None  # what `module.compile` has made runs the module itself
    for config in [value for value in configs.values() if isinstance(value, PretrainedConfig)]:
        for name in ("sliding_window", "attention_chunk_size"):
            if (getattr(config, name, None) or 0) > WINDOW:
                setattr(config, name, WINDOW)
    return cast("PreTrainedModel", copies[model])


def _tolerance(backbone: Backbone) -> float:
    rounded = torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled(backbone.device.type)
    if backbone.dtype == torch.float32 and rounded:  # TF32 and autocast compute in about ten bits
        return HALF_TOLERANCE
    if backbone.dtype == torch.float64 and LayerTypes(backbone.config).has_states:  # transformers keeps them in float32
        return TOLERANCES[torch.float32]
    return TOLERANCES.get(backbone.dtype, HALF_TOLERANCE)


_LOCK = threading.RLock()
# The results for each model that is in memory; nothing is stored on the model itself.
_CHECKS: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], TreeCheck]] = weakref.WeakKeyDictionary()
