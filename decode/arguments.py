"""Checks of the arguments of the public functions: token ids, masks, and what transformers drops."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from medusa.errors import RequestError


def require_model(model: object) -> None:
    """Raise a `RequestError` unless `model` is a loaded model."""
    if not isinstance(model, nn.Module):
        way = 'load one, as with AutoModelForCausalLM.from_pretrained("org/model")'
        raise RequestError(f"model is {_shown(model)}, not a model; {way}")


def require_batch(ids: object, name: str = "input_ids") -> Tensor:
    """Return `ids`, the argument `name`, if they are token ids [B, T]; raise a `RequestError` for anything else."""
    if not isinstance(ids, Tensor) and hasattr(ids, "keys"):  # what a tokenizer returns
        raise RequestError(f"{name} is a {type(ids).__name__}; pass its tensors: **inputs, or {name}=inputs.input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.dtype in (torch.int64, torch.int32):
        return ids
    way = "encode it with the tokenizer" if isinstance(ids, str) else "torch.tensor([ids]) makes one of one prompt"
    raise RequestError(f"{name} is {_shown(ids)}; give a LongTensor of shape (batch, length); {way}")


def require_mask(mask: object, ids: Tensor, name: str = "attention_mask") -> None:
    """Raise a `RequestError` unless `mask` has the shape of the token ids [B, T] and no row is padded on the right."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise RequestError(f"{name} is {_shown(mask)}; give a tensor of the shape of input_ids, {tuple(ids.shape)}")
    kept = mask.bool()
    _refuse_right_padding(kept.any(1) & ~kept[:, -1:].any(1), f"{name} hides the end of row")


def require_no_pads(ids: Tensor, pad: object) -> None:
    """Raise a `RequestError` if a batch [B, T] without a mask seems to be padded on the right with the id `pad`.

    The longest row has no padding, so rows that all end with the id are not padded."""
    if ids.shape[1] == 0 or not isinstance(pad, int):
        return
    ends = ids[:, -1] == pad
    if not ends.all():
        found, more = f"there is no attention_mask, and the pad token {pad} ends row", ", and pass the attention_mask"
        _refuse_right_padding(ends, found, more)


def _refuse_right_padding(rows: Tensor, found: str, more: str = "") -> None:
    """Raise a `RequestError` if one of the `rows` [B] is true; `found` tells what is wrong in the row."""
    if rows.any():
        way = f'pad on the left (tokenizer.padding_side = "left"){more}'
        raise RequestError(f"the prompts are padded on the right: {found} {int(rows.nonzero()[0])}; {way}")


def require_nothing_dropped() -> None:
    """Raise a `RequestError` if `model.generate`, the caller's caller, got an argument that it does not pass on.

    transformers passes no `streamer` and no `assistant_model` to a custom decoding method, and says nothing. So this
    function reads the local variables of its frame."""
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != "transformers.generation.utils":
        return
    for name, way in (
        ("streamer", "pass medusa_streamer=, or use decode.generate, which takes a streamer"),
        ("assistant_model", 'leave it out, or use decode.generate with drafter="model:NAME"'),
    ):
        if caller.f_locals.get(name) is not None:
            raise RequestError(f"transformers passes no {name} to custom_generate; {way}")


def _shown(value: Any) -> str:
    """Describe a value in a few words: a tensor by shape and dtype, other values as Python shows them, cut."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
