"""Options of contrastive decoding, grammars, beam search and best-first beam search."""

from __future__ import annotations

import math

from medusa.errors import NotCompilableError, OptionError
from medusa.options import Options, count, option, share


class ContrastOptions(Options, kw_only=False):
    """The constants of contrastive decoding; the defaults are those of Li et al. (2022, arXiv 2210.15097)."""

    alpha: float = share(
        0.1, "exclude tokens less probable than A times the most probable token; 0 excludes none", "A", "contrast_alpha"
    )
    beta: float | None = option(
        None,
        "score tokens by (1 + B) times the backbone's log-probability less B times the amateur's (default: by their "
        "difference)",
        "0 or above",
        lambda value: 0 <= value < math.inf,
        "B",
        name="contrast_beta",
        type=float,
    )
    temperature: float = option(
        1.0,
        "divide the amateur's logits by T; below 1 its first choices count more against a token",
        "above 0",
        lambda value: 0 < value < math.inf,
        "T",
        name="amateur_temperature",
    )


def require_uncontrasted(compile: bool, amateur: object) -> None:
    """Raise a `RequestError` if contrastive decoding is requested with compiled steps."""
    if compile and amateur is not None:
        raise NotCompilableError("a step of contrastive decoding runs two models")


def require_no_compiled_grammar(compile: bool, ignore_eos: bool) -> None:
    """Raise a `RequestError` if a text of a grammar is requested with compiled steps, or without an end."""
    if compile:
        raise NotCompilableError("a grammar reads the text on the CPU")
    if ignore_eos:
        raise OptionError("ignore_eos", "has no effect on a grammar, at whose end the text ends; leave it out")


class SearchOptions(Options):
    """Options of beam search and best-first beam search."""

    num_beams: int = count(4, "keep K hypotheses of each length", "K")
    length_penalty: float = option(
        0.0, "rank beams by log-probability over length to the power P; transformers' own default is 1", metavar="P"
    )
    max_queued: int | None = count(None, "best-first-beam: keep at most N hypotheses in the queue (default: all)")
