"""Who can guess ahead: one file each, and one line here."""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

from decode.draft import DrafterConfig, DrafterContext, DrafterFactory
from medusa.errors import RequestError

DRAFTERS = {
    "heads": "decode.drafters.trained_heads:HeadsDrafterConfig",  # Medusa heads of any kind, on a tree
    "blockwise": "decode.drafters.blockwise:BlockwiseConfig",  # heads on a chain
    "model": "decode.drafters.model:DraftModelConfig",  # a small language model
    "ngram": "decode.drafters.ngram:NgramConfig",  # what followed the last words where they stood before
    "rest": "decode.drafters.retrieval.rest:RestConfig",  # what followed them in a datastore of other texts
    "lookahead": "decode.drafters.lookahead:LookaheadConfig",  # n-grams of its own Jacobi iteration
    "mix": "decode.drafters.mix:MixConfig",  # several of these
}
DrafterLike = DrafterFactory | DrafterConfig | str | None


def parse(spec: str) -> DrafterConfig:
    """`NAME[:option,option=value,...]` -> the plan.

    Raises:
        RequestError: no such drafter or option, or a value that it cannot take."""
    name, _, rest = spec.partition(":")
    if name not in DRAFTERS:
        raise RequestError(f"there is no drafter {name!r}; choose one of {', '.join(DRAFTERS)}")
    module, _, kind = DRAFTERS[name].partition(":")
    plan: type[DrafterConfig] = getattr(import_module(module), kind)
    return plan(**_options(name, plan, rest))


def _options(name: str, plan: type[DrafterConfig], text: str) -> dict[str, Any]:
    known = {field.name: field for field in fields(plan)}  # type: ignore[arg-type]
    allowed = ", ".join(f"{option}=" for option in known) or "none"
    given: dict[str, Any] = {}
    parts = text.split(",") if text else []
    for place, part in enumerate(parts):
        option, equals, value = part.partition("=")
        takes_rest = plan.rest is not None and option not in known
        if takes_rest:
            option, value = str(plan.rest), ",".join(parts[place:])
        elif not equals and place == 0 and plan.first is not None:
            option, value = plan.first, part
        elif not equals or option not in known:
            raise RequestError(f"drafter {name} has no option {part!r}; its options: {allowed}")
        if option in given:
            raise RequestError(f"drafter {name}: {option} is given twice")
        given[option] = _value(name, option, value, type(known[option].default))
        if takes_rest:
            break
    missing = [option for option, field in known.items() if field.default is MISSING and option not in given]
    if missing:
        raise RequestError(f"drafter {name} needs {' and '.join(missing)}; its options: {allowed}")
    return given


def _value(name: str, option: str, value: str, kind: type) -> Any:
    if kind not in (int, float):
        return value
    try:
        return kind(value)
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise RequestError(f"drafter {name}: {option} is {value!r}; it must be a {what}") from None


def drafter_factory(drafter: DrafterLike, materials: DrafterContext) -> DrafterFactory:
    """By default the heads.

    Raises:
        RequestError: no such drafter, or what it needs is missing or does not fit."""
    if isinstance(drafter, DrafterFactory):
        require_no_tree(materials.tree, materials.stop_drafting)  # it has one, or needs none
        return drafter
    plan = parse(drafter or "heads") if drafter is None or isinstance(drafter, str) else drafter
    if not isinstance(plan, DrafterConfig):
        raise RequestError(f"{drafter!r} is no drafter; give a name such as {', '.join(DRAFTERS)}")
    return plan.source(materials)


def require_no_tree(tree: Any, stop_drafting: float) -> None:
    """Raises:
    RequestError: a tree, or where it stops, is given to a drafter that has a shape of its own."""
    if stop_drafting:
        raise RequestError("stop-drafting is for dynamic trees of heads; this drafter has options of its own")
    if tree is not None:
        raise RequestError("a tree lays out what heads guess, and this drafter has options of its own; leave it out")


def require_at_least(least: int, name: str, /, **options: int) -> None:
    """Raises:
    RequestError: an option of drafter `name` is smaller than `least`."""
    for option, value in options.items():
        if value < least:
            raise RequestError(f"drafter {name}: {option} is {value}; it must be at least {least}")
