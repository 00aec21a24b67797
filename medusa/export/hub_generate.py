"""Medusa decoding for transformers' `generate`, in one file that needs nothing but torch and transformers.

    model.generate(**inputs, custom_generate="org/heads", trust_remote_code=True, max_new_tokens=256)

`org/heads`, on the Hub or a local folder, holds this file as `custom_generate/generate.py` beside `config.json` and
`medusa_lm_head.safetensors`. The model is the one that the heads were trained for, loaded as always.

What it does (Cai et al. 2024, https://arxiv.org/abs/2401.10774). The heads guess the tokens after the next one from
the last hidden state. Their best guesses are laid out on a tree, and one forward of the model reads all of it: every
node sees the text, its ancestors and itself. Then the model writes as it always does, token by token, through the same
logits processors and stopping criteria; wherever a node of the tree holds the token that it decided on, what comes
after that token is known already and costs no forward. So nothing is approximate: greedy text is the model's greedy
text, a sample is a sample of the model's distribution, and for one prompt a seed gives what `generate` gives without
this file. (In bfloat16 and float16 a forward over many tokens rounds otherwise than one over a single token, so
near-ties may fall the other way.)

Rows of a batch are decoded one after the other, each as if it were alone. Options besides those of `generate`:

    medusa_heads           a folder or a Hub id to take the heads from; by default the one given as `custom_generate`
    medusa_tree            paths such as [[0], [1], [0, 0]]: which guess of which head stands under which; by default
                           the tree in `config.json`
    medusa_step_lengths    a list: the number of tokens that each forward gave is appended to it

Shapes: N nodes of the tree, the root counted; K heads, H hidden size, V vocabulary, T tokens of text in the cache.
"""

from __future__ import annotations

import inspect
import json
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import cached_file

CONFIG, WEIGHTS = "config.json", "medusa_lm_head.safetensors"
HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies")
MODEL_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


# ---------------------------------------------------------------------------------------------- what `generate` calls


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    streamer: Any = None,
    medusa_heads: str | None = None,
    medusa_tree: Sequence[Sequence[int]] | None = None,
    medusa_step_lengths: list[int] | None = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What `model.generate` returns for prompts [B, T], padded on the left with an `attention_mask` [B, T] if at all.

    Raises:
        ValueError: in one line: no heads there, heads for another model, a model that cannot hold a tree, or an option
            that cannot be had with one.
    """
    where = medusa_heads or _named_in_generate()
    heads = _heads_for(model, where, {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs})
    tree = Tree(medusa_tree or heads.tree, model.device)
    _require(tree.max_depth <= len(heads), f"the tree is {tree.max_depth} deep, and there are {len(heads)} heads")
    _require_tree_support(model)

    prompts = inputs if inputs is not None else input_ids
    _require(prompts is not None, "no prompt: pass input_ids (inputs_embeds cannot be continued with heads)")
    assert prompts is not None
    kwargs = _with_stop_strings(model, kwargs)
    for name in ("assistant_model", "synced_gpus"):
        _require(not kwargs.get(name), f"{name} cannot be combined with heads; leave it out")
    copies = kwargs.pop("num_return_sequences", None) or _setting(model, kwargs, "num_return_sequences") or 1
    rows = [row for row in range(len(prompts)) for _ in range(copies)]
    _require(streamer is None or len(rows) == 1, "a streamer takes one prompt at a time")
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and len(rows) > 1:
            raise ValueError(f"{name} is of a whole batch, and its rows are decoded alone; give one prompt at a time")

    configs: list[GenerationConfig] = []  # as `generate` prepared them

    def written(row: int) -> Tensor:
        """The new ids [T] of one row."""
        prompt = prompts[row : row + 1]
        if attention_mask is not None:  # without one nothing is padding, whatever the ids are
            prompt = prompt[:, attention_mask[row].bool()]
        _require(prompt.shape[1] > 0, "a prompt is empty; give at least one token")

        def decoding_method(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Tensor:
            """Called by transformers' `generate` with all that it prepared for this row."""
            configs.append(generation_config)
            _require_supported(generation_config, model_kwargs)
            writer = Writer(model, input_ids, logits_processor, stopping_criteria, generation_config)
            for step in decode(model, heads, tree, writer):
                if streamer is not None:
                    streamer.put(torch.tensor(step))
                if medusa_step_lengths is not None:
                    medusa_step_lengths.append(len(step))
            return writer.ids[0, input_ids.shape[1] :]

        allowed, own = prefix_allowed_tokens_fn, dict(kwargs)
        if allowed is not None:
            own["prefix_allowed_tokens_fn"] = lambda _, ids: allowed(row, ids)
        own |= {"attention_mask": torch.ones_like(prompt), "num_return_sequences": 1}
        if streamer is not None:
            streamer.put(prompt.cpu())
        stock: Any = type(model)  # the class's method: `model.generate` may be this very function
        new_ids: Tensor = stock.generate(model, prompt, custom_generate=decoding_method, **own)
        if streamer is not None:
            streamer.end()
        return new_ids

    new = [written(row) for row in rows]
    pad = getattr(configs[0], "_pad_token_tensor", None)
    padded = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=0 if pad is None else int(pad))
    sequences = torch.cat([prompts[rows], padded.to(prompts.device)], dim=1)
    if not configs[0].return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]


def _named_in_generate() -> str:
    """The `custom_generate` that transformers' `generate` was called with.

    It hands over everything but that, and runs this file as a copy in a cache, far from the heads. So the name is read
    where it still stands: in the frame of the `generate` that called us.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_globals.get("__name__") == "transformers.generation.utils" and isinstance(name, str):
            return name
        frame = frame.f_back
    raise ValueError("whose heads? pass medusa_heads=, a folder or a Hub id")


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`stop_strings` and `tokenizer` as a criterion: transformers keeps the tokenizer from decoding methods."""
    stops = kwargs.pop("stop_strings", None) or _setting(model, kwargs, "stop_strings")
    tokenizer = kwargs.pop("tokenizer", None)
    if not stops:
        return kwargs
    _require(tokenizer is not None, "stop_strings need the tokenizer; pass tokenizer=...")
    criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, stops)]
    config = GenerationConfig.from_dict((kwargs.get("generation_config") or model.generation_config).to_dict())
    config.stop_strings = None
    return kwargs | {"stopping_criteria": StoppingCriteriaList(criteria), "generation_config": config}


def _setting(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> Any:
    return getattr(kwargs.get("generation_config") or model.generation_config, name, None)


# ------------------------------------------------------------------------------------------------------- the decoding


class Writer:
    """The text, and how it goes on: what `generate` would do with each token's logits, one token at a time."""

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
        context = getattr(_text_config(model), "max_position_embeddings", None)
        self.limit = int(config.max_length) if context is None else min(int(config.max_length), context)
        boundary = _longrope_boundary(model)
        _require(
            boundary is None or not prompt.shape[1] <= boundary < self.limit,
            f"longrope turns all of a text otherwise once it passes {boundary} tokens, and a tree cannot; end before "
            "that (max_new_tokens), or decode this text without heads",
        )
        _require(
            context is None or prompt.shape[1] <= context,
            f"the prompt has {prompt.shape[1]} tokens, but the model's context ends at {context}",
        )
        self.finished = prompt.shape[1] >= self.limit

    def write(self, logits: Tensor) -> int:
        """logits [V] behind the text -> the token that the model goes on with, which is then part of the text."""
        scores = self.processors(self.ids, logits[None].to(self.ids.device, torch.float32, copy=True))  # type: ignore[arg-type]
        token = torch.multinomial(scores.softmax(-1), 1) if self.do_sample else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        stops = bool(self.criteria(self.ids, None).all())
        self.finished = stops or self.ids.shape[1] >= self.limit
        return int(token)


def decode(model: PreTrainedModel, heads: Heads, tree: Tree, writer: Writer) -> Iterator[list[int]]:
    """Write until the end; yields the tokens of every step, a step being one forward over the tree.

    A step begins with its root, the token that was decided on before and that the model has not read yet. A last root
    which needs no forward is a step of its own.
    """
    if writer.finished:
        return
    cache = DynamicCache()  # without the model's config it never drops a key: windows are in our masks, by position
    with _lm_head_inputs(model) as seen:
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        logits = model(input_ids=writer.ids, past_key_values=cache, use_cache=True, **last).logits[0, -1]
        hidden = seen.pop()[0, -1]  # [H] from which the LM head, and all Medusa heads, guess
        root = writer.write(logits)
        while not writer.finished:
            # Propose: node n holds guess `rank[n]` of head `depth[n]`.
            best = heads.guesses(hidden, tree.max_depth, tree.max_rank + 1).tolist()
            nodes = [root] + [best[d - 1][r] for d, r in zip(tree.depth[1:], tree.rank[1:], strict=True)]
            seen.clear()  # a shared LM head was called just now

            # Verify: one forward over all nodes, behind the text.
            length = writer.ids.shape[1] - 1  # the root is written, and not read
            logits = _tree_forward(model, cache, nodes, tree, length, writer.limit)
            hidden_NH = seen.pop()[0]

            # Accept: follow what the model writes down the tree, for as long as a node holds it.
            path, step, child = [0], [root], None
            while True:
                token = writer.write(logits[path[-1]])
                child = next((node for node in tree.children[path[-1]] if nodes[node] == token), None)
                if child is not None:
                    step.append(token)
                if child is None or writer.finished:
                    break
                path.append(child)
            yield step

            # Compact: of the tree, the cache keeps the path.
            _keep(cache, length, path)
            root, hidden = token, hidden_NH[path[-1]]
            if writer.finished and child is not None:
                return  # the last token was a node's, so it stands in the step already
        yield [root]


def _tree_forward(
    model: PreTrainedModel, cache: DynamicCache, nodes: list[int], tree: Tree, length: int, limit: int | None = None
) -> Tensor:
    """Logits [N, V] of `nodes` behind the `length` tokens in the cache, which then holds the nodes, too."""
    position = length + torch.tensor(tree.depth, device=model.device)
    # Nodes from `limit` on are never accepted; all that matters is that they ask for no position there.
    asked = position if limit is None else position.clamp(max=limit - 1)
    return model(
        input_ids=torch.tensor([nodes], device=model.device),
        position_ids=asked[None],
        attention_mask=_masks(model, tree, position, length),
        past_key_values=cache,
        use_cache=True,
    ).logits[0]


def _masks(model: PreTrainedModel, tree: Tree, position: Tensor, length: int) -> Tensor | dict[str, Tensor]:
    """What each node sees: the text, its ancestors, itself. Masks [1, 1, N, T + N], one for each kind of layers.

    They are added to the scores (eager attention would add a boolean one as 0 and 1), and windows count positions:
    nodes of one depth stand in different slots of the cache at one and the same position.
    """
    config = _text_config(model)
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


def _keep(cache: DynamicCache, length: int, path: list[int]) -> None:
    """Of the nodes behind the first `length` slots keep those on `path`, in order; keys and values are [1, ., T, .]."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if not layer.is_initialized:  # it reads another layer's
            continue
        for name in ("keys", "values"):
            states = getattr(layer, name)
            kept = states[:, :, [length + node for node in path]]  # a copy
            states[:, :, length : length + len(path)] = kept
            setattr(layer, name, states[:, :, : length + len(path)])


@contextmanager
def _lm_head_inputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """What the LM head is given [1, ., H], call by call: the hidden states that heads read, in every kind of model."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()


# ----------------------------------------------------------------------------------------------- the heads, and a tree


class Heads:
    """K heads: from one hidden state to guesses for the tokens at distance 2, 3, ... K + 1.

    A head is a few residual blocks and an LM head, its own or the model's. Blocks are x + SiLU(W x + b), the paper's,
    or x + D SiLU(U x + b) + c. Heads of kind `medusa` all start from the hidden state; those of kind `cascade` each
    start from what the blocks of the one before made.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], lm_head: torch.nn.Module) -> None:
        self.kind, self.lm_head = config.get("kind", "medusa"), lm_head
        heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
        self.tree: list[list[int]] = config.get("tree") or [[0] * depth for depth in range(1, heads + 1)]
        block = "{}.{}." if self.kind == "medusa" else "stacks.{}.layers.{}."
        self.blocks = [
            [_with_prefix(tensors, block.format(head, layer)) for layer in range(layers)] for head in range(heads)
        ]
        self.lm_heads: list[Tensor] | None = None  # each [V, H]
        if config.get("lm_head", "own") == "own":
            stacked = tensors.get("lm_heads")  # [K, H, V]
            own = [tensors[f"{head}.{layers}.weight"] for head in range(heads)] if stacked is None else list(stacked.mT)
            self.lm_heads = own
        self.like = next(iter(tensors.values()))  # of their device and dtype

    def __len__(self) -> int:
        return len(self.blocks)

    def guesses(self, hidden: Tensor, count: int, top: int) -> Tensor:
        """hidden [H] -> the `top` best tokens of each of the first `count` heads [count, top], best first."""
        start = hidden.to(self.like)  # a model may lie on several devices, its LM head in another dtype
        logits, x = [], start
        for head in range(count):
            x = start if self.kind == "medusa" else x
            for block in self.blocks[head]:
                x = _residual(x, block)
            own = None if self.lm_heads is None else self.lm_heads[head]
            logits.append(self.lm_head(x.to(hidden.dtype)) if own is None else F.linear(x, own))
        return torch.stack(logits).float().topk(top).indices


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _residual(x: Tensor, block: dict[str, Tensor]) -> Tensor:
    """One block on x [H]."""
    if "linear.weight" in block:
        return x + F.silu(F.linear(x, block["linear.weight"], block["linear.bias"]))
    inner = F.silu(F.linear(x, block["up.weight"], block["up.bias"]))
    return x + F.linear(inner, block["down.weight"], block["down.bias"])


class Tree:
    """Nodes from paths of ranks: [0, 2] is the third best guess of head 2 under the best guess of head 1.

    Node 0 is the root; a parent stands before its children.
    """

    def __init__(self, paths: Sequence[Sequence[int]], device: torch.device) -> None:
        nodes = [(), *sorted({tuple(path) for path in paths if path}, key=lambda path: (len(path), path))]
        index = {path: node for node, path in enumerate(nodes)}
        self.depth = [len(path) for path in nodes]
        self.rank = [path[-1] if path else 0 for path in nodes]
        self.children: list[list[int]] = [[] for _ in nodes]
        ancestors = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
        for node, path in enumerate(nodes):
            _require(path[:-1] in index, f"the tree's path {list(path)} has no parent; add the path {list(path[:-1])}")
            ancestors[node, [index[path[:depth]] for depth in range(len(path) + 1)]] = True
            if path:
                self.children[index[path[:-1]]].append(node)
        self.ancestors = ancestors.to(device)  # [N, N] itself and what stands above it
        self.max_depth, self.max_rank = max(self.depth), max(self.rank)


# The heads that were last used with each living model, and which files they are.
_LOADED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Heads]] = weakref.WeakKeyDictionary()


def _heads_for(model: PreTrainedModel, where: str, hub_options: dict[str, Any]) -> Heads:
    """The heads in the folder or Hub repository `where`, in the model's dtype beside its LM head; loaded once."""
    # On the Hub, code and weights are of one commit: the copy that runs lies in a folder of that name.
    commit = next((part for part in Path(__file__).parts if re.fullmatch("[0-9a-f]{40}", part)), None)
    if commit is not None and not Path(where).is_dir():
        hub_options.setdefault("revision", commit)
    try:
        files = [cached_file(where, name, **hub_options) for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise ValueError(f"no heads at {where}: {str(error).strip().splitlines()[0]}") from None
    paths = [Path(file) for file in files if file is not None]
    lm_head = model.get_output_embeddings()
    _require(lm_head is not None, f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM")
    device = lm_head.weight.device
    if device.type == "meta":  # offloaded
        device = model.device
    key = (*((str(path), path.stat().st_mtime_ns) for path in paths), model.dtype, device)
    known = _LOADED.get(model)
    if known is not None and known[0] == key:
        return known[1]
    config = json.loads(paths[0].read_text(encoding="utf-8"))
    supported = config.get("kind", "medusa") in ("medusa", "cascade")
    _require(
        supported and not config.get("prefix_layers") and not config.get("vocabulary"),
        f"the heads at {where} are of a kind that this file does not know; use the package that they come from",
    )
    text, of = _text_config(model), config.get("base_model_name_or_path") or "another model"
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = config.get(name), getattr(text, name)
        _require(
            theirs in (None, ours), f"the heads at {where} have {name} {theirs}, the model {ours}; they are for {of}"
        )
    tensors = {name: tensor.to(device, model.dtype) for name, tensor in load_file(paths[1]).items()}
    heads = Heads(config, tensors, lm_head)
    _LOADED[model] = key, heads
    return heads


# --------------------------------------------------------------------------------------------- what cannot be had


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _require_supported(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode().value
    _require(mode in ("greedy_search", "sample"), f"{mode.replace('_', ' ')} cannot be combined with heads")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        _require(not getattr(config, name, None), f"{name} is not available with heads; leave it out")
    cache = model_kwargs.get("past_key_values")
    _require(cache is None or cache.get_seq_length() == 0, "past_key_values hold text already; give it as input_ids")
    for name, value in model_kwargs.items():
        _require(
            not isinstance(value, Tensor) or name in MODEL_INPUTS,
            f"the model input {name} is not supported with heads; only text can be continued",
        )


def _longrope_boundary(model: PreTrainedModel) -> int | None:
    """The length at which longrope changes the rotations of a whole text; `None` for models without it."""
    config = _text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    ends = [
        kind.get("original_max_position_embeddings") or config.original_max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(ends, default=None)


# What was found out about each living model: why it cannot hold a tree, or None.
_REASONS: weakref.WeakKeyDictionary[PreTrainedModel, dict[object, str | None]] = weakref.WeakKeyDictionary()


def _require_tree_support(model: PreTrainedModel) -> None:
    known = _REASONS.setdefault(model, {})
    key = (model.dtype, model.device, model.training, getattr(_text_config(model), "_attn_implementation", None))
    if key not in known:
        known[key] = _why_no_tree(model)
    _require(known[key] is None, f"{type(model).__name__} cannot hold a tree: {known[key]}")


def _why_no_tree(model: PreTrainedModel) -> str | None:
    """By its structure, else by numbers: a tree forward must give what plain forwards give."""
    config = _text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    attention = getattr(config, "_attn_implementation", None) or ""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        return "it has layers whose state cannot branch, or that choose by themselves what to see"
    if config.model_type in ("bloom", "gpt_neo", "mpt") or getattr(config, "alibi", False):
        return "its attention goes by slots of the cache, not by positions"
    if any(name in attention for name in ("flash", "flex", "paged")):
        return f"attention {attention!r} takes no tree mask; load it with attn_implementation='sdpa' or 'eager'"
    if model.training:
        return "it is in train mode; call model.eval()"
    error = _tree_error(model)
    # An honest error is rounding; a wrong mask or position errs by 0.1 to 1.
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-3}.get(model.dtype, 4e-2)
    return f"its attention does not follow our masks (error {error:.2g})" if not error <= tolerance else None


@torch.no_grad()
def _tree_error(model: PreTrainedModel) -> float:
    """How far a small tree's logits are from those of plain forwards along its paths, relative to the greatest one."""
    vocab_size = _text_config(model).vocab_size
    tree = Tree([[0], [1], [0, 0], [1, 0]], model.device)
    *prompt, a, b, c, d, e = [(7919 * i + 11) % vocab_size for i in range(1, 14)]  # any ids will do
    lines = [[a], [a, b], [a, c], [a, b, d], [a, c, e]]
    cache = DynamicCache()
    model(input_ids=torch.tensor([prompt], device=model.device), past_key_values=cache, use_cache=True)
    got = _tree_forward(model, cache, [a, b, c, d, e], tree, len(prompt))
    plain = [model(input_ids=torch.tensor([prompt + line], device=model.device), use_cache=False) for line in lines]
    right = torch.stack([out.logits[0, -1] for out in plain]).double()
    errors = (got.double() - right).abs().amax(-1) / right.abs().max()  # [N]
    # In half precision, rounding sends a token to another expert now and then; a wrong mask spares two nodes of five.
    return float(errors.max() if model.dtype in (torch.float32, torch.float64) else errors.median())
