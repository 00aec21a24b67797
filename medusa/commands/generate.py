"""Generate text with heads or another drafter: the same text as without, faster.

medusa generate --backbone demo --heads demo --prompt "Once upon a time"
medusa generate --backbone org/model --heads org/heads --prompts questions.jsonl --json out.json
medusa generate --backbone org/model --drafter ngram --prompts questions.jsonl   # see docs/drafters.md
medusa generate --backbone org/model --heads org/heads --amateur org/small --prompts questions.jsonl   # contrastive
medusa generate --backbone org/model --heads org/heads --prompts questions.jsonl --record used   # to train on later
medusa generate --backbone org/model --strategy best-first-beam --prompts questions.jsonl   # see docs/strategies.md
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.commands import search
from medusa.commands.arguments import group
from medusa.commands.options import CommandOptions, Prompts, batches, speed_line, warn_if_useless
from medusa.errors import RequestError
from medusa.options import option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from decode.results import Result
    from medusa.commands.models import Opened
    from train.features.files import Recorder


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CommandOptions):
    """Options of `medusa generate`."""

    prompts: Prompts = group(Prompts, "prompts")
    strategy: search.Strategy = group(search.Strategy, "strategy (docs/strategies.md)")
    plain: bool = option(False, "decode without a drafter: one token a step")
    record: str | None = option(
        None, "add the texts and their hidden states to this folder, for `medusa train`", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategy.require_fitting(self, {"plain": self.plain, "record": self.record})
        if self.models.heads is None and self.models.drafter is None and not (self.plain or self.strategy.is_search):
            raise RequestError("there are no heads; give --heads H, --drafter ngram, or --plain to decode without them")


def run(options: GenerateOptions) -> None:
    from decode.bench.methods import medusa_method, plain_method
    from decode.results import prompt_seeds, tau
    from medusa.commands import models

    drafts = not options.plain and not options.strategy.is_search
    opened = models.open_models(options, options.prompts.read(), [options.models.drafter] if drafts else [])
    model, tokenizer, settings = opened.loaded.model, opened.loaded.tokenizer, opened.settings
    if settings.stop:
        models.require_tokenizer(opened.loaded, "--stop")
    if options.strategy.is_search:
        search.run(options, options.strategy, opened)
        return
    recorder = _recorder(options, opened)
    keeps = recorder is not None
    source = next(iter(opened.drafters), None)
    if source is None:
        method = plain_method(model, settings, tokenizer, keep_hidden=keeps)
    else:
        method = medusa_method(model, source.heads, settings, tokenizer, keep_hidden=keeps, drafter=source)
    results: list[Result] = []
    seconds = 0.0
    with _recording(options, recorder):
        for batch in batches(opened.prompts, options.batch_size):
            printer = _printer(options, tokenizer)
            seeds = prompt_seeds(options.machine.seed, range(len(results), len(results) + len(batch)))
            new = method(batch, printer, seeds)
            seconds += new[-1].seconds  # of the whole batch
            results += new
            _print_texts(options, new, printer, tokenizer)
            _keep(recorder, new)
    tokens, per_step = sum(len(result.new_ids) for result in results), tau(results)
    options.output.note(speed_line(tokens, seconds, per_step))
    if source is not None and source.heads is not None and not options.output.quiet:
        warn_if_useless(tokens, per_step)
    about = models.settings_json(options, settings, source)
    options.output.write({"settings": about, "results": [r.to_json(tokenizer, settings.stop) for r in results]})


class _Printer:
    """Prints the text of one prompt while it is generated, through transformers' streamer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers import TextStreamer

        self.streamer = TextStreamer(tokenizer, skip_special_tokens=True)

    def __call__(self, row: int, ids: list[int]) -> None:
        import torch

        for token in ids:  # one at a time: the streamer prints after each call
            self.streamer.put(torch.tensor([token]))


def _printer(options: GenerateOptions, tokenizer: PreTrainedTokenizerBase | None) -> _Printer | None:
    """A printer for the next prompt; `None` where texts are printed when they are complete, or not at all."""
    whole = options.batch_size > 1 or options.settings.stop or options.output.quiet
    return None if tokenizer is None or whole else _Printer(tokenizer)


def _print_texts(
    options: GenerateOptions,
    results: list[Result],
    printer: _Printer | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Print the end of a streamed text, or the whole texts of a batch."""
    from decode.results import text_of

    if printer is not None:
        printer.streamer.end()
    elif not options.output.quiet:
        for result in results:
            print(text_of(result.new_ids, tokenizer, options.settings.stop) if tokenizer else result.new_ids)


def _keep(recorder: Recorder | None, results: list[Result]) -> None:
    """Move the hidden states of finished texts to the recorder."""
    for result in results if recorder is not None else ():
        assert recorder is not None
        assert result.hidden is not None
        recorder.add(result.input_ids + result.new_ids, result.hidden, len(result.input_ids))
        result.hidden = None  # frees the memory; the texts themselves stay


def _recorder(options: GenerateOptions, opened: Opened) -> Recorder | None:
    """The recorder of --record.

    Raises:
        RequestError: the folder holds something else or another backbone's states, or its disk is too small."""
    if options.record is None:
        return None
    from medusa.backbone import Backbone
    from medusa.fingerprint import fingerprint
    from train.features.files import Recorder

    loaded, prompts = opened.loaded, opened.prompts
    backbone, known = Backbone(loaded.model), fingerprint(loaded.model, loaded.name, loaded.revision)
    recorder = Recorder(Path(options.record), known, backbone.hidden_size, backbone.dtype)
    recorder.require_space(sum(map(len, prompts)) + len(prompts) * opened.settings.max_new_tokens)
    return recorder


@contextlib.contextmanager
def _recording(options: GenerateOptions, recorder: Recorder | None) -> Iterator[None]:
    """Write what was recorded at the end, also after an error or Ctrl-C."""
    if recorder is None:
        yield
        return
    from medusa.files import disk_may_fill, readable

    with disk_may_fill(recorder.folder, lambda: "earlier recordings are complete: make room, or record elsewhere"):
        try:
            yield
        finally:
            recorder.flush()
    size = readable(recorder.size(recorder.tokens))
    options.output.note(f"recorded in {recorder.folder}: {recorder.texts} texts, {recorder.tokens:,} tokens, {size}")
