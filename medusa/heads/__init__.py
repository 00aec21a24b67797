"""The modules of heads: one class for each kind of heads, and the parts that the kinds share.

A new kind is one file with its class, and a line in `KINDS` (or an entry point of another package). The class answers
all questions about the kind (`medusa.heads.kind`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from medusa.registry import Registry

KINDS = {  # the place of each kind's class; kinds that can be made for every backbone
    "medusa": "medusa.heads.independent:IndependentHeads",  # the heads are independent of each other
    "cascade": "medusa.heads.sequential:CascadeHeads",  # each head reads the output of the previous head
    "hydra": "medusa.heads.sequential:HydraHeads",  # each head reads the tokens that were guessed before its own
    "recurrent": "medusa.heads.sequential:RecurrentHeads",  # each head reads the previous head's output and guess
    "markov": "medusa.heads.markov:MarkovHeads",  # each head reads the hidden state, the root and the token before
    "eagle": "medusa.heads.eagle:EagleHeads",  # one layer with attention to the text, which runs once for each head
    "dflash": "medusa.heads.dflash:DflashHeads",  # layers with attention to the text guess a block in one pass
}
NATIVE = "mtp"  # the kind of a layer that comes with the model, for multi-token prediction
NATIVE_KINDS = {NATIVE: "medusa.heads.mtp:MtpHeads"}
HEADS = Registry("medusa.heads", "kind of heads", KINDS | NATIVE_KINDS, "medusa.heads.independent:MedusaHeads")
"""All kinds of heads, with those of other packages (entry-point group `medusa.heads`)."""


def class_of(kind: object) -> type[Any]:
    """Return the class of a kind of heads, such as `eagle`: a subclass of `MedusaHeads`, whose module needs this one.

    RequestError: there is no such kind, or the package that brings it does not load."""
    return HEADS.get(kind, f"heads.kind is {kind!r}")


def kinds_where(holds: Callable[[type[Any]], bool]) -> list[str]:
    """Return the kinds of heads whose class fulfils a condition."""
    return [kind for kind in HEADS if holds(class_of(kind))]


def kinds_with_setting(name: str, recipe: bool = False) -> list[str]:
    """Return the kinds of heads with an own setting of this name; with `recipe`, one that a recipe may set."""
    return kinds_where(lambda kind: name in kind.setting_names(recipe))
