"""One benchmark of a drafter: plain decoding, `model.generate`, the drafter and others on the same prompts."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from decode.bench.benchmark import Contender, accepted_by_node, run_rounds, summarize
from decode.bench.calibration.recording import record
from decode.bench.calibration.stored import situation, stored
from decode.bench.figures import (
    BenchmarkMachine,
    BenchmarkResult,
    MemoryFigures,
    MethodFigures,
    RunSettings,
    TemperatureFigures,
)
from decode.bench.machine import commit, machine
from decode.bench.methods import medusa_method, plain_method, transformers_method
from decode.draft import DrafterContext, DrafterFactory
from decode.drafters.small_model import load_companion
from decode.results import prompt_seeds
from decode.settings import Settings
from decode.timers import StageTimer
from medusa import __version__
from medusa.backbone import Backbone, require_tree_support
from medusa.errors import RequestError
from medusa.loading import Loaded
from medusa.memory import bytes_of, peak_memory

StartProgress = Callable[[str, int], Callable[[], object]]
"""Starts a progress bar with a title and a number of batches; returns a function that advances the bar by one."""


def no_progress(title: str, total: int) -> Callable[[], object]:
    """Show no progress."""
    return lambda: None


@dataclass(frozen=True)
class BenchmarkJob:
    """The model, the drafter, the options and the prompts of one benchmark."""

    loaded: Loaded
    source: DrafterFactory
    settings: Settings
    prompts: list[list[int]]
    categories: list[str | None]
    """One for each prompt."""
    heads: str | None = None
    """The name of the heads, if heads draft."""
    drafter: str = "heads"
    """The name of the drafter with its options, as the user wrote it."""
    tree: object = None
    """The tree as the result lists it."""
    rounds: int = 3
    batch_size: int = 1
    seed: int = 0
    command: str = ""
    """The command line, for the result."""
    start_progress: StartProgress = no_progress

    def __post_init__(self) -> None:
        require_tree_support(self.loaded.model)
        if self.settings.stop and self.loaded.tokenizer is None:
            raise RequestError("--stop needs a tokenizer, and this backbone has none")

    @property
    def prompts_sha256(self) -> str:
        return prompts_hash(self.prompts)

    def run(self, contenders: Sequence[Contender], rounds: int, title: str) -> None:
        """Let the contenders take turns on the prompts."""
        size = self.batch_size
        batches = [self.prompts[start : start + size] for start in range(0, len(self.prompts), size)]
        advance = self.start_progress(title, rounds * len(batches))
        run_rounds(contenders, batches, rounds, advance, self.seed)

    def stock_methods(self, settings: Settings, clock: StageTimer | None = None) -> list[Contender]:
        """The methods that every benchmark has besides the drafter's."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        return [
            Contender("plain", plain_method(model, settings, tokenizer, clock), clock),
            Contender("transformers", transformers_method(model, settings, tokenizer)),
        ]

    def drafting(
        self, name: str, settings: Settings, source: DrafterFactory | None = None, clock: StageTimer | None = None
    ) -> Contender:
        """Decoding with a drafter, by default the one under test."""
        source = source or self.source
        method = medusa_method(
            self.loaded.model, source.heads, settings, self.loaded.tokenizer, clock=clock, drafter=source
        )
        return Contender(name, method, clock)


def prompts_hash(prompts: list[list[int]]) -> str:
    """A hash of the prompts' ids: runs with equal hashes decoded the same prompts."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def run_benchmark(job: BenchmarkJob, others: Sequence[Contender] = ()) -> BenchmarkResult:
    """Measure all methods; `others` are further contenders."""
    methods = measure_methods(job, others)
    model = job.loaded.model
    memory = MemoryFigures(bytes_of(model), job.source.num_bytes, peak_memory())
    dtype = str(model.dtype).removeprefix("torch.")
    about = BenchmarkMachine(**vars(machine()), dtype=dtype, memory=memory, medusa=__version__)
    generation = json.loads(json.dumps(job.settings.to_dict()))
    settings = RunSettings(
        **{name: generation.pop(name) for name in ("max_new_tokens", "temperature", "acceptance")},
        generation=generation,
        backbone=job.loaded.name,
        heads=job.heads,
        prompts=len(job.prompts),
        rounds=job.rounds,
        batch_size=job.batch_size,
        drafter=job.drafter,
        tree=job.tree,
        nodes=job.source.num_nodes,
        prompts_sha256=job.prompts_sha256,
        seed=job.seed,
        command=job.command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=commit(),
    )
    return BenchmarkResult(about, settings, methods)


def measure_methods(job: BenchmarkJob, others: Sequence[Contender] = ()) -> dict[str, MethodFigures]:
    """The figures of all methods by name; `others` are further contenders."""
    wait = torch.cuda.synchronize if job.loaded.model.device.type == "cuda" else None
    contenders = [
        *job.stock_methods(job.settings, StageTimer(wait)),
        *others,
        job.drafting("medusa", job.settings, clock=StageTimer(wait)),
    ]
    job.run(contenders, job.rounds, "measuring")
    return summarize(contenders, job.categories)


def at_temperature(job: BenchmarkJob, temperature: float) -> TemperatureFigures:
    """tau and speedup of the lossless rule at another temperature, in one round."""
    settings = replace(job.settings, temperature=temperature, acceptance=None, top_k=0, top_p=1.0, min_p=0.0)
    warm = replace(job, settings=settings, rounds=1, categories=[None] * len(job.prompts))
    figures = measure_methods(warm)["medusa"]
    return TemperatureFigures(
        temperature,
        figures.tau,
        figures.tau_interval,
        figures.speedup_vs_generate,
        figures.speedup_vs_generate_interval,
    )


def prompt_lookup(job: BenchmarkJob) -> Contender:
    """transformers' prompt lookup."""
    model, tokenizer = job.loaded.model, job.loaded.tokenizer
    return Contender("prompt lookup", transformers_method(model, job.settings, tokenizer, prompt_lookup_num_tokens=10))


def assisted_by(job: BenchmarkJob, name: str, trust_remote_code: bool = False) -> Contender:
    """transformers' assisted generation with the draft model called `name`.

    Raises:
        RequestError: no such model, or a model with another vocabulary or tokenizer."""
    model, tokenizer = job.loaded.model, job.loaded.tokenizer
    context = DrafterContext(model, tokenizer=tokenizer, name=job.loaded.name, trust_remote_code=trust_remote_code)
    draft = load_companion(name, context)
    return Contender("draft model", transformers_method(model, job.settings, tokenizer, assistant_model=draft))


def add_details(job: BenchmarkJob, figures: MethodFigures, calibrations: Sequence[Path]) -> None:
    """Add what only a report shows: how often each node was accepted, and the calibration that holds here.

    `calibrations`: the files that calibrations of these heads are kept in."""
    heads = job.source.heads
    assert heads is not None, "only heads have nodes with ranks, and calibrations"
    decode = job.drafting("medusa", job.settings).method
    seeds = prompt_seeds(job.seed, range(len(job.prompts)))
    results = [
        result for prompt, seed in zip(job.prompts, seeds, strict=True) for result in decode([prompt], seeds=[seed])
    ]
    model = job.loaded.model
    recording = record(Backbone(model), heads, [(r.input_ids, r.new_ids) for r in results])
    figures.accepted_by_node = accepted_by_node(recording.ranks, results)
    figures.calibration = stored(calibrations, situation(model, heads, job.settings, job.batch_size))
