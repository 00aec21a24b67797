"""Test that decoding with heads does not change the output: compare greedy texts, and the distribution of samples.

  medusa verify demo --prompts demo
  medusa verify --backbone org/model --drafter ngram --prompts own.jsonl
  medusa verify org/heads --prompts own.jsonl --full --report evidence.html
  medusa verify --server http://localhost:8000 --reference org/model --prompts own.jsonl

Greedy: every prompt is decoded with drafts and by model.generate. Sampling: after each of the first four prompts, a
million steps are sampled with the best guesses as drafts, and with sampled drafts. Their tokens are tested against the
backbone's own distribution. Lossy acceptance rules are tested too, and are expected to differ. --report writes an HTML
page with tables and pictures. Exit status 1: the outputs differ. Correct decoding fails the sampling test in at most 1
of 10,000 runs.

--server audits any OpenAI-compatible server instead: does it write the text of the model --reference? Every token of
its greedy texts, asked alone and all together, must be the model's most probable one, or a near tie. First tokens are
sampled after the most uncertain prompts, at temperature 1, and at 0.7 with top-p 0.9. Give the server's --dtype.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from decode.settings import Settings
from medusa.commands.effects import require_distinct
from medusa.commands.options import PAGE_SUFFIXES, CommandOptions, Prompts
from medusa.errors import RequestError
from medusa.files import require_absent, require_writable
from medusa.options import count, group, option
from medusa.records.record import naming

DRAWS = 1_000_000
GREEDY = ("max_new_tokens", "epsilon", "delta", "stop_drafting", "compile", "cuda_graphs", "ignore_generation_config")


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
    sampled_prompts: int = count(4, "draw samples after the first N prompts")
    full: bool = option(
        False,
        "draw at temperatures 0.5, 1 and 1.5, each with top-p 1 and 0.9 (default: temperature 1, top-p 1)",
        brief="draw at three temperatures and two values of top-p",
    )
    report: str | None = option(None, "write a report to this HTML file", metavar="FILE")
    overwrite: bool = option(False, "replace an existing report")

    server: str | None = option(
        None, "audit this OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...)", metavar="URL"
    )
    reference: str | None = option(
        None,
        "with --server: the model whose text it must write (a folder, GGUF file, Hub id or demo), or another server's "
        "URL",
        metavar="MODEL|URL",
        brief="with --server: the model it must write like, or a URL",
    )
    model: str | None = option(
        None, "with --server: audit this model of it (default: the only one that it serves)", metavar="NAME"
    )
    reference_model: str | None = option(
        None, "use this model of the server --reference (default: the only one that it serves)", metavar="NAME"
    )
    concurrency: int = count(16, "with --server: send N requests for samples at a time")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_fitting()
        if self.report is None:
            return
        require_distinct(json=self.output.json, report=self.report)
        require_writable(self.report, "--report")
        if Path(self.report).suffix not in PAGE_SUFFIXES:
            raise RequestError(f"--report {self.report}: the report is an HTML page; give a name that ends in .html")
        require_absent(Path(self.report), self.overwrite)

    def _require_fitting(self) -> None:
        """Raise RequestError if options of an audit and of a drafter's verification are mixed."""
        if bool(self.server) != bool(self.reference):
            missing = "--reference MODEL" if self.server else "--server URL"
            raise RequestError(f"an audit compares --server with --reference; add {missing}")
        own = {"--model": self.model, "--reference-model": self.reference_model}
        settings = replace(self.settings, max_new_tokens=1, ignore_generation_config=False)
        drafts = {f"--{name}": getattr(self.models, name) for name in ("heads", "drafter", "tree")}
        drafts["--backbone"] = self.models.backbone not in ("", self.reference)  # `completed` sets the reference
        drafts |= {"--report": self.report, "--full": self.full, "--amateur": self.contrasting.amateur}
        drafts |= {"an option of drafting": settings != Settings(max_new_tokens=1)}
        for name, value in (drafts if self.server else own).items():
            if value:
                raise RequestError(f"{name} {'has no effect with' if self.server else 'needs'} --server; leave it out")

    @property
    def has_second_server(self) -> bool:
        """Whether the reference of an audit is a second server, and not a model."""
        return str(self.reference).startswith(("http://", "https://"))

    def completed(self) -> Self:
        """Return the options with the backbone that heads record; with --server, the reference is the backbone."""
        if not self.server:
            return super().completed()
        if self.has_second_server:
            return self
        return replace(self, models=replace(self.models, backbone=self.reference))

    @property
    def uses_typical(self) -> bool:
        return True  # its samples are tested


def run(options: VerifyOptions) -> int:
    if options.server:
        from medusa.commands.audit import audit

        return audit(options)
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
