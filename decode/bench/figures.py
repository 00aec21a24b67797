"""The metrics of a benchmark, and the JSON format in which `medusa benchmark --json` writes them (docs/results.md).

tau is the mean number of tokens per step, root included: over the steps of all texts together (`tau`), or computed for
each text and then averaged over the texts (`mean_tau`). Files of earlier versions may lack the fields with defaults.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from decode.bench.calibration.stored import Calibration
from decode.bench.headline import Evidence, Headline, Interval, counted, headline
from decode.bench.machine import Machine
from decode.bench.prediction import Prediction
from decode.rules import is_lossy
from medusa.errors import RequestError


@dataclass
class Rate:
    """Tokens per second of one method: the median, the slowest and the fastest round of a run."""

    median: float
    min: float
    max: float


@dataclass
class PromptFigures:
    """Token counts, step counts and times of one method on one prompt; `uncut_tokens` include those cut at the end."""

    batch: int  # index of the batch that the prompt was decoded in
    new_tokens: int
    steps: int
    uncut_tokens: int  # before the last step is cut at the end of the text; tau is `uncut_tokens / steps`
    seconds: list[float]  # decoding time in each round, in seconds. A batch's time is divided evenly among its prompts.

    @property
    def tau(self) -> float:
        """Mean tokens per step of this text; 0 without steps."""
        return self.uncut_tokens / self.steps if self.steps else 0.0


@dataclass
class PositionFigures:
    """tau (mean tokens per step) of the steps whose roots lie in one stretch of the generated text."""

    start: int  # number of new tokens before the stretch
    tau: float
    steps: int


@dataclass
class AcceptedNode:
    """A node of the draft tree (`path`: ranks of guesses from the root), and the `share` of steps that accepted it."""

    path: list[int]  # from the root: for each head, the rank of its guess; 0 is the head's best guess
    share: float  # fraction of all steps that accepted the node


@dataclass
class MethodFigures:
    """The metrics of one decoding method, for all prompts or for the prompts of one category."""

    tokens_per_second: Rate
    tau: float
    steps: int
    new_tokens: int
    accepted_by_depth: list[float]  # fraction of steps that accepted a node at depth 1, at depth 2, and so on
    speedup: float  # tokens per second, divided by the tokens per second of plain decoding in our own loop
    speedup_vs_generate: float  # tokens per second, divided by the tokens per second of transformers' `model.generate`
    equal_to_plain: float  # fraction of prompts whose texts equal those of plain decoding in every round
    equal_to_generate: float | None = None  # the same, for the texts of transformers' `model.generate`
    tau_interval: Interval | None = None
    mean_tau: float | None = None  # mean of the tau of each text; long texts count no more than short ones
    mean_tau_interval: Interval | None = None
    speedup_interval: Interval | None = None
    speedup_vs_generate_interval: Interval | None = None
    tau_by_position: list[PositionFigures] | None = None
    prompts: list[PromptFigures] | None = None
    step_ms: dict[str, float] | None = None  # mean milliseconds of a step in each stage; `None` without a timer
    by_category: dict[str, MethodFigures] | None = None
    accepted_by_node: list[AcceptedNode] | None = None  # measured only for a report
    predicted: Prediction | None = None  # by a calibration for the run's machine and settings that tried the tree
    calibration: Calibration | None = None  # stored for the run's machine and settings; read only for a report

    def to_json(self) -> dict[str, object]:
        """Return the metrics as a dict for JSON, without optional metrics that were not measured."""
        content = asdict(self)
        if self.by_category is not None:
            content["by_category"] = {name: part.to_json() for name, part in self.by_category.items()}
        optional = ["equal_to_generate", "mean_tau", "mean_tau_interval", "tau_by_position", "prompts", "step_ms"]
        optional += ["by_category", "accepted_by_node", "predicted"]
        if self.accepted_by_node is None:  # with a report, null means that no calibration is stored
            optional.append("calibration")
        return {name: value for name, value in content.items() if value is not None or name not in optional}


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
        settings = self.settings
        drafter = f"the drafter {settings.drafter}" if settings.heads is None else f"the heads {settings.heads}"
        return f"{settings.backbone} with {drafter}"

    @property
    def headline(self) -> Headline:
        """The gain over plain decoding in words, or that there is none, or why none was measured."""
        medusa, settings, machine = self.medusa, self.settings, self.machine
        threads, prompts = counted(machine.threads, "thread"), counted(settings.prompts, "prompt")
        counts = f"{prompts} of at most {settings.max_new_tokens} new tokens, batch size {settings.batch_size}"
        options = f"{counted(settings.rounds, 'round')}, temperature {settings.temperature:g}"
        return headline(
            Evidence(
                subject=self.subject,
                conditions=f"{machine.dtype} on {machine.device}, {threads}, {counts}, {options}",
                texts=self._equal_texts(),
                batches=-(-settings.prompts // settings.batch_size),
                rounds=settings.rounds,
                steps=medusa.steps,
                nodes=settings.nodes,
                tau=medusa.tau,
                speedup=medusa.speedup,
                interval=medusa.speedup_interval,
                speedup_vs_generate=medusa.speedup_vs_generate,
                interval_vs_generate=medusa.speedup_vs_generate_interval,
            )
        )

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
        return f"{told}, and {round(medusa.equal_to_generate * settings.prompts)} those of model.generate."

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
