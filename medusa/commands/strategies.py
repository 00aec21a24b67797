"""Beam search and best-first beam search for `medusa generate --strategy`: no drafter can take part in a search."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from medusa.commands import common
from medusa.errors import RequestError

if TYPE_CHECKING:
    from decode.settings import Settings
    from medusa.loading import Loaded

BEAMS = ("beam", "best-first-beam")
STRATEGIES = ("greedy", "sample", *BEAMS)
# What a search has no use for: of these options any value but the default is refused.
DEFAULTS: dict[str, Any] = {
    "heads": None,
    "drafter": None,
    "plain": False,
    "amateur": None,
    "record": None,
    "tree": None,
    "acceptance": None,
    "draft": "topk",
    "stop_drafting": 0.0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop": [],
    "compile": False,
}


@dataclass(frozen=True)
class Beams:
    """A search as it was asked for."""

    strategy: str
    num_beams: int = 4
    length_penalty: float = 0.0
    max_queued: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("strategy (docs/strategies.md)")
    group.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="greedy and sample are what --temperature says; beam and best-first-beam search, without any drafter",
    )
    group.add_argument("--num-beams", type=common.positive, metavar="K", help="beginnings of a length (default: 4)")
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="P",
        help="beams by log-probability over length to this power (default: 0; transformers' own default is 1)",
    )
    group.add_argument(
        "--max-queued",
        type=common.positive,
        metavar="N",
        help="best-first-beam: beginnings that may wait (default: all)",
    )


def beams_of(args: argparse.Namespace) -> Beams | None:
    """The search asked for; `None` where texts are written token by token. Called before any model is loaded.

    Raises:
        RequestError: options that do not belong together."""
    given = {name: getattr(args, name) for name in ("num_beams", "length_penalty", "max_queued")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.strategy not in BEAMS:
        for name in given:
            raise RequestError(f"{_option(name)} belongs to beam search; give --strategy beam or best-first-beam")
        if args.strategy == "greedy" and args.temperature > 0:
            raise RequestError(
                f"--strategy greedy draws nothing, and --temperature is {args.temperature}; leave one out"
            )
        if args.strategy == "sample" and args.temperature == 0:
            raise RequestError("--strategy sample needs --temperature above 0, such as 1")
        return None
    for name, default in DEFAULTS.items():
        if getattr(args, name) != default:
            raise RequestError(
                f"--strategy {args.strategy} searches for the most probable text; leave out {_option(name)}"
            )
    if args.strategy == "beam" and args.max_queued is not None:
        raise RequestError("--max-queued belongs to --strategy best-first-beam; leave it out")
    if args.strategy == "best-first-beam" and args.batch_size > 1:
        raise RequestError("--strategy best-first-beam takes one prompt at a time; leave out --batch-size")
    beams = Beams(args.strategy, **given)
    if beams.max_queued is not None and beams.max_queued < beams.num_beams:
        raise RequestError(f"--max-queued is {beams.max_queued}; it must be at least --num-beams, {beams.num_beams}")
    return beams


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace, beams: Beams, loaded: Loaded, prompts: list[list[int]], settings: Settings) -> None:
    """Search, print the texts, and write `--json`."""
    search = _best_first if beams.strategy == "best-first-beam" else _beam
    results, seconds = [], perf_counter()
    for result in search(args, beams, loaded, prompts, settings):
        results.append(result)
        if not args.quiet:
            print(result["text"] if loaded.tokenizer is not None else result["new_ids"])
    seconds = perf_counter() - seconds
    if not args.quiet:
        tokens = sum(len(result["new_ids"]) for result in results)
        line = f"{tokens} tokens, {tokens / max(seconds, 1e-9):.0f} a second"
        if beams.strategy == "best-first-beam":
            calls, least = (sum(result["search"][name] for result in results) for name in ("calls", "beam_calls"))
            line += f"; {calls} beginnings scored, where beam search scores {least} or more"
        print(line, file=sys.stderr)
    about = settings.to_dict() | {"backbone": args.backbone, **asdict(beams)}
    common.write_results(args, {"settings": about, "results": results})


def _beam(args: argparse.Namespace, beams: Beams, loaded: Loaded, prompts: list[list[int]], settings: Settings) -> Any:
    """transformers' own, which stops no sooner than nothing better can come."""
    from decode.bench.methods import transformers_method

    options = {"num_beams": beams.num_beams, "length_penalty": beams.length_penalty, "early_stopping": "never"}
    method = transformers_method(loaded.model, settings, loaded.tokenizer, **options)
    for batch in common.batches(prompts, args.batch_size):
        yield from (result.to_json(loaded.tokenizer) for result in method(batch))


def _best_first(
    args: argparse.Namespace, beams: Beams, loaded: Loaded, prompts: list[list[int]], settings: Settings
) -> Any:
    from decode.results import Result
    from decode.strategies.best_first_beam import best_first_beam

    for prompt in prompts:
        start = perf_counter()
        found = best_first_beam(
            loaded.model,
            prompt,
            num_beams=beams.num_beams,
            max_new_tokens=settings.max_new_tokens,
            length_penalty=beams.length_penalty,
            eos_token_id=-1 if settings.ignore_eos else None,
            max_queued=beams.max_queued,
        )
        best = found.hypotheses[0]
        result = Result(prompt, best.ids, finish_reason=best.finish_reason, seconds=perf_counter() - start)
        cost = {"calls": found.calls, "beam_calls": found.beam_calls(beams.num_beams), "dropped": found.dropped}
        yield result.to_json(loaded.tokenizer) | {"search": cost | {"log_probability": best.log_probability}}
