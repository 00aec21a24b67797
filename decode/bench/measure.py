"""Runs the benchmark of a drafter against plain decoding, transformers' `model.generate` and other methods."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from decode.bench.benchmark import Contender, StageTimer, accepted_by_node, run_rounds, summarize
from decode.bench.calibration.recording import record
from decode.bench.calibration.stored import situation, stored
from decode.bench.figures import MethodFigures, Prediction
from decode.bench.machine import commit, machine
from decode.bench.methods import Job, one_by_one, transformers_method
from decode.bench.result import (
    BenchmarkMachine,
    BenchmarkResult,
    LossyFigures,
    MemoryFigures,
    RunSettings,
    TemperatureFigures,
)
from decode.drafters.base import DrafterContext
from decode.drafters.small_model import load_small_model
from decode.drafters.trained_heads import TrainedHeads
from decode.rules import RULES
from decode.settings import Settings
from decode.texts import Result, prompt_seeds
from medusa import __version__
from medusa.backbone import Backbone, require_tree_support
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.loading import text_limits
from medusa.memory import bytes_of, peak_memory

LOSSY_SAMPLING = [rule.name for rule in RULES.values() if rule.samples and not rule.lossless]
"""The lossy rules for a temperature above 0."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkJob(Job):
    """What a benchmark measures: a drafter with its models, prompts and options.

    Raises RequestError if the backbone cannot verify trees, or has no tokenizer to find stop strings."""

    categories: Sequence[str | None]  # the category of each prompt; `None` if it has none
    rounds: int = 3
    command: str = ""  # the command line that started the benchmark, for the result

    def __post_init__(self) -> None:
        require_tree_support(self.loaded.model)
        if self.settings.stop and self.loaded.tokenizer is None:
            raise RequestError("--stop needs a tokenizer, and this backbone has none; leave it out")

    def measure(self, contenders: Sequence[Contender], rounds: int, title: str) -> dict[str, MethodFigures]:
        """Measure all contenders in `rounds` rounds, with a progress bar called `title`; return metrics by name."""
        size = self.batch_size
        batches = [self.prompts[start : start + size] for start in range(0, len(self.prompts), size)]
        run_rounds(contenders, batches, rounds, self.start_progress(title, rounds * len(batches)), self.seed)
        return summarize(contenders, self.categories)

    def by_transformers(self, name: str, settings: Settings, **assistance: object) -> Contender:
        """Make a contender that decodes with transformers' `model.generate`. `assistance`: more options for it."""
        return Contender(name, transformers_method(self.loaded.model, settings, self.loaded.tokenizer, **assistance))


def prompts_hash(prompts: Sequence[list[int]]) -> str:
    """Return a hash of the prompts' token ids. Two runs with equal hashes decoded the same prompts."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def run_benchmark(job: BenchmarkJob, others: Sequence[Contender] = ()) -> BenchmarkResult:
    """Run a benchmark: measure all methods, and describe machine and settings. `others`: methods that a user added."""
    methods = measure_methods(job, others)
    memory = MemoryFigures(bytes_of(job.loaded.model), job.source.num_bytes, peak_memory())
    about = BenchmarkMachine(**vars(machine()), dtype=job.dtype, memory=memory, medusa=__version__)
    generation = json.loads(json.dumps(job.settings.to_dict()))
    names = ("heads", "drafter", "tree", "rounds", "batch_size", "seed", "command")
    settings = RunSettings(
        **{name: generation.pop(name) for name in ("max_new_tokens", "temperature", "acceptance")},
        **{name: getattr(job, name) for name in names},
        generation=generation,
        backbone=job.loaded.name,
        prompts=len(job.prompts),
        nodes=job.source.num_nodes,
        prompts_sha256=prompts_hash(job.prompts),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=commit(),
    )
    return BenchmarkResult(about, settings, methods)


def measure_methods(job: BenchmarkJob, others: Sequence[Contender] = ()) -> dict[str, MethodFigures]:
    """Measure plain decoding, `model.generate`, the contenders in `others` and the drafter; return metrics by name."""
    device = job.loaded.model.device
    plain, medusa = StageTimer(device), StageTimer(device)
    contenders = [
        Contender("plain", job.plain(job.settings, plain), plain),
        job.by_transformers("transformers", job.settings),
        *others,
        Contender("medusa", job.drafted(job.settings, medusa), medusa),
    ]
    return job.measure(contenders, job.rounds, "measuring")


def require_settings(settings: Settings, temperatures: Sequence[float], lossy: bool) -> None:
    """Raise a `RequestError` if `settings` do not suit one of the `temperatures` or, with `lossy`, a lossy rule."""
    for temperature in temperatures:
        lossless_at(settings, temperature)
    for rule in LOSSY_SAMPLING if lossy else ():
        sampled_by(settings, rule)


def lossless_at(settings: Settings, temperature: float) -> Settings:
    return replace(settings, temperature=temperature, acceptance=None, top_k=0, top_p=1.0, min_p=0.0)


def sampled_by(settings: Settings, rule: str) -> Settings:
    return replace(settings, temperature=settings.temperature or 1.0, acceptance=rule)


def at_temperature(job: BenchmarkJob, temperature: float) -> TemperatureFigures:
    """Measure tau and speedup of lossless decoding at `temperature`, in one round, without top-k, top-p and min-p."""
    found = measure_methods(replace(job, settings=lossless_at(job.settings, temperature), rounds=1))["medusa"]
    speedup = found.speedup_vs_generate, found.speedup_vs_generate_interval
    return TemperatureFigures(temperature, found.tau, found.tau_interval, *speedup)


def compare_lossy_rules(job: BenchmarkJob) -> list[LossyFigures]:
    """Measure the speed and `log_likelihood` of plain sampling, the lossless rule and each lossy rule, in one round.

    The temperature is the job's, or 1 if that is 0. A higher log-likelihood means more predictable texts."""
    warm = sampled_by(job.settings, "rejection")
    contenders = [
        Contender("plain", job.plain(warm)),
        job.by_transformers("transformers", warm),
        *(Contender(rule, job.drafted(replace(warm, acceptance=rule))) for rule in ("rejection", *LOSSY_SAMPLING)),
    ]
    measured, backbone, rows = job.measure(contenders, 1, "lossy rules"), Backbone(job.loaded.model), []
    for contender in [contenders[0], *contenders[2:]]:
        name, found = contender.name, measured[contender.name]
        likelihood = log_likelihood(backbone, contender.rounds[0], warm.temperature)
        speed = (warm.temperature, found.tau, found.speedup_vs_generate)
        rows.append(LossyFigures(name, name not in LOSSY_SAMPLING, *speed, likelihood))
    return rows


@torch.inference_mode()
def log_likelihood(backbone: Backbone, results: Sequence[Result], temperature: float) -> float:
    """Compute the mean log-likelihood of the new tokens under the backbone at `temperature`, in nats per token.

    The logits are those of a forward of the whole model, which may cap or scale what its LM head returns."""
    total, count = 0.0, 0
    for result in results:
        if not (new := len(result.new_ids)):
            continue
        ids = torch.tensor([result.input_ids + result.new_ids], device=backbone.device)
        kept = {"logits_to_keep": new} if backbone.keeps_logits else {}
        logits = backbone.model(input_ids=ids[:, :-1], use_cache=False, **kept).logits[0, -new:]
        wanted = ids[0, -new:, None].to(logits.device)
        for part, own in zip(logits.split(64), wanted.split(64), strict=True):
            total += float((part.float() / temperature).log_softmax(-1).gather(1, own).sum())
        count += new
    return total / max(count, 1)


def assisted(job: BenchmarkJob, name: str | None = None, trust_remote_code: bool = False) -> Contender:
    """Make a contender that decodes with transformers' assisted generation: the draft model `name`, or prompt lookup.

    Raises RequestError if there is no such model, if its vocabulary or tokenizer differs from the backbone's, if it
    cannot read texts of this length, or if it or the backbone has recurrent layers, which transformers refuses."""
    model, tokenizer, backbone = job.loaded.model, job.loaded.tokenizer, job.loaded.name
    _require_stateless(model, "the backbone")
    if name is None:
        return job.by_transformers("generate prompt-lookup", job.settings, prompt_lookup_num_tokens=10)
    context = DrafterContext(model, tokenizer=tokenizer, name=backbone, trust_remote_code=trust_remote_code)
    small = load_small_model(name, context)
    _require_stateless(small, f"the draft model {name}")
    most = max(map(len, job.prompts)) + job.settings.max_new_tokens
    longest, room = min(most, Backbone(model).context or most), text_limits(small.config).context
    if room is not None and longest > room:
        raise RequestError(
            f"the draft model {name} reads {room} tokens, and prompts and answers have up to {longest}; give a smaller "
            "--max-new-tokens, shorter prompts, or another model"
        )
    return job.by_transformers(f"generate model:{name}", job.settings, assistant_model=small)


def _require_stateless(model: PreTrainedModel, called: str) -> None:
    if model._is_stateful:
        reason = f"transformers' assisted generation takes no recurrent layers, and {called} has some"
        raise RequestError(f"{reason}; leave out --against")


def add_prediction(job: BenchmarkJob, medusa: MethodFigures, calibrations: Sequence[Path]) -> None:
    """Add to `medusa` the tau that a calibration in the files `calibrations` predicted for the job's drafter, if any.

    For compiled steps without a calibration of their own, `--tree auto` uses one with eager steps; so does this."""
    source, model = job.source, job.loaded.model
    heads, drafter = source.heads, "heads" if isinstance(source, TrainedHeads) else job.drafter
    if not any(map(Path.is_file, calibrations)):
        return
    if heads is None:  # a calibration of the heads may have chosen n-grams
        if job.heads is None:
            return
        heads = MedusaHeads.from_pretrained(job.heads, dtype=model.dtype)
    for settings in (job.settings, replace(job.settings, compile=False)):
        found = stored(calibrations, situation(model, heads, settings, job.batch_size))
        if found is not None and (predicted := found.predicted_tau(source.tree, drafter)) is not None:
            medusa.predicted = Prediction(predicted, found.texts)
            return


def add_details(job: BenchmarkJob, medusa: MethodFigures, calibrations: Sequence[Path]) -> None:
    """Add to `medusa` acceptance by node, and the calibration for this machine and job from files `calibrations`."""
    heads, model = job.source.heads, job.loaded.model
    assert heads is not None, "only heads have nodes with ranks, and calibrations"
    results = one_by_one(job.drafted(job.settings), job.prompts, prompt_seeds(job.seed, range(len(job.prompts))))
    recording = record(Backbone(model, heads.config.feature_layers), heads, [(r.input_ids, r.new_ids) for r in results])
    medusa.accepted_by_node = accepted_by_node(recording.ranks, results)
    medusa.calibration = stored(calibrations, situation(model, heads, job.settings, job.batch_size))
