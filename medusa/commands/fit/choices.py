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


def choose_heads(options: FitOptions, parameters: int, on_gpu: bool) -> list[HeadsChoice]:
    """Choose the heads to train for a model with this number of parameters, on a GPU or a CPU.

    The result has one element, or several with --compare."""
    table = yaml.safe_load(KINDS_TABLE.read_text(encoding="utf-8"))
    if options.compare:
        reason = "--compare: the fastest after calibration is kept"
        return [HeadsChoice(kind, {"kind": kind}, reason) for kind in table["compare"]]
    if options.kind is not None and options.purpose == "transformers":
        return [HeadsChoice(options.kind, {"kind": options.kind}, "--kind asks for it")]
    situation = {"for": options.purpose, "device": "gpu" if on_gpu else "cpu"}
    row = next(row for row in table["choices"] if _holds(row, situation, parameters))
    return [HeadsChoice(row["heads"]["kind"], row["heads"], row["reason"])]


def _holds(row: Json, situation: dict[str, str], parameters: int) -> bool:
    """Whether the conditions of a table's row hold; a row without a condition holds for every value."""
    return (
        situation["for"] in row.get("for", ["transformers"])
        and row.get("device", situation["device"]) == situation["device"]
        and row.get("from", 0) <= parameters < row.get("below", float("inf"))
    )
