"""The decoding loop (propose a tree, verify it in one forward, accept a path, compact the cache) and a model check."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from medusa.tree_support import longrope_boundary, text_config, why_no_tree

from .heads import CandidateTree, Heads, require


class Continuation:
    """The text so far, which grows token by token through the processors and criteria of `generate`."""

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
            f"longrope rotates a text differently once it passes {boundary} tokens, and a tree cannot; end before that "
            "(max_new_tokens), or decode this text without heads",
        )
        require(
            context is None or prompt.shape[1] <= context,
            f"the prompt has {prompt.shape[1]} tokens, but the model's context ends at {context}",
        )
        self.finished = prompt.shape[1] >= self.limit

    def write(self, logits: Tensor) -> int:
        """Append the token that the model chooses from its logits [V] after the text; return the token."""
        scores = self.processors(self.ids, logits[None].to(self.ids.device, torch.float32, copy=True))  # type: ignore[arg-type]
        token = torch.multinomial(scores.softmax(-1), 1) if self.do_sample else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        stops = bool(self.criteria(self.ids, None).all())
        self.finished = stops or self.ids.shape[1] >= self.limit
        return int(token)


def decode(model: PreTrainedModel, heads: Heads, tree: CandidateTree, text: Continuation) -> Iterator[list[int]]:
    """Decode until the text ends, and yield the tokens of every step: of one forward over the tree.

    A step begins with its root: the token that was chosen before and that the model has not read yet. If the text ends
    with a root, that token needs no forward and is yielded alone.
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
    """Run the model on the tree `nodes` after the `length` tokens in the cache; return logits [N, V].

    The nodes are added to the cache.
    """
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
    """Masks [1, 1, N, T + N] in which each node sees the text, its ancestors and itself; one for each kind of layers.

    They are added to the attention scores, since eager attention would add a boolean mask as 0 and 1. Windows count
    positions: nodes of one depth stand in different slots of the cache at the same position.
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
    """Keep the nodes of `path` after the first `length` slots of the cache, and drop all other nodes."""
    for layer in cache.layers:
        if not getattr(layer, "is_initialized", False):  # the layer uses another layer's keys and values
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


# The reason why each living model cannot hold a tree, or None.
_REASONS: weakref.WeakKeyDictionary[PreTrainedModel, dict[object, str | None]] = weakref.WeakKeyDictionary()


def require_tree_support(model: PreTrainedModel) -> None:
    """Raise ValueError if a forward over a tree gives other logits than plain forwards; tested once a model."""
    known = _REASONS.setdefault(model, {})
    key = (model.dtype, model.device, model.training, getattr(text_config(model), "_attn_implementation", None))
    if key not in known:
        known[key] = _reason(model)
    require(known[key] is None, f"{type(model).__name__} cannot hold a tree: {known[key]}")


def _reason(model: PreTrainedModel) -> str | None:
    """The reason why the model cannot hold a tree, by its config, else by the logits of a small tree."""
    if (reason := why_no_tree(model)) is not None:
        return reason
    if model.training:
        return "it is in train mode; call model.eval()"
    error = _tree_error(model)
    # Rounding errs by less; a wrong mask or position errs by 0.1 to 1.
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-3}.get(model.dtype, 4e-2)
    return f"its attention does not follow our masks (error {error:.2g})" if not error <= tolerance else None


@torch.no_grad()
def _tree_error(model: PreTrainedModel) -> float:
    """The difference between a small tree's logits and those of plain forwards, relative to the largest logit."""
    vocab_size = text_config(model).vocab_size
    tree = CandidateTree([[0], [1], [0, 0], [1, 0]], model.device)
    *prompt, a, b, c, d, e = [(7919 * i + 11) % vocab_size for i in range(1, 14)]  # any ids will do
    lines = [[a], [a, b], [a, c], [a, b, d], [a, c, e]]
    cache = DynamicCache()
    model(input_ids=torch.tensor([prompt], device=model.device), past_key_values=cache, use_cache=True)
    got = tree_forward(model, cache, [a, b, c, d, e], tree, len(prompt))
    plain = [model(input_ids=torch.tensor([prompt + line], device=model.device), use_cache=False) for line in lines]
    right = torch.stack([out.logits[0, -1] for out in plain]).double()
    errors = (got.double() - right).abs().amax(-1) / right.abs().max()  # [N]
    # In half precision, rounding sometimes sends a token to another expert; a wrong mask spares two of five nodes.
    return float(errors.max() if model.dtype in (torch.float32, torch.float64) else errors.median())
