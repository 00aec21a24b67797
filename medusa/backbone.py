"""The backbone: a wrapper that computes hidden states and logits with a pretrained causal LM of transformers.

The model is neither copied nor modified.

Shapes: B rows, T tokens, H hidden size, E size of the states of several layers, V vocabulary size, `...` any leading
dimensions."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from medusa.errors import RequestError, first_line
from medusa.recording import names_of, recorded
from medusa.tree_support import context_of, longrope_boundary, text_config, why_no_tree
from medusa.versions import warn_if_untested

SAME_BASE = 0.05
"""Greatest norm of the difference between the hidden states of two equal forwards, as a share of their norm.

In bfloat16 a rounding changes a number by up to 0.4 %, and the roundings of many layers add up to about a per cent."""
PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype))
warn_if_untested()  # once in a process, where the first model of transformers is used
FeatureLayers = Sequence[int] | str | None  # as in `MedusaConfig.feature_layers`


class Readout(NamedTuple):
    """The result of a forward of the backbone: the hidden states that heads read, and the output of its LM head."""

    hidden: Tensor  # [..., H] the LM head's input, after the final norm; or [..., E] the states of `feature_layers`
    logits: Tensor  # [..., V]


class Backbone:
    """A causal LM of transformers that returns hidden states and logits.

    In most models the logits are `lm_head(base(x))`, so that they can be computed for selected positions only. A
    forward over four tokens tests this once for each model. Other models also scale or cap logits or hidden
    states (Cohere, Gemma-2, MiniCPM3): they compute their logits themselves, and a hook records the LM head's input. So
    do models that a user has changed by hooks on the whole model or by another `forward`."""

    def __init__(self, model: PreTrainedModel, feature_layers: FeatureLayers = None) -> None:
        """Wrap the model; raise RequestError if it has no LM head, needs more than text, or lacks a feature layer.

        With `feature_layers` (`MedusaConfig.feature_layers`), hidden states are those of these layers, concatenated in
        this order to [..., E]. The number i stands for the state after i of n layers; n stands for the LM head's input.
        """
        self.model = model
        self.config = text_config(model)
        self.base = model.get_decoder()
        head = model.get_output_embeddings()
        if head is None:
            raise RequestError(f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM")
        self.head: nn.Module = head
        self.hidden_size: int = self.head_weight.shape[1]
        self.feature_layers = self._resolved(feature_layers)
        self.vocab_size: int = self.config.vocab_size
        self.context = context_of(self.config)
        self.rope_boundary = longrope_boundary(model)
        self.rereads = self.config.model_type in ("phi3", "phimoe", "phi4_multimodal")
        """Whether `model.generate` drops its KV cache and reads the whole text again at `rope_boundary`."""
        self._seen: dict[int, Tensor] | None = None  # the inputs of hooked modules: layer i, or the LM head (n)
        self.splits = not _is_changed(model) and self._tested_splits()
        self._runs = self._root  # or, while modules are watched, a view of it

    @property
    def head_weight(self) -> Tensor:
        """The weight [V, H] of the LM head (V tokens, hidden size H)."""
        return cast("Tensor", self.head.weight)

    @property
    def device(self) -> torch.device:
        """The device of the input embeddings. In a model spread over devices, the LM head can be on another one."""
        return cast("Tensor", self.model.get_input_embeddings().weight).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def _tested_splits(self) -> bool:
        """The result of `_splits`, tested once for each LM head, `forward` of the model's class, and config."""
        state = type(self.model).forward, by_value(self.model.config)
        known = _SPLITS.get(self.head)
        if known is None or known[0] != state:
            known = _SPLITS[self.head] = state, self._splits()
        return known[1]

    @cached_property
    def keeps_logits(self) -> bool:
        """Whether the model can compute logits at selected positions only; few models are asked this."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @torch.no_grad()
    def _splits(self) -> bool:
        """Whether the model's logits are `lm_head(base(x))`, tested on an x of four tokens.

        Within one forward, the LM head's input and output must be the base's output and the logits, bit for bit: a
        soft cap changes small logits by less than any tolerance. Two forwards are not compared bit for bit, because
        some kernels add in another order each time. That rounding is far below `SAME_BASE` of the hidden states, and
        a base that the model calls in another way than `base(x)` gives hidden states that are far above it."""
        probe = torch.arange(4, device=self.device)[None] % self.vocab_size
        based, headed = list[object](), list[tuple[Tensor, Tensor]]()
        after: dict[str, Callable[..., None]] = {
            **dict.fromkeys(names_of(self.model, self.base), lambda args, kwargs, out: based.append(out)),
            **dict.fromkeys(names_of(self.model, self.head), lambda args, kwargs, out: headed.append((args[0], out))),
        }
        try:
            with recorded(self.model, {}, after) as model:
                logits = model(input_ids=probe, use_cache=False).logits
        except (TypeError, ValueError) as error:  # such as a missing image
            name, reason = type(self.model).__name__, first_line(error).rstrip(".:")
            raise RequestError(f"{name} cannot read text alone ({reason}); choose another model") from error
        hidden = getattr(based[-1], "last_hidden_state", None) if based else None
        if hidden is None or len(headed) != 1:
            return False
        read, written = headed[0]
        alone = self.base(input_ids=probe, use_cache=False).last_hidden_state
        same = torch.equal(hidden, read) and torch.equal(written, logits) and alone.shape == hidden.shape
        return same and bool((alone - hidden).float().norm() <= SAME_BASE * hidden.float().norm())

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Apply the LM head to hidden states [..., H] of any dtype; return logits [..., V] in the dtype of its weights.

        Caps and scales that the model applies after its LM head are left out. They do not change the order of tokens.
        """
        return self.head(hidden.to(self.head_weight.dtype))

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input embeddings [..., H] of token ids [...], as the model's embedding module computes them."""
        return self.model.get_input_embeddings()(ids)

    @property
    def scales_embeddings(self) -> bool:
        """Whether the embedding module does more than to look up rows of its table."""
        module = self.model.get_input_embeddings()
        return type(module).forward is not nn.Embedding.forward

    def hidden_states(self, input_ids: Tensor, **kwargs: object) -> Tensor:
        """Return the hidden states [B, T, H or E] for token ids `input_ids` [B, T]; `kwargs` go to the model.

        They are the LM head's inputs, or the states of the `feature_layers`."""
        return self._run(input_ids, **kwargs)[0] if self.splits else self._run_whole(input_ids, **kwargs).hidden

    def forward(
        self, input_ids: Tensor, cache: Cache, last: Tensor | None = None, all_hidden: bool = False, **kwargs: object
    ) -> Readout:
        """Run the model on new tokens `input_ids` [B, T], which are appended to the KV cache; `kwargs` go to the model.

        Return hidden states [B, T, H] and logits [B, T, V] of all positions. `last` [B] is the index of one position
        in each row: then only the hidden states [B, H] and logits [B, V] at these positions are returned. With
        `all_hidden`, the hidden states of all positions are returned in any case."""
        if not self._takes_positions:  # a model without attention takes no masks either
            kwargs = {}
        kwargs |= {self.cache_name: cache, "use_cache": True}
        if self.splits:
            hidden, states = self._run(input_ids, **kwargs)
            read = at(states, last)
            if self.feature_layers is None:  # the same states
                return Readout(hidden if all_hidden else read, self.head(read))
            return Readout(hidden if all_hidden else at(hidden, last), self.head(read))
        if last is not None and not all_hidden and self.keeps_logits and self.feature_layers is None:
            # The model takes one list of positions for all rows, so compute every position that some row asks for.
            kept, last = last.unique(return_inverse=True)
            kwargs["logits_to_keep"] = kept.cpu()  # an index on the CPU works on every device
        out = self._run_whole(input_ids, **kwargs)
        return Readout(out.hidden if all_hidden else at(out.hidden, last), at(out.logits, last))

    @cached_property
    def _root(self) -> nn.Module:
        """What a forward runs: the model, or its base alone if the LM head splits off."""
        return self.base if self.splits else self.model

    @cached_property
    def _named(self) -> set[str]:
        """The names of the arguments of a forward."""
        return {*inspect.signature(type(self._root).forward).parameters}

    @property
    def cache_name(self) -> str:
        """The argument that takes the cache: "cache" since transformers 5.24, or an older name."""
        return next((name for name in ("cache", "cache_params") if name in self._named), "past_key_values")

    @property
    def _takes_positions(self) -> bool:
        return "position_ids" in self._named or self.cache_name == "past_key_values"

    @cached_property
    def _watched(self) -> dict[str, int]:
        """The names of the recorded modules in `_root`, and the numbers of their layers; n stands for the LM head."""
        modules = {} if self.splits else {self.num_layers: self.head}
        for layer in self.feature_layers or ():
            if layer < self.num_layers:
                modules[layer] = self.layers[layer]
        return {name: number for number, module in modules.items() for name in names_of(self._root, module)}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the inputs of the LM head and the feature layers in this thread's forwards, if any are needed."""
        if self._seen is not None or not (self._watched or self.feature_layers):
            yield
            return
        seen = self._seen = {}

        def keeper(number: int) -> Callable[..., None]:
            def keep(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
                seen[number] = args[0] if args else kwargs["hidden_states"]

            return keep

        try:
            with recorded(self._root, {name: keeper(number) for name, number in self._watched.items()}) as self._runs:
                yield
        finally:
            self._seen, self._runs = None, self._root

    @property
    def state_size(self) -> int:
        """The size of the hidden states [..., H or E] that forwards return."""
        return self.hidden_size * (1 if self.feature_layers is None else len(self.feature_layers))

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers; raise RequestError if the model does not hold them in one list."""
        lists = (module for module in self.base.modules() if isinstance(module, nn.ModuleList))
        found = next((layers for layers in lists if len(layers) == self.num_layers), None)
        if found is None:
            raise RequestError(f"{type(self.model).__name__} has no list of layers; take heads without feature_layers")
        return found

    def _resolved(self, layers: FeatureLayers) -> tuple[int, ...] | None:
        """Check the numbers of `feature_layers`; `usual` becomes `usual_layers`."""
        if layers is None:
            return None
        count = self.num_layers
        numbers = usual_layers(count) if isinstance(layers, str) else tuple(layers)
        if any(not 0 <= number <= count for number in numbers):
            raise RequestError(f"heads read the layers {list(numbers)}, but the backbone has {count} layers")
        if self.config.hidden_size != self.hidden_size:
            projects = f"{type(self.model).__name__} projects its hidden states"
            raise RequestError(f"{projects}; take heads without feature_layers")
        _ = self.layers
        return numbers

    def _run(self, input_ids: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Run the model without its LM head; return the hidden states [B, T, H or E] and the LM head's input."""
        if self.feature_layers is not None and self._seen is None:
            with self.watched():
                return self._run(input_ids, **kwargs)
        states = self._runs(input_ids=input_ids, **kwargs).last_hidden_state
        return self._joined(states), states

    def _run_whole(self, input_ids: Tensor, **kwargs: object) -> Readout:
        """Run the complete model, and record the LM head's input as hidden states."""
        if self._seen is None:
            with self.watched():
                return self._run_whole(input_ids, **kwargs)
        logits = self._runs(input_ids=input_ids, **kwargs).logits
        return Readout(self._joined(self._seen[self.num_layers]), logits)

    def _joined(self, states: Tensor) -> Tensor:
        """Return the states [B, T, E] of the feature layers in the last forward; `states` are the LM head's input."""
        seen = self._seen
        if seen is None:
            return states
        seen[self.num_layers] = states
        if self.feature_layers is None:
            seen.clear()
            return states
        parts = [seen[layer] for layer in self.feature_layers]
        seen.clear()
        if any(part.dim() != states.dim() for part in parts):  # Gemma-3n: four versions of each state
            several = f"{type(self.model).__name__} has several states per token"
            raise RequestError(f"{several}; take heads without feature_layers")
        return torch.cat([part.to(states.device) for part in parts], dim=-1)


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that EAGLE-3's authors and servers take if a checkpoint names none: (2, n // 2, n - 3).

    The number i stands for the state after i of the n = `num_layers` layers."""
    return 2, num_layers // 2, num_layers - 3


def new_layers(num_layers: int) -> list[int]:
    """Return the layers whose hidden states new EAGLE-3 heads read: the usual ones, or others under 8 layers."""
    if num_layers >= 8:
        return list(usual_layers(num_layers))
    return [min(layer, num_layers - 1) for layer in (1, num_layers // 2, num_layers - 1)]


def _is_changed(model: PreTrainedModel) -> bool:
    """Whether hooks or a replaced `forward` of the whole model may change its logits, so that it must run whole.

    Accelerate replaces `forward` in a model on several devices only to move tensors."""
    replaced = "forward" in vars(model) and not hasattr(model, "_hf_hook")
    return replaced or bool(model._forward_hooks or model._forward_pre_hooks)


def by_value(config: object) -> object:
    """Return what a config holds as tuples, which a later change of the config does not reach.

    transformers' models read their config in each forward, so what is kept for a model holds for one config only."""
    if type(config) in PLAIN:
        return config
    if isinstance(config, PretrainedConfig):
        config = vars(config)
    if isinstance(config, dict):
        return tuple([(name, by_value(value)) for name, value in list(config.items())])
    return tuple(map(by_value, config)) if isinstance(config, (list, tuple)) else type(config)


# The result of `Backbone._splits` for each LM head in memory, with the tested `forward` of the model's class and the
# config. It is stored here, so that the model is not modified.
_SPLITS: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[object, object], bool]] = weakref.WeakKeyDictionary()


def at(values: Tensor, last: Tensor | None) -> Tensor:
    """Return the value at position `last[b]` of each row b of `values` [B, T, ...]; all values if `last` is `None`."""
    return values if last is None else values[torch.arange(len(values), device=values.device), last.to(values.device)]


def require_tree_support(model: PreTrainedModel) -> None:
    """Raise RequestError with the reason if the config shows that the model cannot verify a tree in one forward."""
    if (reason := why_no_tree(model, branches_states=True)) is not None:
        raise RequestError(f"{type(model).__name__} ({text_config(model).model_type}) cannot hold a tree: {reason}")
