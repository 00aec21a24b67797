"""The figures of a benchmark, and their JSON as `medusa benchmark --json` writes it (docs/measuring.md).

Files of earlier versions lack some of the names; the fields of these names have defaults.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from decode.bench.calibration.stored import Calibration
from decode.bench.machine import Machine
from medusa.errors import RequestError

Interval = tuple[float, float]
"""The bounds between which 95 % of resampled figures lie (`decode.bench.compare`)."""


@dataclass
class Rate:
    """Tokens per second over the rounds of a run."""

    median: float
    min: float
    max: float


@dataclass
class PromptFigures:
    """Counts and times of one method for one prompt."""

    batch: int
    """Index of the batch that the prompt was decoded in."""
    new_tokens: int
    steps: int
    uncut_tokens: int
    """Tokens of all steps before any cut; tau is their number divided by `steps`."""
    seconds: list[float]
    """Decoding time in each round."""


@dataclass
class PositionFigures:
    """tau of the steps that start in one stretch of the text."""

    start: int
    """First position of the stretch, counted in new tokens."""
    tau: float
    steps: int


@dataclass
class AcceptedNode:
    """How often one node of the tree was accepted."""

    path: list[int]
    """Rank of the guess of each head, from the root down."""
    share: float
    """Fraction of all steps that accepted the node."""


@dataclass
class MethodFigures:
    """The figures of one method, over all prompts or over one category of them."""

    tokens_per_second: Rate
    tau: float
    steps: int
    new_tokens: int
    accepted_by_depth: list[float]
    """Fraction of steps that accepted a node of depth d + 1."""
    speedup: float
    """Tokens per second, divided by those of our own plain loop."""
    speedup_vs_generate: float
    """Tokens per second, divided by those of `model.generate`."""
    equal_to_plain: float
    """Fraction of prompts with the same text as plain decoding."""
    tau_interval: Interval | None = None
    speedup_interval: Interval | None = None
    speedup_vs_generate_interval: Interval | None = None
    tau_by_position: list[PositionFigures] | None = None
    prompts: list[PromptFigures] | None = None
    step_ms: dict[str, float] | None = None
    """Milliseconds of a step by stage; `model.generate` does not show its steps."""
    by_category: dict[str, MethodFigures] | None = None
    accepted_by_node: list[AcceptedNode] | None = None
    """Measured only for a report."""
    calibration: Calibration | None = None
    """The stored calibration for the situation of the run; looked up only for a report."""

    def to_json(self) -> dict[str, object]:
        """The figures by name, without those that were not measured."""
        content = asdict(self)
        if self.by_category is not None:
            content["by_category"] = {name: part.to_json() for name, part in self.by_category.items()}
        optional = ["tau_by_position", "prompts", "step_ms", "by_category", "accepted_by_node"]
        if self.accepted_by_node is None:  # a report has looked for a calibration: None says that there is none
            optional.append("calibration")
        return {name: value for name, value in content.items() if value is not None or name not in optional}


@dataclass
class MemoryFigures:
    """Bytes of weights, and peak memory by place (`medusa.memory.peak_memory`)."""

    backbone: int
    heads: int
    peak: dict[str, int]


@dataclass
class BenchmarkMachine(Machine):
    """The machine of a benchmark, with the dtype and the memory of the run."""

    dtype: str
    memory: MemoryFigures | None = None
    medusa: str | None = None
    """Version of this package."""


@dataclass
class RunSettings:
    """What was measured, on which prompts, and how."""

    max_new_tokens: int
    temperature: float
    acceptance: str
    generation: dict[str, object]
    """The other entries of `Settings.to_dict()`. The JSON lists them among the fields of this class."""
    backbone: str
    heads: str | None
    prompts: int
    """Number of prompts."""
    rounds: int
    batch_size: int
    drafter: str = "heads"
    tree: object = None
    """The paths of the tree; a dynamic tree is described by its options."""
    nodes: int | None = None
    prompts_sha256: str | None = None
    """Hash of the prompts' ids: runs with equal hashes can be paired."""
    seed: int = 0
    command: str = ""
    date: str = ""
    commit: str | None = None

    def to_json(self) -> dict[str, object]:
        """All settings by name."""
        content = asdict(self)
        return content.pop("generation") | content


def _with_generation(content: object) -> object:
    """Collect the entries that are not fields of `RunSettings` in its field `generation`."""
    if not isinstance(content, dict):
        return content
    own = {field.name for field in fields(RunSettings)}
    return content | {"generation": {name: value for name, value in content.items() if name not in own}}


@dataclass
class TemperatureFigures:
    """Lossless decoding with heads at one temperature."""

    temperature: float
    tau: float
    tau_interval: Interval | None
    speedup_vs_generate: float
    speedup_vs_generate_interval: Interval | None


@dataclass
class LossyFigures:
    """One acceptance rule at one temperature, with the likelihood of its texts."""

    acceptance: str
    lossless: bool
    temperature: float
    tau: float
    speedup_vs_generate: float
    log_likelihood: float
    """Mean log-likelihood of a new token under the backbone, in nats."""


@dataclass
class BenchmarkResult:
    """One run of `medusa benchmark`."""

    machine: BenchmarkMachine
    settings: Annotated[RunSettings, BeforeValidator(_with_generation)]
    methods: dict[str, MethodFigures]
    """By name; `plain`, `transformers` and `medusa` are always among them."""
    temperatures: list[TemperatureFigures] | None = None
    lossy: list[LossyFigures] | None = None

    @property
    def medusa(self) -> MethodFigures:
        """The figures of the drafter under test."""
        return self.methods["medusa"]

    def to_json(self) -> dict[str, object]:
        """The content of the JSON file."""
        content: dict[str, object] = {
            "machine": asdict(self.machine),
            "settings": self.settings.to_json(),
            "methods": {name: figures.to_json() for name, figures in self.methods.items()},
        }
        measured = {"temperatures": self.temperatures, "lossy": self.lossy}
        return content | {name: list(map(asdict, rows)) for name, rows in measured.items() if rows is not None}

    @classmethod
    def from_json(cls, content: object, name: str) -> BenchmarkResult:
        """Read the content of a JSON file. Error messages call the file `name`.

        Raises:
            RequestError: the file holds no benchmark."""
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError:
            raise RequestError(f"{name} is not a benchmark; give a file that medusa benchmark --json wrote") from None

    def require_prompts(self, name: str) -> None:
        """Check that the figures of each prompt are there, from which runs are compared.

        Raises:
            RequestError: the file `name` lacks these figures, as an earlier version wrote it."""
        if "medusa" not in self.methods or None in (self.medusa.prompts, self.settings.prompts_sha256):
            why = "an earlier version wrote it; run the benchmark again"
            raise RequestError(f"{name} holds no figures of its prompts: {why}")
