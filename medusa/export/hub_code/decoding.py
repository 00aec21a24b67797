"""The decoding loop: propose a tree, verify it in one forward, accept a path of it, compact the cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from medusa.tree_support import longrope_boundary, text_config

from .heads import CandidateTree, Heads
from .support import require


class Continuation:
    """The text so far, and how `generate` would go on with each token's logits, one token at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> None:
        self.ids = prompt  # [1, T]
        self.processors, self.criteria, self.do_sample = processors, criteria, config.do_sample
        context = getattr(text_config(model), "max_position_embeddings", None)
        self.limit = int(config.max_length) if context is None else min(int(config.max_length), context)
        boundary = longrope_boundary(model)
        require(
            boundary is None or not prompt.shape[1] <= boundary < self.limit,
            f"longrope turns all of a text otherwise once it passes {boundary} tokens, and a tree cannot; end before "
            "that (max_new_tokens), or decode this text without heads",
        )
        require(
            context is None or prompt.shape[1] <= context,
            f"the prompt has {prompt.shape[1]} tokens, but the model's context ends at {context}",
        )
        self.finished = prompt.shape[1] >= self.limit

    def write(self, logits: Tensor) -> int:
        """logits [V] after the text -> the token that the model decides on, which is then part of the text."""
        scores = self.processors(self.ids, logits[None].to(self.ids.device, torch.float32, copy=True))  # type: ignore[arg-type]
        token = torch.multinomial(scores.softmax(-1), 1) if self.do_sample else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        stops = bool(self.criteria(self.ids, None).all())
        self.finished = stops or self.ids.shape[1] >= self.limit
        return int(token)


def decode(model: PreTrainedModel, heads: Heads, tree: CandidateTree, text: Continuation) -> Iterator[list[int]]:
    """Write until the end, and yield the tokens of every step; a step is one forward over the tree.

    A step begins with its root: the token that was decided before and that the model has not read yet. A last root that
    needs no forward is a step of its own.
    """
    if text.finished:
        return
    cache = DynamicCache()  # without the model's config it never drops a key: windows are in our masks, by position
    with lm_head_inputs(model) as seen:
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        logits = model(input_ids=text.ids, past_key_values=cache, use_cache=True, **last).logits[0, -1]
        hidden = seen.pop()[0, -1]  # [H] from which the LM head and all Medusa heads guess
        root = text.write(logits)
        while not text.finished:
            # Propose: node n holds guess `rank[n]` of head `depth[n]`.
            best = heads.guesses(hidden, tree.max_depth, tree.max_rank + 1).tolist()
            nodes = [root] + [best[d - 1][r] for d, r in zip(tree.depth[1:], tree.rank[1:], strict=True)]
            seen.clear()  # a shared LM head was called just now

            # Verify: one forward over all nodes, after the text.
            length = text.ids.shape[1] - 1  # the root is written and not read yet
            logits = tree_forward(model, cache, nodes, tree, length, text.limit)
            hidden_NH = seen.pop()[0]

            # Accept: follow the model's tokens down the tree, for as long as a node holds them.
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

            # Compact: of the tree, the cache keeps the path.
            keep(cache, length, path)
            root, hidden = token, hidden_NH[path[-1]]
            if text.finished and child is not None:
                return  # the last token was a node's, so the step holds it already
        yield [root]


def tree_forward(
    model: PreTrainedModel,
    cache: DynamicCache,
    nodes: list[int],
    tree: CandidateTree,
    length: int,
    limit: int | None = None,
) -> Tensor:
    """Logits [N, V] of `nodes` after the `length` tokens in the cache, which then also holds the nodes."""
    position = length + torch.tensor(tree.depth, device=model.device)
    # Nodes from `limit` on are never accepted; they must not ask for a position there.
    asked = position if limit is None else position.clamp(max=limit - 1)
    return model(
        input_ids=torch.tensor([nodes], device=model.device),
        position_ids=asked[None],
        attention_mask=_masks(model, tree, position, length),
        past_key_values=cache,
        use_cache=True,
    ).logits[0]


def _masks(model: PreTrainedModel, tree: CandidateTree, position: Tensor, length: int) -> Tensor | dict[str, Tensor]:
    """Masks [1, 1, N, T + N] of the text, its ancestors and itself for each node, one for each kind of layers.

    They are added to the scores, since eager attention would add a boolean mask as 0 and 1. Windows count positions:
    nodes of one depth stand in different slots of the cache at the same position.
    """
    config = text_config(model)
    text = torch.ones(len(tree.depth), length, dtype=torch.bool, device=model.device)
    sees = torch.cat([text, tree.ancestors], dim=1)  # [N, T + N]
    of_query, of_key = position[:, None], torch.cat([torch.arange(length, device=model.device), position])

    def mask(kind: str) -> Tensor:
        allowed = sees
        if kind == "sliding_attention":
            allowed = sees & (of_query - of_key < config.sliding_window)
        elif kind == "chunked_attention":
            allowed = sees & (of_query // config.attention_chunk_size == of_key // config.attention_chunk_size)
        zeros = torch.zeros(allowed.shape, dtype=model.dtype, device=model.device)
        return zeros.masked_fill_(~allowed, torch.finfo(model.dtype).min)[None, None]

    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return {kind: mask(kind) for kind in set(kinds)}
    if getattr(config, "sliding_window", None):
        return mask("sliding_attention")
    return mask("chunked_attention" if getattr(config, "attention_chunk_size", None) else "full_attention")


def keep(cache: DynamicCache, length: int, path: list[int]) -> None:
    """Keep the nodes of `path` after the first `length` slots of the cache, and drop the others."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if not layer.is_initialized:  # it uses another layer's keys and values
            continue
        for name in ("keys", "values"):
            states = getattr(layer, name)  # [1, ., T, .]
            kept = states[:, :, [length + node for node in path]]  # a copy
            states[:, :, length : length + len(path)] = kept
            setattr(layer, name, states[:, :, : length + len(path)])


@contextmanager
def lm_head_inputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Record the LM head's inputs [1, ., H], call by call: the hidden states that heads read, in every model."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()
