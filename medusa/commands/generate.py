"""Generate text with heads or another drafter: the same output as normal decoding, faster.

  medusa generate --backbone demo --heads demo --prompt "Once upon a time"
  medusa generate --backbone org/model --heads org/heads --prompts questions.jsonl --json out.json
  medusa generate --backbone org/model --drafter ngram --prompts questions.jsonl
  medusa generate --backbone org/model --heads org/heads --prompts questions.jsonl --amateur org/small
  medusa generate --backbone org/model --heads org/heads --prompts questions.jsonl --record recorded
  medusa generate --backbone org/model --strategy best-first-beam --prompts questions.jsonl

--amateur decodes contrastively. --record saves the texts with their hidden states, to train heads on them later.
docs/drafters.md describes the drafters, docs/strategies.md the strategies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.commands import search
from medusa.commands.options import CommandOptions, Prompts, batches, speed_line, warn_if_useless
from medusa.errors import RequestError
from medusa.files import disk_may_fill, readable
from medusa.options import group, option

if TYPE_CHECKING:
    from transformers import TextStreamer

    from decode.drafters.base import DrafterFactory
    from decode.results import Result
    from medusa.commands.models import Opened
    from train.features.recorder import Recorder


class GenerateOptions(CommandOptions):
    """Options of `medusa generate`."""

    prompts: Prompts = group(Prompts, "prompts")
    strategy: search.Strategy = group(search.Strategy, "strategy (docs/strategies.md)")
    plain: bool = option(False, "decode without a drafter: one token per step")
    record: str | None = option(
        None, "save the texts and their hidden states in this folder, as data for medusa train", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategy.require_fitting(self, {"plain": self.plain, "record": self.record})
        if self.models.heads is None and self.models.drafter is None and not (self.plain or self.strategy.is_search):
            raise RequestError("there are no heads; give --heads H, --drafter ngram, or --plain to decode without them")


def run(options: GenerateOptions) -> None:
    from decode.results import tau
    from medusa.commands import models

    drafts = not options.plain and not options.strategy.is_search
    opened = models.open_models(options, options.prompts.read(), [options.models.drafter] if drafts else [])
    settings, tokenizer = opened.settings, opened.loaded.tokenizer
    if settings.stop:
        models.require_tokenizer(opened.loaded, "--stop")
    if options.strategy.is_search:
        search.run(options, options.strategy, opened)
        return
    source = next(iter(opened.drafters), None)
    results: list[Result] = []
    with _recording(options, opened) as recorder:
        seconds = _generate(options, opened, source, recorder, results)
    tokens, per_step = sum(len(result.new_ids) for result in results), tau(results)
    options.output.note(speed_line(tokens, seconds, per_step))
    if source is not None and source.heads is not None and not options.output.quiet:
        warn_if_useless(tokens, per_step)
    about = models.settings_json(options, settings, source)
    options.output.write({"settings": about, "results": [r.to_json(tokenizer, settings.stop) for r in results]})


def _generate(
    options: GenerateOptions,
    opened: Opened,
    source: DrafterFactory | None,
    recorder: Recorder | None,
    results: list[Result],
) -> float:
    """Decode all prompts, print the texts, record them if asked, fill `results`, and return the seconds of decoding."""
    from transformers import TextStreamer

    from decode.bench.methods import DrafterMethod
    from decode.results import prompt_seeds, text_of

    loaded, settings, prompts, _ = opened
    tokenizer, seconds, shown = loaded.tokenizer, 0.0, not options.output.quiet
    method = DrafterMethod(loaded.model, source, settings, tokenizer, keep_hidden=recorder is not None)
    streams = shown and options.batch_size == 1 and not settings.stop
    for batch in batches(prompts, options.batch_size):
        streamer = TextStreamer(tokenizer, skip_special_tokens=True) if streams and tokenizer is not None else None
        seeds = prompt_seeds(options.runtime.seed, range(len(results), len(results) + len(batch)))
        new = method(batch, None if streamer is None else partial(_stream, streamer), seeds)
        seconds += new[-1].seconds  # every result holds the time of the whole batch
        results += new
        if streamer is not None:
            streamer.end()
        for result in new:
            if shown and streamer is None:
                print(text_of(result.new_ids, tokenizer, settings.stop) if tokenizer else result.new_ids)
            if recorder is not None and result.hidden is not None:
                recorder.add(result.input_ids + result.new_ids, result.hidden, len(result.input_ids))
                result.hidden = None  # frees memory
    return seconds


def _stream(streamer: TextStreamer, row: int, ids: list[int]) -> None:
    """Pass the tokens of a decoding step to a `TextStreamer`, one per call, because the streamer accepts only one."""
    import torch

    for token in ids:
        streamer.put(torch.tensor([token]))


@contextlib.contextmanager
def _recording(options: GenerateOptions, opened: Opened) -> Iterator[Recorder | None]:
    """Yield the recorder of --record, if given, and write its texts to disk at the end, even after an error or Ctrl-C.

    Raises:
        RequestError: the folder holds other files or another backbone's hidden states, or its disk is too small."""
    if options.record is None:
        yield None
        return
    from medusa.backbone import Backbone
    from medusa.fingerprint import fingerprint
    from train.features.recorder import Recorder

    loaded, prompts = opened.loaded, opened.prompts
    backbone, known = Backbone(loaded.model), fingerprint(loaded.model, loaded.name, loaded.revision)
    recorder = Recorder(Path(options.record), known, backbone.hidden_size, backbone.dtype)
    recorder.require_space(sum(map(len, prompts)) + len(prompts) * opened.settings.max_new_tokens)
    with disk_may_fill(
        recorder.folder, lambda: "earlier recordings are complete: make room, or choose another folder for --record"
    ):
        try:
            yield recorder
        finally:
            recorder.flush()
    size = readable(recorder.size(recorder.tokens))
    options.output.note(f"recorded in {recorder.folder}: {recorder.texts} texts, {recorder.tokens:,} tokens, {size}")
