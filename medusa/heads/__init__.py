"""The kinds of heads, and the parts that kinds share."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

KINDS = {
    "medusa": "independent:MedusaHeads",  # independent of each other
    "cascade": "sequential:CascadeHeads",  # each reads the output of the head before
    "hydra": "sequential:HydraHeads",  # each reads the tokens guessed so far
    "recurrent": "sequential:RecurrentHeads",  # each reads both
    "eagle": "eagle:EagleHeads",  # one layer with attention to the text, run once a head
}
"""The module and the class of each kind."""


def class_of(kind: str) -> Callable[..., nn.Module]:
    """The class of a kind of heads; its constructor takes a `MedusaConfig`."""
    found: Callable[..., nn.Module] = resolve_name(f"medusa.heads.{KINDS[kind]}")
    return found
