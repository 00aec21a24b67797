"""Test that decoding with heads does not change the output: compare greedy texts, and the distribution of samples.

  medusa verify demo --prompts demo
  medusa verify --backbone org/model --drafter ngram --prompts own.jsonl
  medusa verify org/heads --prompts own.jsonl --full --report evidence.html
  medusa verify --server http://host --reference org/model --prompts own.jsonl

Greedy: every prompt is decoded with drafts and by model.generate. Sampling: after each of the first four prompts, a
million steps are sampled with the best guesses as drafts, and with sampled drafts. Their tokens are tested against the
backbone's own distribution. Lossy acceptance rules are tested too, and are expected to differ. --report writes an HTML
page with tables and pictures. Exit status 1: the outputs differ. Correct decoding fails the sampling test in at most 1
of 10,000 runs.

--server audits any OpenAI-compatible server instead (docs/serving.md): does it write the text of the
model --reference? Give the server's --dtype.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from decode.settings import Settings
from medusa.commands.audit.options import DRAWS as DRAWS_OF_SERVER
from medusa.commands.audit.options import AuditOptions
from medusa.commands.effects import require_distinct
from medusa.commands.options import PAGE_SUFFIXES, CommandOptions, Prompts
from medusa.errors import RequestError
from medusa.files import require_absent, require_writable
from medusa.options import count, group, option
from medusa.records.record import naming

DRAWS = 1_000_000
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
    shown = "heads prompts max-prompts drafter tree draws full report server reference backbone dtype json quiet"
    prompts: Prompts = group(Prompts, "prompts")
    settings: Settings = group(Settings, "generation (greedy; E and D: samples)", only=GREEDY, max_new_tokens=128)
    batch_size: int = count(1, "greedy: decode N prompts at a time with the drafter")
    draws: int | None = count(
        None,
        "draw N samples by each acceptance rule, or of a server for each setting (default: 1,000,000 or 2,000)",
        brief="draw N samples for each rule or setting",
    )
    sampled_prompts: int = count(4, "draw samples after the first N prompts; of a server: the N least certain")
    full: bool = option(
        False,
        "draw at temperatures 0.5, 1 and 1.5, each with top-p 1 and 0.9 (default: temperature 1, top-p 1)",
        brief="draw at three temperatures and two values of top-p",
    )
    report: str | None = option(None, "write a report to this HTML file", metavar="FILE")
    overwrite: bool = option(False, "replace an existing report")

    audited: AuditOptions = group(AuditOptions, "audit of a server")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.audited.server:
            self._require_audited()
        if self.report is None:
            return
        require_distinct(json=self.output.json, report=self.report)
        require_writable(self.report, "--report")
        if Path(self.report).suffix not in PAGE_SUFFIXES:
            raise RequestError(f"--report {self.report}: the report is an HTML page; give a name that ends in .html")
        require_absent(Path(self.report), self.overwrite)

    def _require_audited(self) -> None:
        """Raise RequestError if an audit of a server has options of drafting here."""
        plain = replace(self.settings, max_new_tokens=1, ignore_generation_config=False) == Settings(max_new_tokens=1)
        models = self.models
        drafts: dict[str, object] = {"--heads": models.heads, "--drafter": models.drafter, "--tree": models.tree}
        drafts["--backbone"] = models.backbone and models.backbone != self.audited.reference  # as `completed` sets it
        drafts |= {"--report": self.report, "--full": self.full, "--amateur": self.contrasting.amateur}
        drafts |= {"--batch-size": self.batch_size != 1, "--overwrite": self.overwrite}
        if self.audited.has_second_server:  # which has its own dtype, and takes prompts of any length or none
            drafts |= {"--dtype": self.load.dtype, "--skip-long": self.prompts.skip_long}
        drafts["an option of drafting"] = not plain
        for name in (name for name, value in drafts.items() if value):
            raise RequestError(f"{name} has no effect with --server; leave it out")

    def completed(self) -> Self:
        """Return the options with the backbone that heads record; with --server, the reference is the backbone."""
        if not self.audited.server:
            return super().completed()
        if self.audited.has_second_server:
            return self
        return replace(self, models=replace(self.models, backbone=str(self.audited.reference)))

    @property
    def uses_typical(self) -> bool:
        return True  # its samples are tested


def run(options: VerifyOptions) -> int:
    if options.audited.server:
        from medusa.commands.audit.audit import audit

        draws = options.draws or DRAWS_OF_SERVER
        return audit(options, options.audited, options.prompts, draws, options.sampled_prompts)
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
            draws=options.draws or DRAWS,
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
