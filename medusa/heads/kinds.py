"""The kinds of heads: one file each, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

KINDS = {
    "medusa": "medusa.heads.independent:MedusaHeads",  # independent of each other
    "cascade": "medusa.heads.cascade:CascadeHeads",  # each reads the output of the head before
    "hydra": "medusa.heads.hydra:HydraHeads",  # each reads the tokens guessed so far
    "recurrent": "medusa.heads.recurrent:RecurrentHeads",  # each reads both
    "eagle": "medusa.heads.eagle:EagleHeads",  # one layer with attention to the text, run once a head
}


def class_of(kind: str) -> Callable[..., nn.Module]:
    """The class of a kind of heads; it takes a `MedusaConfig`."""
    module, _, name = KINDS[kind].partition(":")
    found: Callable[..., nn.Module] = getattr(import_module(module), name)
    return found
