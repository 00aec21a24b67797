"""Can this very model hold a tree? Tried once, in numbers: no list of names knows the models that are yet to come.

`medusa.backbone.require_tree_support` refuses what a configuration gives away. Everything else shows in the logits: two
trees, the second behind a path of the first, go through the cache, masks and positions that decoding uses, and every
node must get the logits that plain forwards, without cache or mask, give at the end of its path.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decode.cache import TreeCache
from decode.draft import Draft
from decode.prefill import prefill
from decode.topology import Topology
from decode.verify import Verifier
from medusa.backbone import Backbone, require_tree_support
from medusa.errors import RequestError
from medusa.tree import Tree

# Eight nodes, three deep: with siblings and cousins, slots and positions part from node 2 on.
TREE = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0]])
LEAVES = [node for node in range(TREE.num_nodes) if node not in TREE.parent.tolist()]
PROMPTS = (13, 9)  # tokens: two rows of a ragged batch
KEPT = ([0, 2, 5, 7], [0, 1])  # what the rows commit of the first tree: nodes that lie behind others, and uneven counts
WINDOW = 5  # ends inside the text and inside a path of the tree
# An honest error is rounding: up to 1e-6 in float64 and float32 (softmax and norms are float32 in most models, whatever
# their dtype) and 1e-2 in bfloat16, more in deep models. A wrong mask or position errs by 0.1 to 1.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
HALF_TOLERANCE = 4e-2
# Of the control: an error is small only beside what a wrong mask would do to this very model. Measured in bfloat16:
# rounding up to 0.06 of it in trained models and 0.13 in a deep untrained one, wrong masks and windows from 0.34 on.
SHARE = 0.2


@dataclass(frozen=True)
class TreeCheck:
    """What the self-test found; errors are the greatest difference of a logit, divided by the greatest logit."""

    error: float
    """Of the tree forwards; nan where there are no numbers to compare."""
    control: float
    """Of the same nodes read as one line, which is what a tree without a mask is: what an error would look like."""
    tolerance: float
    reason: str | None = None
    """Why the model cannot hold a tree; `None` where it can."""

    @property
    def limit(self) -> float:
        """The greatest error that is taken for rounding."""
        # In a model to which no mask matters (where all words mean the same, say) the control is rounding, too.
        return min(self.tolerance, max(SHARE * self.control, self.tolerance / 4))

    @property
    def ok(self) -> bool:
        return self.reason is None


def require_tree_forward(model: PreTrainedModel) -> None:
    """Refuse a model that cannot verify a tree, by its structure or by the self-test, which runs once per model.

    Raises:
        RequestError: with the reason.
    """
    require_tree_support(model)
    backbone = Backbone(model)
    attention = backbone.config._attn_implementation
    key = (backbone.dtype, backbone.device, attention, model.training, _tolerance(backbone))
    with _LOCK:
        known = _CHECKS.setdefault(model, {})
        if key not in known:
            known[key] = check_tree_forward(model)
    if not known[key].ok:
        name = f"{type(model).__name__} ({backbone.config.model_type})"
        raise RequestError(f"{name} cannot hold a tree: {known[key].reason}")


def check_tree_forward(model: PreTrainedModel) -> TreeCheck:
    """Run the self-test: three short forwards with the cache and two without, over random ids of its own.

    Windows and chunks of real models are longer than any quick test. Masks and caches read them from the configuration
    at every call, so for as long as the test lasts they are shortened there, under a lock. (A forward of the same model
    in another thread would see that; the test runs once, before the first step.)
    """
    # Dropout, routing noise and the like may draw: not from the caller's generators.
    with _LOCK, _short_windows(model), torch.random.fork_rng(_cuda(model)), torch.no_grad():
        return _check(model)


def _check(model: PreTrainedModel) -> TreeCheck:
    backbone = Backbone(model)
    tolerance, nan = _tolerance(backbone), float("nan")
    ends = [end for end in (backbone.context, backbone.rope_boundary) if end is not None]
    # The last position asked for is that of the deepest node of the second tree; some contexts end before it.
    short = max(0, PROMPTS[0] + len(KEPT[0]) + TREE.max_depth + 1 - min(ends, default=1 << 30))
    if short >= PROMPTS[0]:
        return TreeCheck(nan, nan, tolerance, f"its context of {min(ends)} tokens is too short for a tree")
    random = torch.Generator().manual_seed(0)
    counts = [max(1, length - short) for length in PROMPTS] + 4 * [TREE.num_nodes]
    ids = [torch.randint(backbone.vocab_size, (count,), generator=random).tolist() for count in counts]
    prompts, first, second = ids[:2], ids[2:4], ids[4:]
    longer = [prompt + [ids[n] for n in kept] for prompt, ids, kept in zip(prompts, first, KEPT, strict=True)]
    trees = list(zip(prompts + longer, first + second, strict=True))

    right = _plain(backbone, [_lines(prefix, ids) for prefix, ids in trees])
    wrong = _plain(backbone, [[(prefix + ids, list(range(len(ids))))] for prefix, ids in trees[:2]])
    control = _difference(wrong, right[:2], right, tolerance)
    if not right.isfinite().all():
        dtype = str(backbone.dtype).removeprefix("torch.")
        return TreeCheck(nan, control, tolerance, f"its logits are not finite in {dtype}; load it with another --dtype")
    try:
        got = _through_trees(backbone, prompts, first, second)
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:  # whatever a model raises that was not made for this
        lines = str(raised).splitlines() or [""]
        return TreeCheck(nan, control, tolerance, f"a tree forward raises {type(raised).__name__}: {lines[0]}")
    check = TreeCheck(_difference(got, right, right, tolerance), control, tolerance)
    return check if check.error <= check.limit else replace(check, reason=_reason(check, model.training))


def _difference(some: Tensor, others: Tensor, scale: Tensor, tolerance: float) -> float:
    """Of logits [R, N, V] of R trees: the greatest difference of a node; in half precision, of a tree's median node.

    There, rounding sends a token to another expert once in a while, and its logits then differ by far more than
    rounding. A wrong mask spares only the first two of eight nodes.
    """
    by_node = (some - others).abs().amax(-1)  # [R, N]
    by_tree = by_node.median(dim=1).values if tolerance == HALF_TOLERANCE else by_node.amax(dim=1)
    return float(by_tree.max() / scale.abs().max())


def _reason(check: TreeCheck, training: bool) -> str:
    differs = f"a tree forward differs from plain forwards by {check.error:.2g} (at most {check.limit:.2g})"
    if training:
        return f"{differs}: it is in train mode, where dropout makes every forward another; call model.eval()"
    return f"{differs}: its attention does not follow our masks and positions"


def _lines(prefix: list[int], ids: list[int]) -> list[tuple[list[int], list[int]]]:
    """Each line from the root to a leaf, as the whole text and the nodes at its end."""
    lines = [[node for node in TREE.paths[leaf].tolist() if node >= 0] for leaf in LEAVES]
    return [(prefix + [ids[node] for node in line], line) for line in lines]


def _plain(backbone: Backbone, rows: list[list[tuple[list[int], list[int]]]]) -> Tensor:
    """Logits [R, N, V] of the nodes of R trees, from one forward without cache or mask over all their texts.

    Texts are padded on the right, where a causal model never looks.
    """
    texts = [text for row in rows for text, _ in row]
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for index, text in enumerate(texts):
        ids[index, : len(text)] = torch.tensor(text)
    logits = iter(backbone.model(input_ids=ids.to(backbone.device), use_cache=False).logits)
    results = []
    for row in rows:
        nodes: dict[int, Tensor] = {}
        for text, line in row:
            nodes |= zip(line, next(logits)[len(text) - len(line) : len(text)].cpu().double(), strict=True)
        results.append(torch.stack([nodes[node] for node in range(TREE.num_nodes)]))
    return torch.stack(results)


def _through_trees(backbone: Backbone, prompts: list[list[int]], *drafts: list[list[int]]) -> Tensor:
    """Logits [R, N, V] as decoding computes them: a tree per prompt, and one on top of what is kept of that."""
    topology, device = Topology.of(TREE.to(backbone.device)), backbone.device
    lengths = [len(prompt) for prompt in prompts]
    cache = TreeCache(backbone.model.config, len(prompts), capacity=lengths[0] + 2 * TREE.num_nodes)
    padded = torch.tensor([prompt + [0] * (lengths[0] - len(prompt)) for prompt in prompts], device=device)
    prefill(backbone, cache, padded, lengths)
    verifier = Verifier(backbone, cache)
    logits = []
    for draft in drafts:
        logits.append(verifier(Draft(torch.tensor(draft, device=device), topology)).logits.cpu().double())
        cache.commit(torch.tensor([kept + [0] * (len(KEPT[0]) - len(kept)) for kept in KEPT]), [*map(len, KEPT)])
    return torch.cat(logits)


@contextlib.contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    # Parts of a model may hold copies of its configuration, and a multimodal model holds one within another.
    configs = [model.config, model.config.get_text_config(decoder=True)]
    configs += [c for module in model.modules() if isinstance(c := getattr(module, "config", None), PretrainedConfig)]
    changed = []
    try:
        for config in {id(config): config for config in configs}.values():
            for name in ("sliding_window", "attention_chunk_size"):
                window = getattr(config, name, None)
                if window:
                    changed.append((config, name, window))
                    setattr(config, name, min(window, WINDOW))
        yield
    finally:
        for config, name, window in changed:
            setattr(config, name, window)


def _tolerance(backbone: Backbone) -> float:
    rounded = torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled(backbone.device.type)
    if backbone.dtype == torch.float32 and rounded:  # TF32 and autocast compute in about ten bits
        return HALF_TOLERANCE
    return TOLERANCES.get(backbone.dtype, HALF_TOLERANCE)


def _cuda(model: PreTrainedModel) -> list[torch.device]:
    return sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)


_LOCK = threading.RLock()
# What the test said of each living model; nothing is left on the model itself.
_CHECKS: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], TreeCheck]] = weakref.WeakKeyDictionary()
