"""Test that decoding with heads does not change the output: compare greedy texts, and the distribution of samples.

  medusa verify demo --prompts demo
  medusa verify --backbone org/model --drafter ngram --prompts own.jsonl
  medusa verify org/heads --prompts own.jsonl --full --report evidence.html

Greedy: every prompt is decoded with drafts and by model.generate. Sampling: after each of the first four prompts, a
million steps are sampled with the best guesses as drafts, and with sampled drafts. Their tokens are tested against the
backbone's own distribution. Lossy acceptance rules are tested too, and are expected to differ. --report writes an HTML
page with tables and pictures. Exit status 1: the outputs differ. Correct decoding fails the sampling test in at most 1
of 10,000 runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decode.settings import Settings
from medusa.commands.effects import require_distinct
from medusa.commands.options import PAGE_SUFFIXES, CommandOptions, Prompts
from medusa.errors import RequestError
from medusa.files import require_absent, require_writable
from medusa.options import count, group, option
from medusa.records.record import naming

GREEDY = (
    "max_new_tokens",
    "epsilon",
    "delta",
    "stop_drafting",
    "compile",
    "cuda_graphs",
    "numerics",
    "ignore_generation_config",
)


class VerifyOptions(CommandOptions):
    shown = "heads prompts max-prompts drafter tree draws full report overwrite backbone dtype json quiet"
    prompts: Prompts = group(Prompts, "prompts")
    settings: Settings = group(Settings, "generation (greedy; E and D: samples)", only=GREEDY, max_new_tokens=128)
    batch_size: int = count(1, "greedy: decode N prompts at a time with the drafter")
    draws: int = count(1_000_000, "draw N samples by each acceptance rule", brief="draw N samples for each rule")
    sampled_prompts: int = count(4, "draw samples after the first N prompts")
    full: bool = option(
        False,
        "draw at temperatures 0.5, 1 and 1.5, each with top-p 1 and 0.9 (default: temperature 1, top-p 1)",
        brief="draw at three temperatures and two values of top-p",
    )
    report: str | None = option(None, "write a report to this HTML file", metavar="FILE")
    overwrite: bool = option(False, "replace an existing report")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.report is None:
            return
        require_distinct(json=self.output.json, report=self.report)
        require_writable(self.report, "--report")
        if Path(self.report).suffix not in PAGE_SUFFIXES:
            raise RequestError(f"--report {self.report}: the report is an HTML page; give a name that ends in .html")
        require_absent(Path(self.report), self.overwrite)

    @property
    def uses_typical(self) -> bool:
        return True  # its samples are tested


def run(options: VerifyOptions) -> int:
    from decode.bench.losslessness.experiment import require_room
    from decode.bench.losslessness.verify import Verification, verify
    from decode.bench.report.terminal import print_verification
    from medusa.commands import models

    output, skip = options.output, options.prompts.skip_long
    # With --skip-long, every prompt leaves room for the two tokens that are sampled after some of them.
    how: dict[str, Any] = {"skip_long": skip, "room": 2 * skip, "samples": False}
    opened = models.open_models(options, options.prompts.read(), [options.models.drafter], calibrates=False, **how)
    for record, prompt in list(zip(opened.records, opened.prompts, strict=True))[: options.sampled_prompts]:
        with naming(record.where):
            require_room([prompt], opened.settings, opened.loaded.model)
    with output.progress_bars() as start_progress:
        asked = Verification(
            **opened.job(),
            draws=options.draws,
            sampled_prompts=options.sampled_prompts,
            full=options.full,
            start_progress=start_progress,
        )
        outcome = verify(asked)
    output.write(outcome.to_json())
    if options.report is not None:
        from decode.bench.report.page import verify_page

        verify_page(outcome).save(Path(options.report))
    print_verification(output.console, outcome, options.full, options.report)
    return 0 if outcome.passed else 1
