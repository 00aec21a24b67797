"""Write text with heads, or another drafter: the backbone's own text, sooner.

medusa generate --backbone demo --heads demo --prompt "Once upon a time"
medusa generate --backbone org/model --heads org/heads --prompts questions.jsonl --json out.json
medusa generate --backbone org/model --drafter ngram --prompts questions.jsonl   # see docs/drafters.md
medusa generate --backbone org/model --heads org/heads --amateur org/small --prompts questions.jsonl   # contrastive
medusa generate --backbone org/model --heads org/heads --prompts questions.jsonl --record used   # to train on later
medusa generate --backbone org/model --strategy best-first-beam --prompts questions.jsonl   # see docs/strategies.md
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.commands import common, strategies
from medusa.errors import RequestError

if TYPE_CHECKING:
    from decode.drafters.base import DrafterFactory
    from decode.settings import Settings
    from medusa.loading import Loaded
    from train.features.files import Recorder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False)
    common.add_prompts(parser)
    common.add_generation(parser)
    common.add_drafter(parser)
    common.add_amateur(parser)
    strategies.add_arguments(parser)
    parser.add_argument("--plain", action="store_true", help="decode without a drafter: one token a step")
    parser.add_argument(
        "--record",
        metavar="DIR",
        help="add the texts and their hidden states to this folder, from which `medusa train` can go on",
    )
    common.add_machine(parser)


def run(args: argparse.Namespace) -> None:
    from transformers import TextStreamer

    beams, settings = strategies.beams_of(args), common.settings_of(args)
    common.contrast_of(args)
    if args.heads is None and args.drafter is None and not args.plain and beams is None:
        raise RequestError("no heads: give --heads H, --drafter ngram, or --plain to decode without any")
    plan = None if args.plain or beams is not None else common.plan_of(args, args.drafter)
    records = common.read_prompts(args)
    common.check_output(args.json)
    common.check_models(args, *([] if plan is None else [plan]))

    from decode.bench.methods import medusa_method, plain_method
    from decode.results import Result, prompt_seeds, tau, text_of
    from medusa.backbone import require_tree_support
    from medusa.records.record import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    model, tokenizer = loaded.model, loaded.tokenizer
    if plan is not None:
        require_tree_support(model)
    if settings.stop and tokenizer is None:
        raise RequestError("--stop needs a tokenizer, and this backbone has none")
    prompts = [prompt_ids(record, tokenizer) for record in records]
    settings = common.with_amateur(args, loaded, settings)
    common.require_fitting(prompts, loaded, settings.amateur)
    if beams is not None:
        strategies.run(args, beams, loaded, prompts, settings)
        return
    recorder = _recorder(args, loaded, prompts, settings)
    source = None if plan is None else common.open_source(args, loaded, plan, settings)
    method = (
        plain_method(model, settings, tokenizer, keep_hidden=args.record is not None)
        if source is None
        else medusa_method(
            model, source.heads, settings, tokenizer, keep_hidden=args.record is not None, drafter=source
        )
    )
    streams = tokenizer is not None and args.batch_size == 1 and not settings.stop
    results: list[Result] = []
    seconds = 0.0
    with _recording(args, recorder):
        for batch in common.batches(prompts, args.batch_size):
            streamer = _Printer(tokenizer, TextStreamer) if streams and not args.quiet else None
            results += method(batch, streamer, prompt_seeds(args.seed, range(len(results), len(results) + len(batch))))
            seconds += results[-1].seconds  # of the whole batch
            if streamer is not None:
                streamer.end()
            elif not args.quiet:
                for result in results[-len(batch) :]:
                    print(text_of(result.new_ids, tokenizer, settings.stop) if tokenizer else result.new_ids)
            if recorder is not None:
                for result in results[-len(batch) :]:
                    assert result.hidden is not None
                    recorder.add(result.input_ids + result.new_ids, result.hidden, len(result.input_ids))
                    result.hidden = None  # the texts themselves stay in memory, these need not
    _say_how_it_went(args, source, sum(len(result.new_ids) for result in results), seconds, tau(results))
    about = settings.to_dict() | {"backbone": args.backbone, "heads": args.heads}
    about |= common.drafter_json(args.drafter, source)
    common.write_results(args, {"settings": about, "results": [r.to_json(tokenizer, settings.stop) for r in results]})


def _recorder(
    args: argparse.Namespace, loaded: Loaded, prompts: list[list[int]], settings: Settings
) -> Recorder | None:
    """Who keeps the hidden states, if they are to be kept.

    Raises:
        RequestError: the folder holds something else, or another backbone's, or its disk is too small."""
    if args.record is None:
        return None
    from medusa.backbone import Backbone
    from medusa.fingerprint import fingerprint
    from train.features.files import Recorder

    backbone, known = Backbone(loaded.model), fingerprint(loaded.model, args.backbone, args.revision)
    recorder = Recorder(Path(args.record), known, backbone.hidden_size, backbone.dtype)
    recorder.require_space(sum(map(len, prompts)) + len(prompts) * settings.max_new_tokens)
    return recorder


@contextlib.contextmanager
def _recording(args: argparse.Namespace, recorder: Recorder | None) -> Iterator[None]:
    """What was recorded is written, however this ends."""
    if recorder is None:
        yield
        return
    from medusa.files import disk_may_fill, readable

    with disk_may_fill(recorder.folder, lambda: "what was recorded before is whole: make room, or record elsewhere"):
        try:
            yield
        finally:
            recorder.flush()
    if not args.quiet:
        held = f"{recorder.texts} texts, {recorder.tokens:,} tokens, {readable(recorder.size(recorder.tokens))}"
        print(f"recorded in {recorder.folder}: {held}", file=sys.stderr)


class _Printer:
    """Feeds the tokens of each step to transformers' streamer, which prints whole words."""

    def __init__(self, tokenizer: object, streamer: type) -> None:
        self.streamer = streamer(tokenizer, skip_special_tokens=True)

    def __call__(self, row: int, ids: list[int]) -> None:
        import torch

        for token in ids:  # one at a time: the streamer prints after each call
            self.streamer.put(torch.tensor([token]))

    def end(self) -> None:
        self.streamer.end()


def _say_how_it_went(
    args: argparse.Namespace, source: DrafterFactory | None, tokens: int, seconds: float, tokens_per_step: float
) -> None:
    if args.quiet:
        return
    print(common.how_it_went(tokens, seconds, tokens_per_step), file=sys.stderr)
    if source is not None and source.heads is not None:
        common.warn_if_useless(tokens, tokens_per_step)
