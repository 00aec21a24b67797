"""The registry of drafters, and the parser of their options.

A new drafter is one file with its config, and a line in `DRAFTERS` (or an entry point of another package)."""

from __future__ import annotations

from dataclasses import MISSING, fields

from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, DrafterLike, require_no_tree
from medusa.errors import RequestError, did_you_mean
from medusa.registry import Registry

DRAFTERS = {
    "heads": "decode.drafters.trained_heads:HeadsDrafterConfig",  # Medusa heads of any kind, on a tree
    "blockwise": "decode.drafters.trained_heads:BlockwiseConfig",  # the same heads on a chain
    "mtp": "decode.drafters.trained_heads:MtpConfig",  # the layer for multi-token prediction that comes with the model
    "model": "decode.drafters.model:DraftModelConfig",  # a small language model
    "ngram": "decode.drafters.ngram:NgramConfig",  # what followed the last n-gram earlier in the text
    "rest": "decode.drafters.retrieval.rest:RestConfig",  # what followed the text's end in other texts
    "lookahead": "decode.drafters.lookahead:LookaheadConfig",  # n-grams of a Jacobi iteration
    "mix": "decode.drafters.mix:MixConfig",  # several of the above
}
REGISTRY = Registry("medusa.drafters", "drafter", DRAFTERS, "decode.drafters.base:DrafterConfig")
"""All drafters by name, with those of other packages (entry-point group `medusa.drafters`)."""


def parse(spec: str) -> DrafterConfig:
    """Parse a drafter's description, such as `ngram:n=3,tokens=8`; raises a `RequestError` if a part of it is wrong."""
    name, _, options = spec.partition(":")
    config: type[DrafterConfig] = REGISTRY.get(name)
    return config(**_options(name, config, options))


def title_of(spec: str) -> str:
    """Return what a page calls a drafter: `mix:nodes=24,heads+ngram:n=5` is `heads and ngram`."""
    return parse(spec).title(spec.partition(":")[0])


def in_words(spec: str, heads: str | None) -> str:
    """Name what drafts: `heads` themselves, a drafter that uses them, or one that does not."""
    if heads is None:
        return f"the drafter {spec}"
    if spec == "heads":
        return f"the heads {heads}"
    try:
        uses = parse(spec).needs_heads
    except RequestError:  # a result of another machine, with a drafter of a package that is not installed here
        uses = True
    return f"the drafter {spec}" + f" (heads {heads})" * uses


def _options(name: str, config: type[DrafterConfig], text: str) -> dict[str, str | int | float]:
    known = {field.name: field for field in fields(config)}  # type: ignore[arg-type]
    allowed = ", ".join(f"{option}=" for option in known) or "none"
    given: dict[str, str | int | float] = {}
    parts = text.split(",") if text else []
    for place, part in enumerate(parts):
        option, equals, value = part.partition("=")
        takes_rest = config.rest is not None and option not in known
        if takes_rest:
            option, value = str(config.rest), ",".join(parts[place:])
        elif place == 0 and config.first is not None and (not equals or (option not in known and "/" in option)):
            option, value = config.first, part
        elif not equals or option not in known:
            near = did_you_mean(option, known)
            if config.first in given:
                near = near or "; options are split at each comma, so a path cannot hold one"
            raise RequestError(f"drafter {name} has no option {part!r}{near}; its options: {allowed}")
        if option in given:
            raise RequestError(f"drafter {name}: {option} is given twice")
        kind = type(known[option].default)
        try:
            given[option] = kind(value) if kind in (int, float) else value
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise RequestError(f"drafter {name}: {option} is {value!r}; it must be a {what}") from None
        if takes_rest:
            break
    missing = [option for option, field in known.items() if field.default is MISSING and option not in given]
    if missing:
        raise RequestError(f"drafter {name} needs {' and '.join(missing)}; its options: {allowed}")
    return given


def drafter_factory(drafter: DrafterLike, context: DrafterContext) -> DrafterFactory:
    """Return the factory of `drafter`; `None` stands for the Medusa heads in `context`.

    Raise a `RequestError` if a model, table or tree is missing, or does not fit the backbone."""
    made = parse(drafter or "heads") if drafter is None or isinstance(drafter, str) else drafter
    if not isinstance(made, DrafterConfig | DrafterFactory):
        raise RequestError(f"{drafter!r} is no drafter; give a name such as {', '.join(REGISTRY)}")
    if isinstance(made, DrafterFactory) or not made.takes_tree:
        require_no_tree(context.tree, context.stop_drafting)  # a factory already has its tree, or needs none
    return made if isinstance(made, DrafterFactory) else made.factory(context)
