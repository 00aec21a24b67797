"""Medusa heads loaded from `config.json` and `medusa_lm_head.safetensors`, and the candidate tree of their guesses."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import cached_file

from medusa.tree_support import text_config

CONFIG, WEIGHTS = "config.json", "medusa_lm_head.safetensors"
Options = dict[str, Any]


def require(holds: object, otherwise: str) -> None:
    """Raise ValueError with the message `otherwise` unless the condition `holds` is true."""
    if not holds:
        raise ValueError(otherwise)


class Heads:
    """K heads that guess the tokens at distance 2, 3, ... K + 1 from one hidden state.

    A head has residual blocks and an LM head, or uses the LM head of the model. A block computes x + SiLU(W x + b), as
    in the Medusa paper, or x + D SiLU(U x + b) + c with matrices U and D. Heads of kind `medusa` read the hidden
    state. Heads of kind `cascade` read the output of the previous head's blocks."""

    def __init__(self, config: Options, tensors: dict[str, Tensor], lm_head: torch.nn.Module) -> None:
        """Make heads from the content of `config.json`, their tensors and the model's LM head."""
        self.kind, self.lm_head = config.get("kind", "medusa"), lm_head
        heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
        self.tree: list[list[int]] = config.get("tree") or [[0] * depth for depth in range(1, heads + 1)]
        block = "{}.{}." if self.kind == "medusa" else "stacks.{}.layers.{}."
        self.blocks = [
            [_with_prefix(tensors, block.format(head, layer)) for layer in range(layers)] for head in range(heads)
        ]
        self.lm_heads: list[Tensor] | None = None  # each [V, H]
        if "lm_heads" in tensors:
            self.lm_heads = list(tensors["lm_heads"].mT)  # from [K, H, V]
        elif config.get("lm_head", "own") == "own":
            self.lm_heads = [tensors[f"{head}.{layers}.weight"] for head in range(heads)]
        self.like = next(iter(tensors.values()))  # any tensor, for the device and dtype of the heads

    def __len__(self) -> int:
        return len(self.blocks)

    def guesses(self, hidden: Tensor, count: int, top: int) -> Tensor:
        """Return the likeliest tokens [count, top] of the first `count` heads for a hidden state [H], best first."""
        start = hidden.to(self.like)  # the model's hidden states can be on another device or in another dtype
        logits, x = [], start
        for head in range(count):
            x = start if self.kind == "medusa" else x
            for block in self.blocks[head]:
                x = _residual(x, block)
            own = None if self.lm_heads is None else self.lm_heads[head]
            logits.append(self.lm_head(x.to(hidden.dtype)) if own is None else F.linear(x, own))
        return torch.stack(logits).float().topk(top).indices


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, under names without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _residual(x: Tensor, block: dict[str, Tensor]) -> Tensor:
    """Apply one residual block of a head to the vector x [H] (hidden size H)."""
    if "linear.weight" in block:
        return x + F.silu(F.linear(x, block["linear.weight"], block["linear.bias"]))
    inner = F.silu(F.linear(x, block["up.weight"], block["up.bias"]))
    return x + F.linear(inner, block["down.weight"], block["down.bias"])


class CandidateTree:
    """A tree of guesses. The path [0, 2] is the first head's best guess, then the second head's third best guess.

    Node 0 is the root: the next token, which the model has already chosen. Parents come before their children."""

    def __init__(self, paths: Sequence[Sequence[int]], device: torch.device) -> None:
        """Make a tree from the paths of its nodes; raise ValueError if the parent of a path is missing."""
        nodes = [(), *sorted({tuple(path) for path in paths if path}, key=lambda path: (len(path), path))]
        index = {path: node for node, path in enumerate(nodes)}
        self.depth = [len(path) for path in nodes]
        self.rank = [path[-1] if path else 0 for path in nodes]
        self.children: list[list[int]] = [[] for _ in nodes]
        ancestors = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
        for node, path in enumerate(nodes):
            require(path[:-1] in index, f"the tree's path {list(path)} has no parent; add the path {list(path[:-1])}")
            ancestors[node, [index[path[:depth]] for depth in range(len(path) + 1)]] = True
            if path:
                self.children[index[path[:-1]]].append(node)
        self.ancestors = ancestors.to(device)  # [N, N] True for the node itself and its ancestors
        self.max_depth, self.max_rank = max(self.depth), max(self.rank)


# A cache of the heads that were last used with each model, and of their files.
_LOADED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Heads]] = weakref.WeakKeyDictionary()


def heads_for(model: PreTrainedModel, where: str, hub_options: Options) -> Heads:
    """Load heads from the folder or Hub repository `where`, in the model's dtype and on the device of its LM head.

    The heads are cached for each model. Raise ValueError if there are no heads or they do not fit the model."""
    # Load the weights of the commit that this code is from: transformers caches the code in a folder with that name.
    commit = next((part for part in Path(__file__).parts if re.fullmatch("[0-9a-f]{40}", part)), None)
    if commit is not None and not Path(where).is_dir():
        hub_options.setdefault("revision", commit)
    try:
        files = [cached_file(where, name, **hub_options) for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise ValueError(f"no heads at {where}: {str(error).strip().splitlines()[0]}") from None
    paths = [Path(file) for file in files if file is not None]
    lm_head = model.get_output_embeddings()
    require(lm_head is not None, f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM")
    device = lm_head.weight.device
    if device.type == "meta":  # the weights are offloaded
        device = model.device
    key = (*((str(path), path.stat().st_mtime_ns) for path in paths), model.dtype, device)
    known = _LOADED.get(model)
    if known is not None and known[0] == key:
        return known[1]
    config = json.loads(paths[0].read_text(encoding="utf-8"))
    _require_fit(config, model, where)
    tensors = {name: tensor.to(device, model.dtype) for name, tensor in load_file(paths[1]).items()}
    heads = Heads(config, tensors, lm_head)
    _LOADED[model] = key, heads
    return heads


def why_unfit(config: Options) -> str | None:
    """Return the part of the heads' config that this module does not support; `None` if it supports all of it."""
    if config.get("kind", "medusa") not in ("medusa", "cascade"):
        return f"kind {config['kind']}"
    if config.get("prefix_layers"):
        return f"{config['prefix_layers']} prefix layers"
    return f"a vocabulary of {config['vocabulary']} tokens" if config.get("vocabulary") else None


def _require_fit(config: Options, model: PreTrainedModel, where: str) -> None:
    """Raise ValueError if this file does not support the heads, or they belong to a model of other sizes."""
    require(
        why_unfit(config) is None,
        f"the heads at {where} are of a kind that this file cannot decode with; use the package medusa-heads",
    )
    base = config.get("base_model_name_or_path") or "another model"
    text = text_config(model)
    read = getattr(text, "word_embed_proj_dim", None) or text.hidden_size  # OPT projects its states
    for name, ours in (("hidden_size", read), ("vocab_size", text.vocab_size)):
        theirs = config.get(name)
        message = f"the heads at {where} have {name} {theirs}, the model {ours}; they are for {base}"
        require(theirs in (None, ours), message)
