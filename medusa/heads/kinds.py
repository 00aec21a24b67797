"""The kinds of heads: one file each, and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa.config import MedusaConfig
    from medusa.heads.independent import MedusaHeads

KINDS = {
    "medusa": "medusa.heads.independent:MedusaHeads",  # independent of each other
    "cascade": "medusa.heads.cascade:CascadeHeads",  # each takes what the one before made
    "hydra": "medusa.heads.hydra:HydraHeads",  # each sees the tokens guessed so far
    "recurrent": "medusa.heads.recurrent:RecurrentHeads",  # both
    "eagle": "medusa.heads.eagle:EagleHeads",  # one layer that looks back, for all steps
}


def build(config: MedusaConfig) -> MedusaHeads:
    """Fresh heads of the kind that `config` names."""
    module, _, name = KINDS[config.kind].partition(":")
    kind: type[MedusaHeads] = getattr(import_module(module), name)
    return kind(config)
