"""The backbone: a pretrained causal LM of transformers, as hidden states and logits.

The stock model is used as it is: it is neither copied nor modified.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from medusa.errors import RequestError
from medusa.tree_support import longrope_boundary, text_config, why_no_tree

REREADS = {"phi3", "phimoe", "phi4_multimodal"}
"""Models whose `prepare_inputs_for_generation` drops the cache at longrope's boundary."""


class Readout(NamedTuple):
    """The result of a forward: the LM head's input and its output."""

    hidden: Tensor
    """[..., H] the backbone's last hidden state, after its final norm. The LM head and all Medusa heads read it."""
    logits: Tensor
    """[..., V] the backbone's logits."""


class Backbone:
    """A causal LM seen as hidden states and logits.

    Most models are `lm_head(base(x))` bit for bit, so that logits can be computed for chosen positions only. A forward
    over four tokens tests this once a model. Models that scale or cap in between (Cohere, Gemma-2, MiniCPM3) run whole,
    with a hook on the LM head's input during the call.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = text_config(model)
        self.base = model.get_decoder()
        head = model.get_output_embeddings()
        if head is None:
            raise RequestError(f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM")
        self.head: nn.Module = head
        self._seen: list[Tensor] | None = None
        if self.head not in _SPLITS:
            _SPLITS[self.head] = self._splits()
        self.splits = _SPLITS[self.head]

    @property
    def hidden_size(self) -> int:
        return self.head_weight.shape[1]

    @property
    def head_weight(self) -> Tensor:
        """[V, H] the weights of the LM head, which is a Linear or looks like one."""
        return cast("Tensor", self.head.weight)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def context(self) -> int | None:
        """Number of positions that the model was made for; `None` if its config does not give it."""
        return getattr(self.config, "max_position_embeddings", None)

    @cached_property
    def rope_boundary(self) -> int | None:
        """See `longrope_boundary`."""
        return longrope_boundary(self.model)

    @property
    def rereads(self) -> bool:
        """Whether the model's own `generate` reads the whole text again once it passes `rope_boundary`."""
        return self.config.model_type in REREADS

    @property
    def device(self) -> torch.device:
        """The device of the input embeddings; in a sharded model the LM head can be on another device."""
        return cast("Tensor", self.model.get_input_embeddings().weight).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @torch.no_grad()
    def _splits(self) -> bool:
        probe = torch.arange(4, device=self.device)[None] % self.vocab_size
        hidden = getattr(self.base(input_ids=probe, use_cache=False), "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != self.hidden_size:
            return False
        # Bit for bit: a soft cap changes small logits by less than any tolerance would notice.
        return torch.equal(self.head(hidden), self.model(input_ids=probe, use_cache=False).logits)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Apply the LM head to hidden [..., H] of any dtype: [..., V] in the LM head's dtype.

        The model's later caps and scales are left out; they would not change the order of tokens.
        """
        return self.head(hidden.to(self.head_weight.dtype))

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> the input embeddings [..., H], scaled as the model scales them."""
        return self.model.get_input_embeddings()(ids)

    def hidden_states(self, input_ids: Tensor, **kwargs: object) -> Tensor:
        """input_ids [B, T] -> hidden [B, T, H]; `kwargs` go to the model."""
        if self.splits:
            return self.base(input_ids=input_ids, **kwargs).last_hidden_state
        return self._run_whole(input_ids, **kwargs).hidden

    def forward(
        self, input_ids: Tensor, cache: Cache, last: Tensor | None = None, all_hidden: bool = False, **kwargs: object
    ) -> Readout:
        """Run the model on input_ids [B, T] after the tokens in `cache`: hidden [B, T, H] and logits [B, T, V].

        With `last` [B] only position `last[b]` of row b is returned: hidden [B, H] and logits [B, V]. With `all_hidden`
        this applies to the logits only.
        """
        kwargs |= {"past_key_values": cache, "use_cache": True}
        if self.splits:
            hidden = self.base(input_ids=input_ids, **kwargs).last_hidden_state
            read = at(hidden, last)
            return Readout(hidden if all_hidden else read, self.head(read))
        if last is not None and not all_hidden and self.keeps_logits:
            # Only the logits of wanted positions are computed. All rows share the positions, at most one a row.
            kept, last = last.unique(return_inverse=True)
            kwargs["logits_to_keep"] = kept.cpu()  # an index that every device takes
        out = self._run_whole(input_ids, **kwargs)
        return Readout(out.hidden if all_hidden else at(out.hidden, last), at(out.logits, last))

    @cached_property
    def keeps_logits(self) -> bool:
        """Whether the model's forward takes `logits_to_keep`, as models of transformers do."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the LM head's inputs inside this context; without effect for a model that splits."""
        if self.splits or self._seen is not None:
            yield
            return
        seen = self._seen = []
        handle = self.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            yield
        finally:
            handle.remove()
            self._seen = None

    def _run_whole(self, input_ids: Tensor, **kwargs: object) -> Readout:
        if self._seen is None:
            with self.watched():
                return self._run_whole(input_ids, **kwargs)
        logits = self.model(input_ids=input_ids, **kwargs).logits
        hidden = self._seen.pop()
        self._seen.clear()
        return Readout(hidden, logits)


# The result of the test for each living LM head, kept here so that the model is not modified.
_SPLITS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def at(values: Tensor, last: Tensor | None) -> Tensor:
    """values [B, T, ...] -> those at position `last[b]` of row b [B, ...]; all of them without `last`."""
    if last is None:
        return values
    return values[torch.arange(values.shape[0], device=values.device), last.to(values.device)]


def require_tree_support(model: PreTrainedModel) -> None:
    """Raise RequestError with the reason if the model's config shows that it cannot verify a tree in one forward."""
    reason = why_no_tree(model)
    if reason is not None:
        raise RequestError(f"{type(model).__name__} ({text_config(model).model_type}) cannot hold a tree: {reason}")
