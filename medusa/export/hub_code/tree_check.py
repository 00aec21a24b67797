"""The check that a model can hold a tree, by its config and by numbers."""

from __future__ import annotations

import weakref

import torch
from transformers import DynamicCache, PreTrainedModel

from medusa.tree_support import text_config, why_no_tree

from .decoding import tree_forward
from .heads import CandidateTree
from .support import require

# The reason why each living model cannot hold a tree, or None.
_REASONS: weakref.WeakKeyDictionary[PreTrainedModel, dict[object, str | None]] = weakref.WeakKeyDictionary()


def require_tree_support(model: PreTrainedModel) -> None:
    """Raise ValueError if a forward over a tree does not give what plain forwards give; tested once a model."""
    known = _REASONS.setdefault(model, {})
    key = (model.dtype, model.device, model.training, getattr(text_config(model), "_attn_implementation", None))
    if key not in known:
        known[key] = _reason(model)
    require(known[key] is None, f"{type(model).__name__} cannot hold a tree: {known[key]}")


def _reason(model: PreTrainedModel) -> str | None:
    """The reason by the model's config, else by the logits of a small tree."""
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
    """The difference of a small tree's logits from those of plain forwards along its paths, relative to the largest."""
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
    # In half precision, rounding sends a token to another expert now and then; a wrong mask spares two nodes of five.
    return float(errors.max() if model.dtype in (torch.float32, torch.float64) else errors.median())
