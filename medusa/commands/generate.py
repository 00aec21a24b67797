"""Generate text with heads or another drafter: the same output as without a drafter, faster.

  medusa generate demo "Once upon a time"
  medusa generate org/heads --prompts questions.jsonl --json out.json
  medusa generate --backbone org/model --drafter ngram --prompts own.jsonl
  medusa generate org/heads --prompts own.jsonl --record recorded

HEADS may be left out with --plain, --drafter ngram or --strategy, which need --backbone. --record saves the texts with
their hidden states, to train heads on them later. --amateur decodes contrastively. docs/drafters.md describes
drafters and strategies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.commands import search
from medusa.commands.options import CommandOptions, Prompts, batches
from medusa.commands.speed import speed_line, warn_if_useless
from medusa.commands.structured import Structured
from medusa.errors import NotCompilableError, RequestError
from medusa.files import disk_may_fill, readable, require_writable_folder
from medusa.options import group, option

if TYPE_CHECKING:
    from decode.texts import Result
    from medusa.commands.models import Opened
    from train.features.recorder import Recorder


class GenerateOptions(CommandOptions):
    shown = "heads prompt prompts max-new-tokens temperature top-p tree drafter plain record backbone dtype json quiet"
    by_position = ("heads", "prompt...")
    prompts: Prompts = group(Prompts, "prompts")
    strategy: search.Strategy = group(search.Strategy, "strategy (docs/drafters.md)")
    structured: Structured = group(Structured, "structured output (docs/drafters.md)")
    plain: bool = option(False, "decode without a drafter: one token per step")
    record: str | None = option(
        None,
        "add texts and hidden states to this folder, for medusa train",
        metavar="DIR",
        brief="save texts and hidden states here, for training",
    )

    @classmethod
    def filled_by_position(cls, given: Collection[str]) -> Sequence[str]:
        """Return what words without `--` fill: heads, then prompts; only prompts if the backbone decodes alone."""
        without_heads = "backbone" in given and not {"plain", "drafter", "strategy"}.isdisjoint(given)
        return ["prompt..."] if without_heads or "heads" in given else ["heads", "prompt..."]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.record is not None:
            require_writable_folder(self.record, option="--record")
            if self.settings.compile:
                raise NotCompilableError("--record needs the hidden states of eager steps")
        self.structured.require_fitting(self.settings)
        without: dict[str, object] = {
            "plain": self.plain,
            "record": self.record,
            "json_schema": self.structured.json_schema,
        }
        self.strategy.require_fitting(self, without | {"grammar": self.structured.grammar})
        if self.models.heads is None and self.models.drafter is None and not (self.plain or self.strategy.is_search):
            raise RequestError("there are no heads; give --heads H, --drafter ngram, or --plain to decode without them")


def run(options: GenerateOptions) -> None:
    from decode.texts import end_of_context, tau
    from medusa.commands import models

    if options.record is not None:
        from train.features.files import require_features_or_new

        require_features_or_new(Path(options.record))  # before the backbone is loaded
    drafts = not options.plain and not options.strategy.is_search
    opened = models.open_models(
        options,
        options.prompts.read(),
        [options.models.drafter] if drafts else [],
        skip_long=options.prompts.skip_long,
    )
    if options.strategy.is_search:
        search.run(options, options.strategy, opened)
        return
    opened.structure(options.structured, "a grammar")
    results: list[Result] = []
    with (
        options.output.written(results, lambda: models.results_json(options, opened, results)),
        _recording(options, options.record, opened) if options.record is not None else nullcontext() as recorder,
    ):
        _generate(options, opened, recorder, results)
    tokens, per_step = sum(len(result.new_ids) for result in results), tau(results)
    seconds = sum(result.seconds for result in results[:: options.batch_size])  # every result has its batch's time
    options.output.note(speed_line(tokens, seconds, per_step))
    if (ended := end_of_context(results, opened.settings.max_new_tokens)) is not None:
        options.output.note(ended)
    if opened.source is not None and opened.source.heads is not None and not options.output.quiet:
        warn_if_useless(tokens, per_step, opened.source.num_nodes, len(results))


def _generate(options: GenerateOptions, opened: Opened, recorder: Recorder | None, results: list[Result]) -> None:
    """Decode all prompts, print the texts, and append their results to `results`.

    The texts and their hidden states are added to the recorder, if there is one."""
    from decode.texts import prompt_seeds
    from medusa.records.pieces import TextStream, joined, text_of

    settings, tokenizer, shown = opened.settings, opened.loaded.tokenizer, not options.output.quiet
    write = replace(opened.generator, keep_hidden=recorder is not None)
    for batch in batches(opened.prompts, options.batch_size):
        stream = TextStream(tokenizer, settings.stop) if shown and tokenizer and len(batch) == 1 else None
        seeds = prompt_seeds(options.runtime.seed, range(len(results), len(results) + len(batch)))
        decoding = write.start(batch, seeds)
        for step in decoding:
            if stream:
                print(joined(stream.step(step.ids[0])), end="", flush=True)
        if stream:
            print(joined(stream.end()))
        new = decoding.results
        del decoding  # frees its caches before the next batch
        results += new
        for result in new:
            if shown and not stream:
                print(text_of(result.new_ids, tokenizer, settings.stop) if tokenizer else result.new_ids)
            if recorder is not None and result.hidden is not None:
                recorder.add(result.input_ids + result.new_ids, result.hidden, len(result.input_ids))
                result.hidden = None  # frees memory


@contextmanager
def _recording(options: GenerateOptions, folder: str, opened: Opened) -> Iterator[Recorder]:
    """Yield a recorder that writes the recorded texts to `folder` at the end, even after an error or Ctrl-C."""
    from medusa.backbone import Backbone
    from medusa.fingerprint import fingerprint
    from train.features.recorder import Recorder

    loaded, prompts = opened.loaded, opened.prompts
    backbone, known = Backbone(loaded.model), fingerprint(loaded.model, loaded.name, loaded.revision)
    form = opened.form.of_most(opened.records), opened.form.options
    recorder = Recorder(Path(folder), known, backbone.hidden_size, backbone.dtype, *form)
    recorder.require_space(sum(map(len, prompts)) + len(prompts) * opened.settings.max_new_tokens)
    with disk_may_fill(recorder.folder, lambda: "earlier recordings are complete: make room, or change --record"):
        try:
            yield recorder
        finally:
            recorder.flush()
    size = readable(recorder.size(recorder.tokens))
    options.output.note(f"recorded in {recorder.folder}: {recorder.texts} texts, {recorder.tokens:,} tokens, {size}")
