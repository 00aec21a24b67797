"""The kinds of heads: one file each, and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa.config import MedusaConfig
    from medusa.heads import MedusaHeads

KINDS = {
    "medusa": "medusa.heads:MedusaHeads",  # independent of each other
    "cascade": "medusa.kinds.cascade:CascadeHeads",  # each takes what the one before made
    "hydra": "medusa.kinds.hydra:HydraHeads",  # each sees the tokens guessed so far
    "recurrent": "medusa.kinds.recurrent:RecurrentHeads",  # both
    "eagle": "medusa.kinds.eagle:EagleHeads",  # one layer that looks back, for all steps
}


def build(config: MedusaConfig) -> MedusaHeads:
    """Fresh heads of the kind that `config` names."""
    module, _, name = KINDS[config.kind].partition(":")
    kind: type[MedusaHeads] = getattr(import_module(module), name)
    return kind(config)
