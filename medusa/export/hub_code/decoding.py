"""The decoding loop (draft a tree, verify it in one forward, accept a path, compact the KV cache) and a model check."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from medusa.recording import names_of, recorded
from medusa.tree_support import (
    LayerKinds,
    additive,
    context_of,
    drop_call_hooks,
    longrope_boundary,
    text_config,
    why_no_tree,
)

from .heads import CandidateTree, Heads, require

# The largest error of a tree's logits. Rounding errors are smaller, and a wrong mask or position gives 0.1 to 1.
TOLERANCES, HALF_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}, 4e-2


@dataclass
class Continuation:
    """A prompt and its growing continuation, with the logits processors and stopping criteria of `generate`.

    Raise ValueError if the prompt is too long for the model."""

    model: PreTrainedModel
    ids: Tensor
    """[1, T] the T tokens of the text; at first those of the prompt."""
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    def __post_init__(self) -> None:
        length, end = self.ids.shape[1], int(self.config.max_length)
        context = context_of(self.model.config)
        self.limit = end if context is None else min(end, context)
        boundary = longrope_boundary(self.model)
        require(
            boundary is None or not length <= boundary < self.limit,
            f"longrope changes all rotations after {boundary} tokens, which a tree cannot follow; end it earlier "
            "(max_new_tokens), or decode it without heads",
        )
        require(
            context is None or length <= context,
            f"the prompt has {length} tokens, but the model's context ends at {context}",
        )
        self.finished = length >= self.limit

    def write(self, logits: Tensor) -> int:
        """Choose the next token from the model's logits [V], greedily or by sampling; append it and return it."""
        scores = self.processors(self.ids, logits[None].to(self.ids.device, torch.float32, copy=True))  # type: ignore[arg-type]
        token = torch.multinomial(scores.softmax(-1), 1) if self.config.do_sample else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        stops = bool(self.criteria(self.ids, None).all())
        self.finished = stops or self.ids.shape[1] >= self.limit
        return int(token)


def decode(model: PreTrainedModel, heads: Heads, tree: CandidateTree, text: Continuation) -> Iterator[list[int]]:
    """Decode one text until its end. Yield the accepted tokens of each step, in which one forward verifies a tree.

    The first token of a step is the root of its tree. The previous step chose this token, but the model has not read it
    yet. If the text ends with this token, it is yielded alone, without a forward."""
    if text.finished:
        return
    cache = DynamicCache()  # without a config, the cache never drops keys; masks apply sliding windows
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits, states = read(model, input_ids=text.ids, past_key_values=cache, use_cache=True, **last)
    hidden = states[0, -1]  # [H], the input of the LM head and of all Medusa heads
    root = text.write(logits[0, -1])
    while not text.finished:
        # Draft: node n is guess `rank[n]` of head `depth[n]`.
        best = heads.guesses(hidden, tree.max_depth, tree.max_rank + 1).tolist()
        nodes = [root] + [best[d - 1][r] for d, r in zip(tree.depth[1:], tree.rank[1:], strict=True)]

        # Verify: one forward over all nodes, after the text.
        length = text.ids.shape[1] - 1  # the last token of the text is the root, which is not in the cache
        logits, hidden_NH = tree_forward(model, cache, nodes, tree, length, text.limit)

        # Accept: choose token by token, for as long as a child of the last accepted node has the chosen token.
        path, step, child = [0], [root], None
        while True:
            token = text.write(logits[path[-1]])
            child = next((node for node in tree.children[path[-1]] if nodes[node] == token), None)
            if child is not None:
                step.append(token)
            if child is None or text.finished:
                break
            path.append(child)
        yield step

        # Compact: remove the nodes that are not on the accepted path from the cache.
        keep(cache, length, path)
        root, hidden = token, hidden_NH[path[-1]]
        if text.finished and child is not None:
            return  # the last token was a node, so it has been yielded
    yield [root]


def tree_forward(
    model: PreTrainedModel, cache: DynamicCache, nodes: list[int], tree: CandidateTree, length: int, limit: int = 2**62
) -> tuple[Tensor, Tensor]:
    """Run the model on a tree of N nodes after the `length` tokens in the cache.

    Return logits [N, V] (V tokens) and hidden states [N, H] (hidden size H). `nodes` are the token ids; all N enter the
    cache. Positions are clamped below `limit`, the text's maximum length."""
    position = length + torch.tensor(tree.depth, device=model.device)
    text = torch.ones(len(nodes), length, dtype=torch.bool, device=model.device)
    allowed = torch.cat([text, tree.ancestors], dim=1)  # [N, T + N]: the text, the node's ancestors and the node itself
    # Windows and chunks use positions instead of cache slots, because nodes of one depth share a position.
    query, key = position[:, None], torch.cat([torch.arange(length, device=model.device), position])
    layers = LayerKinds(text_config(model))
    masks = layers.masks(lambda kind: additive(kind.limited(allowed, query, key), model.dtype)[None, None])
    # Positions from `limit` on can be outside the context. Nodes there are never accepted, so their position is free.
    logits, hidden = read(
        model,
        input_ids=torch.tensor([nodes], device=model.device),
        position_ids=position.clamp(max=limit - 1)[None],
        attention_mask=masks,
        past_key_values=cache,
        use_cache=True,
    )
    return logits[0], hidden[0]


def keep(cache: DynamicCache, length: int, path: list[int]) -> None:
    """Remove the last tree from the KV cache, except the nodes with indices `path`. Keep the text (`length` slots)."""
    for layer in cache.layers:
        if not getattr(layer, "is_initialized", False):  # a layer that shares the keys and values of another layer
            continue
        for name in ("keys", "values"):
            states = getattr(layer, name)  # [1, ., T, .]
            kept = states[:, :, [length + node for node in path]]  # a copy, so that the assignment below is safe
            states[:, :, length : length + len(path)] = kept
            setattr(layer, name, states[:, :, : length + len(path)])


def read(model: PreTrainedModel, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Run the model; return its logits [1, T, V] and the LM head's input, the hidden states [1, T, H] of T tokens."""
    seen: list[Tensor] = []
    head = names_of(model, model.get_output_embeddings())
    with recorded(model, dict.fromkeys(head, lambda args, kwargs: seen.append(args[0]))) as view:
        return view(**inputs).logits, seen[-1]


# A cache of the reason why each model failed the test; None if it passed.
_REASONS: weakref.WeakKeyDictionary[PreTrainedModel, dict[object, str | None]] = weakref.WeakKeyDictionary()


def require_tree_support(model: PreTrainedModel) -> None:
    """Raise ValueError if a forward over a tree gives wrong logits. The result of the test is cached for each model."""
    require(not drop_call_hooks(model), "adapter_names cannot be combined with heads; call model.set_adapter instead")
    known, reason = _REASONS.setdefault(model, {}), why_no_tree(model)
    key = (model.dtype, model.device, model.training, getattr(text_config(model), "_attn_implementation", None))
    if reason is None and key not in known:
        known[key] = _failed_test(model)
    reason = known[key] if reason is None else reason
    require(reason is None, f"{type(model).__name__} cannot hold a tree: {reason}")


@torch.no_grad()
def _failed_test(model: PreTrainedModel) -> str | None:
    """Compare a small tree's logits with those of forwards without a tree; return why the test failed, or `None`."""
    if model.training:
        return "it is in train mode; call model.eval()"
    vocab_size = text_config(model).vocab_size
    tree = CandidateTree([[0], [1], [0, 0], [1, 0]], model.device)
    *prompt, a, b, c, d, e = [(7919 * i + 11) % vocab_size for i in range(1, 14)]  # arbitrary ids
    lines = [[a], [a, b], [a, c], [a, b, d], [a, c, e]]
    cache = DynamicCache()
    model(input_ids=torch.tensor([prompt], device=model.device), past_key_values=cache, use_cache=True)
    got, _ = tree_forward(model, cache, [a, b, c, d, e], tree, len(prompt))
    plain = [model(input_ids=torch.tensor([prompt + line], device=model.device), use_cache=False) for line in lines]
    right = torch.stack([out.logits[0, -1] for out in plain]).double()
    errors = (got.double() - right).abs().amax(-1) / right.abs().max()  # [N], relative to the largest logit
    # In half precision, rounding can route a token to another expert. A wrong mask affects three of the five nodes.
    error = float(errors.max() if model.dtype in TOLERANCES else errors.median())
    if error <= TOLERANCES.get(model.dtype, HALF_TOLERANCE):  # false for nan, too
        return None
    return f"its attention does not follow our masks (error {error:.2g})"
