"""The plan of a `medusa fit` run: what it makes, and its cost in time, memory and disk, computed from a probe."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import torch

from decode.bench.calibration.calibrate import compiled_on_gpu, sizes_for
from decode.bench.calibration.variants import SHORTLISTS
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.checkpoints.folder import load
from medusa.commands.cpu import GAIN, PRICE
from medusa.commands.fit.options import FitOptions, HeadsChoice
from medusa.commands.fit.probe import Probe
from medusa.config import MedusaConfig
from medusa.errors import NotCompilableError
from medusa.files import Json, free_bytes, readable
from medusa.heads import class_of
from medusa.loading import Loaded
from medusa.memory import total_memory
from train.config import HeadsConfig
from train.hardware import CARDS, HeadsSize, fits, heads_size, training_bytes
from train.heads import new_config
from train.vocabulary import likely_size

TEMPERATURE = 0.7  # of the text: enough variety that several answers to one prompt differ
TRAINING_SHARE = 2.0  # seconds of training for each second of generating text
EPOCHS = 10  # passes over the text, at most: further passes teach little
LEAST_MINUTES, MOST_MINUTES = 4.0, 480.0  # limits of the default
REPEATS = 8  # a prompt is answered at most so many times, each time with other random numbers
FEWEST_TEXTS = 32
STEPS = 500  # a run with fewer training steps learns less, so short runs take small steps
STEP_TOKENS = 4096  # of a training step, at most
HEAD_COST = 3  # a forward and twice as much for the backward; the frozen model needs the forward only
CHECKPOINTS = 4  # two kept, one that is being written, and a rescue; each holds weights and optimiser states
TEXT_BYTES = 12  # of a token in the file of texts
MANY = 1000  # texts, of which one takes what it takes in a long run
ROW_BLOCK = 64  # tokens to whose multiples a packed row is rounded
CALIBRATION_STEPS = 7500  # plain steps in the time of a calibration, if a forward over many tokens takes as long as one
CALIBRATION_FORWARDS, CALIBRATION_READ = 4000, 120_000  # forwards of a calibration, and tokens in them, if it does not
BENCHMARK_TOKENS, FEWEST_BENCHMARK_TOKENS = 128, 64  # that each method writes to a prompt, if time allows
FEWEST_TEST = 20
BENCHMARK_SHARE, BENCHMARK_SECONDS = 0.25, 75.0  # the benchmark may take this share of the minutes, or so many seconds
# Seconds to compile the steps of a tree, a guess: one machine with a GPU took 12 to 23 for 6 layers and 13 to 19 for 8,
# and 32 to 65 with heads that draft level by level.
COMPILING, COMPILING_LAYER = 10.0, 1.5
METHODS = 2.7  # plain decoding, generate, and the heads, which take less


@dataclass(frozen=True)
class Costs:
    """What one choice of heads costs: the sizes of the heads, and the seconds to learn from one token."""

    size: HeadsSize
    token_seconds: float
    compiled_trees: int = 0  # in a calibration of compiled steps
    tree_seconds: float = 0.0  # to compile the steps of one of them


@dataclass(frozen=True)
class Plan:
    """The amounts and costs of a run. Times are estimates, in seconds unless named otherwise; sizes are in bytes."""

    minutes: float  # for text and training, for one kind of heads
    reason: str  # for the minutes
    texts: int
    text_tokens: int  # of the answers, about
    text_seconds: float
    training_minutes: float  # for each kind of heads
    training_tokens: int  # that training reads in this time, with the heads that learn most slowly
    sequence_length: int
    rows: int  # packed rows in a training step
    test_prompts: int
    rounds: int
    benchmark_tokens: int  # that each method writes to a prompt, at most
    calibration_seconds: float  # for each kind of heads
    benchmark_seconds: float
    memory_bytes: int  # for training
    decoding_bytes: int  # to decode a batch of prompts with the heads, at most
    disk_bytes: int
    kinds: int
    compiled: bool = False  # whether the tree is found, and the speedup measured, with compiled steps
    compiling_calibration_seconds: float = 0.0  # in addition, for compiled steps; for each kind of heads
    compiling_benchmark_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The estimated time of the whole run in seconds."""
        each = 60 * self.training_minutes + self.whole_calibration_seconds
        return self.text_seconds + self.kinds * each + self.whole_benchmark_seconds

    @property
    def whole_calibration_seconds(self) -> float:
        """The estimated time of a calibration, with compiling if steps are compiled."""
        return self.calibration_seconds + self.compiled * self.compiling_calibration_seconds

    @property
    def whole_benchmark_seconds(self) -> float:
        """The estimated time of the benchmark, with compiling if steps are compiled."""
        return self.benchmark_seconds + self.compiled * self.compiling_benchmark_seconds

    def to_json(self) -> Json:
        """Return the plan as a JSON object."""
        return asdict(self) | {"seconds": self.seconds}


def costs_of(choice: HeadsChoice, loaded: Loaded, probe: Probe) -> Costs:
    """Compute what training the heads of `choice` costs for a model, without allocating new heads.

    Raise RequestError if heads to continue read a layer that the model lacks."""
    asked = HeadsConfig(**choice.heads)
    if asked.start is None:
        config = new_config(asked, loaded.model, loaded.name, loaded.revision)
    else:
        config = load(asked.start).config
        Backbone(loaded.model, config.feature_layers)
    size = heads_size(config, probe.vocab_size)
    new = asked.start is None and asked.vocabulary is None
    guessed = likely_size(config, probe.vocab_size, probe.parameters) if new else size.vocab_size
    shared = config.num_heads * probe.hidden_size * guessed if config.lm_head == "shared" else 0
    learning = probe.read_seconds * (1 + HEAD_COST * (size.trained + shared) / probe.parameters)
    return Costs(size, learning, *compiling(config, probe))


def compiled_steps(options: FitOptions, probe: Probe) -> bool:
    """Decide whether steps are compiled: as the options ask, or by default on a CUDA GPU if nothing is against it.

    NotCompilableError: they are asked for, and are not possible."""
    if options.compile is None:
        return probe.device == "cuda" and not probe.not_compiled
    if options.compile and probe.not_compiled:
        raise NotCompilableError(probe.not_compiled)
    return options.compile


def compiling(config: MedusaConfig, probe: Probe) -> tuple[int, float]:
    """Count the trees whose steps a calibration of such heads compiles, and estimate the seconds for each."""
    device, kind = torch.device(probe.device), class_of(config.kind)
    trees = 2 * len(sizes_for(device, 1, compiled=True)) - 1  # static and dynamic; one size is plain decoding
    if kind.has_shortlist(config) and not compiled_on_gpu(device, compiled=True):
        trees += len(SHORTLISTS) - 1
    return trees, (COMPILING + COMPILING_LAYER * probe.layers) * (2 if kind.in_levels(config) else 1)


def most_tokens(options: FitOptions, context: int | None) -> int:
    """Return the number of tokens that the model writes as an answer, at most; at least one must fit before them."""
    return min(options.tokens, context - 1) if context else options.tokens


def text_settings(options: FitOptions, context: int | None) -> Settings:
    """Return the settings with which the model answers the prompts."""
    given = {name: getattr(options, name) for name in ("ignore_eos", "ignore_generation_config")}
    return Settings(max_new_tokens=most_tokens(options, context), temperature=TEMPERATURE, **given)


def make_plan(options: FitOptions, probe: Probe, costs: list[Costs], train_prompts: int, test_prompts: int) -> Plan:
    """Plan a run from the probe of its model, the costs of each kind of heads, and the numbers of prompts.

    NotCompilableError: compiled steps are asked for, and are not possible."""
    most = most_tokens(options, probe.context)
    slowest = max(cost.token_seconds for cost in costs)
    tokens = probe.turns * (probe.prompt_tokens + probe.answer_tokens)  # of one text, as training reads it
    here = (probe.writing_seconds(2 * MANY, most) - probe.writing_seconds(MANY, most)) / MANY
    learning, one_text = min(TRAINING_SHARE * here, EPOCHS * tokens * slowest), 0 if options.server else here
    minutes, reason = options.minutes, "--minutes asks for it"
    if minutes is None:
        minutes = train_prompts * (one_text + learning) / 60
        reason = "one answer to each prompt, and training on it"
        if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
            minutes = min(max(minutes, LEAST_MINUTES), MOST_MINUTES)
            reason = f"the {'least' if minutes == LEAST_MINUTES else 'most'} that fit takes without --minutes"
    texts = min(max(int(60 * minutes / (one_text + learning)), FEWEST_TEXTS), REPEATS * train_prompts)
    writing = 0 if options.server else probe.writing_seconds(texts, most)
    training = max(60 * minutes - writing, texts * learning)
    longest = EPOCHS * texts * tokens * slowest
    if training > 1.05 * longest:
        reason += "; with more prompts, training would use the rest"
    training = min(training, longest)
    at_most = max(60 * minutes * BENCHMARK_SHARE, BENCHMARK_SECONDS)
    steps = at_most / (METHODS * probe.step_seconds)  # for which the benchmark has time, in all rounds
    rounds = 3 if steps >= 3 * FEWEST_TEST * BENCHMARK_TOKENS else 2
    length = min(max(int(steps / (rounds * FEWEST_TEST)), FEWEST_BENCHMARK_TOKENS), BENCHMARK_TOKENS)
    measured = min(max(int(steps / (rounds * length)), FEWEST_TEST), test_prompts)
    trained = max(cost.size.trained for cost in costs)
    rows, sequence_length = packed(
        min(training / slowest / STEPS, STEP_TOKENS), probe.longest_prompt + most, probe.context
    )
    batch = (probe.model_bytes, probe.hidden_size, rows * sequence_length, probe.device)
    cached = (1 if options.server else probe.width) * (probe.longest_prompt + most) * probe.cache_bytes
    slowest_tree = max(cost.tree_seconds for cost in costs)
    reading = CALIBRATION_FORWARDS * probe.step_seconds + CALIBRATION_READ * probe.prompt_seconds
    return Plan(
        minutes=minutes,
        reason=reason,
        texts=texts,
        text_tokens=int(texts * probe.turns * probe.answer_tokens),
        text_seconds=writing,
        training_minutes=training / 60,
        training_tokens=int(training / slowest),
        sequence_length=sequence_length,
        rows=rows,
        test_prompts=measured,
        rounds=rounds,
        benchmark_tokens=length,
        calibration_seconds=max(CALIBRATION_STEPS * probe.step_seconds, reading),
        benchmark_seconds=rounds * measured * length * METHODS * probe.step_seconds,
        memory_bytes=max(training_bytes(cost.size, *batch) for cost in costs),
        decoding_bytes=probe.model_bytes + 4 * trained + cached,
        disk_bytes=int(TEXT_BYTES * texts * probe.turns * (probe.prompt_tokens + most))
        + 4 * trained * (1 + 3 * CHECKPOINTS) * len(costs),
        kinds=len(costs),
        compiled=compiled_steps(options, probe),
        compiling_calibration_seconds=max(cost.compiled_trees * cost.tree_seconds for cost in costs),
        compiling_benchmark_seconds=2 * slowest_tree,  # plain decoding, and the tree
    )


def packed(step_tokens: float, longest: int, context: int | None) -> tuple[int, int]:
    """Return the number and length of the packed rows of a training step of about so many tokens.

    A row holds whole texts, of up to `longest` tokens, so that no answer is taught without its prompt."""
    whole = -(-longest // ROW_BLOCK) * ROW_BLOCK
    length = 2 * whole if step_tokens >= 4 * whole else whole  # long rows are filled better
    length = min(length, context or length)
    return max(int(step_tokens / length), 1), length


def describe(plan: Plan, probe: Probe, choices: list[HeadsChoice], options: FitOptions) -> list[str]:
    """Describe a plan in lines for the console."""
    names = ", ".join(choice.name for choice in choices)
    prompts, answers = round(probe.prompt_tokens), round(probe.answer_tokens)
    asked = round(plan.texts * probe.turns)
    text = f"{asked:,} answers of about {answers} tokens after about {prompts}, "
    text += (
        f"by {options.server}" if options.server else f"{min(probe.width, asked)} at a time: {clock(plan.text_seconds)}"
    )
    training = f"{plan.training_minutes:.3g} minutes, about {plan.training_tokens:,} tokens"
    each = f", for each of {len(choices)} kinds" if len(choices) > 1 else ""
    free = readable(free_bytes(options.folder))
    rounds = f"{plan.rounds} rounds of up to {plan.benchmark_tokens} tokens"
    gpus = [] if probe.device == "cpu" else [f"GPUs         {what_fits(plan)} (computed, not measured)"]
    return [
        f"model        {probe.parameters:,} parameters, {readable(probe.model_bytes)}, on {probe.device}: holds a tree",
        *dtype_lines(plan, probe, options),
        f"heads        {names} ({choices[0].reason})",
        f"minutes      {plan.minutes:.3g} for {'' if options.server else 'text and '}training ({plan.reason})",
        f"text         {text}",
        f"training     {training}{each}",
        f"steps        {steps_of(plan, probe, options)}",
        f"calibration  about {clock(plan.whole_calibration_seconds)}{each}",
        f"benchmark    {plan.test_prompts} of the prompts set aside, {rounds}: {clock(plan.whole_benchmark_seconds)}",
        f"memory       {readable(plan.memory_bytes)} for training, {readable(plan.decoding_bytes)} for decoding",
        *gpus,
        f"disk         up to {readable(plan.disk_bytes)} in {options.folder}, where {free} are free",
        f"total        about {clock(plan.seconds)}",
    ]


def dtype_lines(plan: Plan, probe: Probe, options: FitOptions) -> list[str]:
    """Say what another dtype would change, if bfloat16 was measured."""
    if probe.bfloat16 < GAIN:
        return []
    if probe.dtype != "float32":
        return [f"dtype        {probe.dtype}; in float32 about {clock(plan.seconds * probe.bfloat16)} for the same"]
    line = f"dtype        float32; with --dtype bfloat16 about {clock(plan.seconds / probe.bfloat16)} for the same"
    return [line + ("" if options.load.dtype else f", but {PRICE}")]


def steps_of(plan: Plan, probe: Probe, options: FitOptions) -> str:
    """Say whether steps are compiled, and how to change it."""
    steps = "compiled" if plan.compiled else "eager"
    if options.compile is not None:
        return steps
    if plan.compiled != compiled_steps(options, probe):
        return f"{steps}, as planned before"
    if plan.compiled:
        return "compiled, as usual on a GPU (--no-compile: eager, for quick trials)"
    if probe.not_compiled:
        return f"eager, because {probe.not_compiled}"
    return f"eager, as usual on {'a CPU' if probe.device == 'cpu' else probe.device} (--compile: compiled)"


def what_fits(plan: Plan) -> str:
    """Say for each usual size of a GPU's memory whether it holds the training and the decoding of a run."""
    told = []
    for size in CARDS:
        needs = {"training": plan.memory_bytes, "decoding": plan.decoding_bytes}
        fitting = [name for name, needed in needs.items() if fits(needed, size)]
        told.append(f"{size} GB: {' and '.join(fitting) or 'too small'}")
    return "; ".join(told)


def lacking_disk(plan: Plan, folder: Path) -> str | None:
    """Return a warning if the disk of `folder` has less room than the plan's estimate, else `None`."""
    free = free_bytes(folder)
    if plan.disk_bytes <= free:
        return None
    return f"{folder} may take {readable(plan.disk_bytes)}, and its disk has {readable(free)} left"


def lacking_memory(plan: Plan, devices: Collection[torch.device]) -> str | None:
    """Return a warning if the `devices` have less memory together than the plan's estimate, else `None`."""
    needed, there = max(plan.memory_bytes, plan.decoding_bytes), sum(map(total_memory, devices))
    if needed <= there:
        return None
    way = "--quantization int8 needs less for the model, and another --kind may need less for the heads"
    have = f"{' and '.join(sorted(map(str, devices)))} {'has' if len(devices) == 1 else 'have'} {readable(there)}"
    return f"the run may need {readable(needed)} of memory, and {have}; {way}"


def clock(seconds: float) -> str:
    """Format a time in seconds as minutes and seconds, or as hours and minutes from two hours on."""
    whole = ceil(seconds)
    if whole >= 7200:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60}:{whole % 60:02} min"
