"""The choices of `medusa fit`: the heads to train, from a table in the package, each with its reason."""

from __future__ import annotations

from typing import NamedTuple

import yaml

from medusa.commands.fit.options import FitOptions
from medusa.files import ASSETS, Json

KINDS_TABLE = ASSETS / "kinds.yaml"


class HeadsChoice(NamedTuple):
    """Heads to train: their name, their section `heads` in a recipe, and the reason for the choice."""

    name: str
    heads: Json
    reason: str


def choose_heads(options: FitOptions) -> list[HeadsChoice]:
    """Choose the heads to train; the result has one element, or several with --compare."""
    table = yaml.safe_load(KINDS_TABLE.read_text(encoding="utf-8"))
    if options.compare:
        reason = "--compare: the fastest after calibration is kept"
        return [HeadsChoice(kind, {"kind": kind}, reason) for kind in table["compare"]]
    if options.kind is not None and options.purpose == "transformers":
        return [HeadsChoice(options.kind, {"kind": options.kind}, "--kind asks for it")]
    row = table["transformers" if options.purpose == "transformers" else "servers"]
    return [HeadsChoice(row["heads"]["kind"], row["heads"], row["reason"])]
