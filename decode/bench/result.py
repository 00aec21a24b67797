"""The result of a benchmark: its JSON, as `medusa benchmark --json` writes it (docs/results.md), and its headline.

The headline says the measured gain over plain decoding in a few sentences, or that there is none. It compares with
plain decoding in our own loop first, because both sides of that ratio run the same code. It compares with
`model.generate` second. A speedup whose 95 % interval contains 1 is no gain, and no interval is shown for fewer batches
of prompts or rounds than it needs: resampling few of them gives intervals that are too narrow."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from decode.bench.figures import CONFIDENCE, PERCENT, Interval, MethodFigures, interval_in_words
from decode.bench.machine import Machine
from decode.drafters import in_words
from decode.rules import is_lossy, rule_and_limit
from decode.settings import Settings, near_tie
from medusa.errors import RequestError

MIN_BATCHES, MIN_ROUNDS = 8, 2  # of an interval: batches of prompts, and rounds in which each is decoded
FASTER, SLOWER, NO_GAIN, NOT_MEASURED = "faster", "slower", "no measurable gain", "not measured"
TITLES = {
    FASTER: "{:.2f} times as fast as plain decoding",
    SLOWER: "Slower than plain decoding",
    NO_GAIN: "No measurable gain over plain decoding",
}


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, such as `1 round` or `2 rounds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True)
class Headline:
    """What a benchmark showed, in words."""

    verdict: str  # `faster`, `slower` or `no measurable gain`, against plain decoding; or `not measured`
    title: str  # one line, with a speedup only if the verdict is `faster`
    text: str  # sentences with intervals, tau, equal texts, model, hardware and prompts; or the reason for no headline
    confidence: float = CONFIDENCE  # of the intervals in the text

    @property
    def claim(self) -> str:
        """The first sentence of the text, which pages and terminals emphasise."""
        return self.text.partition(". ")[0].removesuffix(".") + "."

    @property
    def details(self) -> str:
        """The text after its first sentence."""
        return self.text.partition(". ")[2]


def _verdict(interval: Interval | None) -> str:
    if interval is None or interval[0] <= 1 <= interval[1]:
        return NO_GAIN
    return FASTER if interval[0] > 1 else SLOWER


def _sentence(subject: str, baseline: str, ratio: float, interval: Interval | None) -> str:
    """Describe a speedup over a baseline in one sentence that begins with `subject`."""
    verdict, span = _verdict(interval), f"({PERCENT} interval {interval_in_words(interval)})"
    if verdict == FASTER:
        return f"{subject} is {ratio:.2f} times as fast as {baseline} {span}."
    if verdict == SLOWER:
        return f"{subject} is slower than {baseline}: {ratio:.2f} times as fast {span}."
    return f"{subject} is not measurably faster than {baseline} {span}."


@dataclass
class MemoryFigures:
    """Bytes of the weights, and peak memory of the process and of each GPU (`medusa.memory.peak_memory`)."""

    backbone: int
    heads: int
    peak: dict[str, int]


@dataclass
class BenchmarkMachine(Machine):
    """The machine of a benchmark, with the backbone's dtype, the memory used and this package's version (`medusa`)."""

    dtype: str
    memory: MemoryFigures | None = None
    medusa: str | None = None  # version of this package


@dataclass
class RunSettings:
    """The settings of a benchmark: models, prompts, decoding options and rounds."""

    max_new_tokens: int
    temperature: float
    acceptance: str
    generation: dict[str, object]  # the other decoding options; in the JSON, they stand among the other fields
    backbone: str
    heads: str | None
    prompts: int  # number of prompts
    rounds: int
    batch_size: int
    drafter: str = "heads"
    tree: object = None  # the paths of a static tree, or the options of a dynamic tree
    nodes: int | None = None
    prompts_sha256: str | None = None  # of the prompts' token ids; two runs with equal hashes can be compared
    seed: int = 0
    command: str = ""
    date: str = ""
    commit: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return all settings as one flat dict for JSON."""
        content = asdict(self)
        return content.pop("generation") | content

    def told(self, neutral: bool) -> dict[str, object]:
        """Return the settings that a reader may ask for: decoding options that change nothing (`neutral`), or the rest.

        Options of typical acceptance and of compiled steps change nothing without them."""
        standard, used = Settings().to_dict() | {"repetition_penalty": 1.0}, self.generation
        idle = set() if rule_and_limit(self.acceptance)[0].is_typical else {"epsilon", "delta"}
        idle |= set() if used.get("compile") else {"cuda_graphs"}
        idle |= {name for name, value in used.items() if value == standard.get(name) or value in ([], None)}
        elsewhere = {"tree", "command", "date", "commit", "prompts_sha256"}
        shown = {name: value for name, value in self.to_json().items() if name not in elsewhere and value is not None}
        return {name: value for name, value in shown.items() if (name in idle) == neutral}


def _with_generation(content: object) -> object:
    """Undo `RunSettings.to_json`: collect the entries that are not fields of `RunSettings` in a dict `generation`."""
    if not isinstance(content, dict):
        return content
    own = {field.name for field in fields(RunSettings)}
    return content | {"generation": {name: value for name, value in content.items() if name not in own}}


@dataclass
class TemperatureFigures:
    """tau, and speedup over `model.generate`, of lossless decoding with a drafter at one temperature."""

    temperature: float
    tau: float
    tau_interval: Interval | None
    speedup_vs_generate: float
    speedup_vs_generate_interval: Interval | None


@dataclass
class LossyFigures:
    """tau, speedup over `model.generate`, and likelihood of the texts, for one acceptance rule at one temperature."""

    acceptance: str
    lossless: bool
    temperature: float
    tau: float
    speedup_vs_generate: float
    log_likelihood: float  # mean log-likelihood of a new token under the backbone, in nats


@dataclass
class BenchmarkResult:
    """The result of one run of `medusa benchmark`."""

    machine: BenchmarkMachine
    settings: Annotated[RunSettings, BeforeValidator(_with_generation)]
    methods: dict[str, MethodFigures]  # by name; `plain`, `transformers` and `medusa` are always present
    temperatures: list[TemperatureFigures] | None = None
    lossy: list[LossyFigures] | None = None

    @property
    def medusa(self) -> MethodFigures:
        """The metrics of decoding with the drafter that the benchmark tests."""
        return self.methods["medusa"]

    @property
    def subject(self) -> str:
        """The backbone and the drafter, in words."""
        return f"{self.settings.backbone} with {in_words(self.settings.drafter, self.settings.heads)}"

    @property
    def next_commands(self) -> list[str]:
        """The commands that a reader types after this benchmark: to use the drafter, or to look for a faster one."""
        settings, is_usual = self.settings, self.machine.dtype == "float32" or self.machine.gpu is not None
        options = [] if is_usual else ["--dtype", self.machine.dtype]
        by_heads = settings.heads is not None and settings.drafter == "heads"
        named = ["--backbone", settings.backbone, "--drafter", settings.drafter]
        given = [settings.heads or "", *options] if by_heads else [*named, *options]
        if not by_heads and settings.heads is not None:
            given += ["--heads", settings.heads]
        if by_heads and self.headline.verdict != FASTER:
            return [shlex.join(["medusa", "calibrate", *given, "--prompts", "FILE"])]
        write = ["medusa", "generate", *given, "--prompt", "Once upon a time"]
        return [shlex.join(write), shlex.join(["medusa", "chat", *given, "--web"])]

    @property
    def headline(self) -> Headline:
        """The gain over plain decoding in words, or that there is none, or why none was measured.

        The verdict is `not measured` if there were no steps, or too few batches of prompts or rounds for an interval.
        It is `no measurable gain` if nothing was drafted or accepted, or if the interval contains 1."""
        medusa, settings, machine = self.medusa, self.settings, self.machine
        if reason := self._not_measured():
            return Headline(NOT_MEASURED, "No speedup measured", f"No headline: {reason}")
        verdict = _verdict(medusa.speedup_interval)
        if medusa.tau <= 1 or settings.nodes == 1:
            verdict = NO_GAIN
            idle = "the tree has one node, the root, so nothing was drafted"
            why = idle if settings.nodes == 1 else "no drafted token was accepted"
            claim = f"No measurable gain over plain decoding: {why}."
        elif verdict == NO_GAIN:
            claim = (
                f"No measurable gain over plain decoding: the {PERCENT} interval of the speedup, "
                f"{interval_in_words(medusa.speedup_interval)}, contains 1."
            )
        else:
            claim = _sentence("Decoding with the drafter", "plain decoding", medusa.speedup, medusa.speedup_interval)
            over_generate = medusa.speedup_vs_generate, medusa.speedup_vs_generate_interval
            claim += " " + _sentence("It", "model.generate", *over_generate)
        tau = f"tau, the mean number of tokens per step, is {medusa.tau:.2f}."
        threads, prompts = counted(machine.threads, "thread"), counted(settings.prompts, "prompt")
        counts = f"{prompts} of at most {settings.max_new_tokens} new tokens, batch size {settings.batch_size}"
        options = f"{counted(settings.rounds, 'round')}, temperature {settings.temperature:g}"
        measured = f"Measured: {self.subject}, {machine.dtype} on {machine.device}, {threads}, {counts}, {options}."
        title = TITLES[verdict].format(medusa.speedup)
        return Headline(verdict, title, " ".join((claim, tau, self._equal_texts(), measured)))

    def _not_measured(self) -> str:
        """Return why the figures allow no headline, and what to change; empty if they allow one."""
        settings = self.settings
        if not self.medusa.steps:
            return (
                "no decoding step was measured, because every text ended at once. Give prompts that the model "
                "continues, or --ignore-eos."
            )
        batches, needs = -(-settings.prompts // settings.batch_size), []
        if batches < MIN_BATCHES:
            needs.append(f"{MIN_BATCHES} batches of prompts, and there were {batches}: give more prompts")
        if settings.rounds < MIN_ROUNDS:
            needs.append(f"{MIN_ROUNDS} rounds, and there were {settings.rounds}: give more rounds (--rounds)")
        if needs:
            return f"an interval needs at least {'; and at least '.join(needs)}."
        if self.medusa.speedup_interval is None:
            return "these figures have no intervals, because an earlier version measured them. Run the benchmark again."
        return ""

    @property
    def misprediction(self) -> str:
        """How far tau is from the tau that a calibration predicted, and the likely reason; empty if they agree."""
        medusa, settings = self.medusa, self.settings
        if medusa.predicted is None or not medusa.steps:
            return ""
        length = medusa.new_tokens / settings.prompts
        return medusa.predicted.difference(medusa.tau, medusa.tau_interval, settings.prompts_sha256, length)

    def _equal_texts(self) -> str:
        """Say how many texts equal those of plain decoding and of `model.generate`, in one sentence."""
        settings, medusa = self.settings, self.medusa
        if is_lossy(settings.acceptance):
            return f"Acceptance {settings.acceptance} is lossy: the texts may differ from those of plain decoding."
        if settings.temperature > 0:
            return "The texts are sampled, so they are not compared."
        equal = round(medusa.equal_to_plain * settings.prompts)
        told = f"{equal} of {settings.prompts} texts equal those of plain decoding"
        if medusa.equal_to_generate is None:  # an earlier version wrote the file
            return f"{told}."
        if medusa.equal_to_generate == medusa.equal_to_plain == 1:
            return f"{told} and of model.generate."
        told += f", and {round(medusa.equal_to_generate * settings.prompts)} those of model.generate."
        if equal == settings.prompts:
            return told
        return f"{told} medusa verify measures whether, in the others, {near_tie(self.machine.dtype)}."

    def to_json(self) -> dict[str, object]:
        """Return the content of the file that `medusa benchmark --json` writes."""
        measured = {name: value for name, value in asdict(self).items() if value is not None}
        methods = {name: figures.to_json() for name, figures in self.methods.items()}
        told = {"settings": self.settings.to_json(), "methods": methods, "headline": asdict(self.headline)}
        return measured | told

    @classmethod
    def from_json(cls, content: object, name: str) -> BenchmarkResult:
        """Make a result from the content of the JSON file `name`; raise RequestError if it is not a benchmark."""
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError:
            raise RequestError(f"{name} is not a benchmark; give a file that medusa benchmark --json wrote") from None

    def require_prompts(self, name: str) -> None:
        """Raise RequestError if the file `name` has no metrics of single prompts, which a comparison needs."""
        if "medusa" not in self.methods or None in (self.medusa.prompts, self.settings.prompts_sha256):
            why = "an earlier version wrote it; run the benchmark again"
            raise RequestError(f"{name} holds no figures of its prompts: {why}")
