"""The figures that a model card quotes, as pydantic models: a file that lacks one is refused by the figure's name."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from medusa.errors import RequestError
from medusa.files import Json


class Rate(BaseModel):
    """Tokens per second of a method: the median, the slowest and the fastest round."""

    median: float
    min: float
    max: float


class Method(BaseModel):
    """What a benchmark measured of one method."""

    tokens_per_second: Rate
    tau: float
    speedup_vs_generate: float
    speedup_vs_generate_interval: tuple[float, float] | None = None
    equal_to_plain: float | None = None
    accepted_by_depth: list[float] | None = None


class Heads(Method):
    """The same of the heads, whose texts were compared with those of plain decoding."""

    equal_to_plain: float


class Settings(BaseModel):
    """The settings of a benchmark."""

    prompts: Any
    max_new_tokens: Any
    temperature: float
    acceptance: str
    backbone: Any
    heads: Any
    date: str | None = None


class Methods(BaseModel, extra="allow"):
    """The methods of a benchmark. Others than these two are allowed."""

    __pydantic_extra__: dict[str, Method]
    transformers: Method
    medusa: Heads


class Benchmark(BaseModel):
    """The content of a file that `medusa benchmark --json` wrote."""

    machine: Json
    settings: Settings
    methods: Methods


class Point(BaseModel):
    """A tree that a calibration measured."""

    nodes: int
    tau: float
    step_ms: float
    dynamic: bool


class Situation(BaseModel, extra="allow"):
    """The machine and the settings that a calibration holds for."""

    batch_size: int
    temperature: float


class Calibration(BaseModel):
    """An entry of `calibration.json`."""

    points: list[Point]
    chosen: int
    holds_for: Situation


class Recipe(BaseModel):
    """The recipe of a training run, as `provenance.json` quotes it."""

    data: Json | None = None
    training: Json | None = None


class Provenance(BaseModel):
    """The content of `provenance.json`."""

    command: str | None = None
    config: Recipe | None = None
    data: Json | None = None
    result: Json | None = None
    tree: Json | None = None
    versions: Json | None = None


def require_figures(kind: type[BaseModel], content: Json, file: str) -> None:
    """Raise RequestError if the content of `file` lacks a figure of `kind`, or holds another value in its place."""
    try:
        kind.model_validate(content)
    except ValidationError as refusal:
        error = refusal.errors(include_url=False)[0]
        path = ".".join(map(str, error["loc"]))
        found = "is missing" if error["type"] == "missing" else f"is {error['input']!r}"
        raise RequestError(f"{file}: {path} {found}, and the model card quotes it; make that file again") from None
