"""Beam search and best-first beam search, for `medusa generate --strategy`. Neither search uses a drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from time import perf_counter
from typing import TYPE_CHECKING

from decode.strategies.options import SearchOptions
from medusa.commands.options import CommandOptions, batches
from medusa.errors import RequestError
from medusa.files import Json
from medusa.options import option

if TYPE_CHECKING:
    from decode.texts import Result
    from medusa.commands.models import Opened

SEARCHES = ("beam", "best-first-beam")


class Strategy(SearchOptions):
    strategy: str | None = option(
        None,
        "beam, best-first-beam: search for the most probable text, without a drafter; greedy, sample: decode as usual, "
        "and check that --temperature fits",
        choices=("greedy", "sample", *SEARCHES),
    )

    @property
    def is_search(self) -> bool:
        return self.strategy in SEARCHES

    def check_given(self, names: Sequence[str]) -> None:
        of_search = [name for name in names if name != "strategy"]
        if of_search and not self.is_search:
            raise RequestError(f"--{of_search[0]} belongs to beam search; add --strategy beam or best-first-beam")

    def require_fitting(self, command: CommandOptions, others: dict[str, object]) -> None:
        """Raise RequestError if the strategy does not work with the command's options, or with one of `others`.

        `others` maps names of options to their values. If the strategy is a search, none of the values may be true."""
        settings, models, temperature = command.settings, command.models, command.settings.temperature
        if self.strategy == "greedy" and temperature > 0:
            raise RequestError(f"--strategy greedy needs --temperature 0, and it is {temperature}; leave one out")
        if self.strategy == "sample" and temperature == 0:
            raise RequestError("--strategy sample needs --temperature above 0, such as 1")
        if not self.is_search:
            return
        others = others | {"heads": models.heads, "drafter": models.drafter, "tree": models.tree}
        given = [name for name, value in (others | {"amateur": command.contrasting.amateur}).items() if value]
        changed = [known.name for known in fields(settings) if getattr(settings, known.name) != known.default]
        given += [name for name in changed if name not in ("max_new_tokens", "ignore_eos", "ignore_generation_config")]
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise RequestError(f"--strategy {self.strategy} searches for the most probable text; leave out {flag}")
        if self.strategy == "beam" and self.max_queued is not None:
            raise RequestError("--max-queued belongs to --strategy best-first-beam; leave it out")
        if self.strategy == "best-first-beam" and command.batch_size > 1:
            raise RequestError("--strategy best-first-beam takes one prompt at a time; leave out --batch-size")
        if self.max_queued is not None and self.max_queued < self.num_beams:
            raise RequestError(f"--max-queued is {self.max_queued}; it must be at least --num-beams, {self.num_beams}")


def run(command: CommandOptions, strategy: Strategy, opened: Opened) -> None:
    """Search for the most probable text after each prompt, print the texts, and write the results of --json."""
    output, tokenizer = command.output, opened.loaded.tokenizer
    about = opened.settings.to_dict() | {"backbone": command.models.backbone} | asdict(strategy)
    results, searches, tokens, start = list[Json](), [], 0, perf_counter()
    with output.written(results, lambda: {"settings": about, "results": results}):
        for result, statistics in _search(strategy, opened, command.batch_size):
            content = result.to_json(tokenizer, opened.settings.stop)
            results.append(content | ({"search": statistics} if statistics else {}))
            searches.append(statistics)
            tokens += len(result.new_ids)
            if not output.quiet:
                print(content["text"] if tokenizer is not None else result.new_ids)
    line = f"{tokens} tokens, {tokens / max(perf_counter() - start, 1e-9):.0f} a second"
    if strategy.strategy == "best-first-beam":
        calls, least = (sum(found[key] for found in searches) for key in ("calls", "beam_calls"))
        line += f"; {calls:.0f} hypotheses scored, where beam search scores at least {least:.0f}"
    output.note(line)


def _search(strategy: Strategy, opened: Opened, batch_size: int) -> Iterator[tuple[Result, dict[str, float]]]:
    """Yield the best text after each prompt, with statistics of best-first beam search; `{}` for plain beam search."""
    from decode.bench.methods import transformers_method
    from decode.generation_config import FILE, text_options
    from decode.strategies.best_first_beam import best_first_beam
    from decode.texts import Result

    loaded, settings, beams, penalty = opened.loaded, opened.settings, strategy.num_beams, strategy.length_penalty
    if strategy.strategy == "beam":
        options: dict[str, object] = {"num_beams": beams, "length_penalty": penalty, "early_stopping": "never"}
        method = transformers_method(loaded.model, settings, loaded.tokenizer, **options)
        for batch in batches(opened.prompts, batch_size):
            yield from ((result, {}) for result in method(batch))
        return
    own = {} if settings.ignore_generation_config else text_options(loaded.model.generation_config)
    if own:
        reason = f"{FILE} sets {next(iter(own))}, which best-first-beam does not apply"
        raise RequestError(f"{reason}; add --ignore-generation-config, or use --strategy beam")
    for prompt in opened.prompts:
        start = perf_counter()
        found = best_first_beam(
            loaded.model,
            prompt,
            num_beams=beams,
            max_new_tokens=settings.max_new_tokens,
            length_penalty=penalty,
            eos_token_id=-1 if settings.ignore_eos else None,
            max_queued=strategy.max_queued,
        )
        best = found.hypotheses[0]
        statistics = {"calls": found.calls, "beam_calls": found.beam_calls(beams), "dropped": found.dropped}
        result = Result(prompt, best.ids, finish_reason=best.finish_reason, seconds=perf_counter() - start)
        yield result, statistics | {"log_probability": best.log_probability}
