"""The modules of heads: one class for each kind of heads, and the parts that the kinds share."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

KINDS = {  # the module and the class of each kind of heads
    "medusa": "independent:MedusaHeads",  # the heads are independent of each other
    "cascade": "sequential:CascadeHeads",  # each head reads the output of the previous head
    "hydra": "sequential:HydraHeads",  # each head reads the tokens that were guessed before its own
    "recurrent": "sequential:RecurrentHeads",  # each head reads the previous head's output and guess
    "markov": "markov:MarkovHeads",  # each head reads the hidden state, the root and the token before its guess
    "eagle": "eagle:EagleHeads",  # one layer with attention to the text, which runs once for each head
}
NATIVE = "mtp"  # the kind of a layer that comes with the model, for multi-token prediction
NATIVE_KINDS = {NATIVE: "mtp:MtpHeads"}  # as `KINDS`, for heads that cannot be made from sizes alone


def class_of(kind: str) -> Callable[..., nn.Module]:
    """Return the class of a kind of heads, such as `eagle`. Its constructor takes a `MedusaConfig`."""
    found: Callable[..., nn.Module] = resolve_name(f"medusa.heads.{(KINDS | NATIVE_KINDS)[kind]}")
    return found
