"""The figures of the methods of a benchmark, and whether a calibration predicted them.

tau is the mean number of tokens per step, root included: over the steps of all texts together (`tau`), or computed for
each text and then averaged over the texts (`mean_tau`). Files of earlier versions may lack the fields with defaults.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from decode.bench.calibration.stored import Calibration, RecordedTexts

Interval = tuple[float, float]  # bounds of 95 % of the resampled values of a metric (`decode.bench.compare`)
CONFIDENCE = 0.95  # of all intervals
PERCENT = f"{CONFIDENCE * 100:g} %"
TOLERANCE = 0.05  # a larger difference, relative to the prediction, is reported
OTHER_LENGTH = 1.25  # texts that are so many times as long as others are called longer


def interval_in_words(interval: Interval | None) -> str:
    """Format an interval for tables and sentences, such as `1.20 to 1.35`. `None` becomes an empty string."""
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


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
class Prediction:
    """The tau (mean tokens per step) that a calibration predicted for a tree, and the texts that it was made from."""

    tau: float
    texts: RecordedTexts

    def difference(self, tau: float, interval: Interval | None, prompts_sha256: str | None, length: float) -> str:
        """Say how far the measured `tau`, with its 95 % `interval`, is from the prediction, and the likely reason.

        The result is empty if the two differ by at most `TOLERANCE`. `prompts_sha256`: hash of the benchmark's prompts.
        `length`: mean number of new tokens of its texts."""
        excess = tau / self.tau - 1
        if abs(excess) <= TOLERANCE:
            return ""
        side = "higher" if excess > 0 else "lower"
        told = f"tau is {tau:.2f}, {abs(excess):.0%} {side} than the calibration predicted ({self.tau:.2f})"
        return f"{told}. Likely reason: {self._reason(interval, prompts_sha256, length)}."

    def _reason(self, interval: Interval | None, prompts_sha256: str | None, length: float) -> str:
        if interval is not None and interval[0] <= self.tau <= interval[1]:
            return f"chance, as the {PERCENT} interval over prompts is {interval_in_words(interval)}; give more prompts"
        if self.texts.prompts_sha256 is None or self.texts.prompts_sha256 != prompts_sha256:
            other = f"the calibration was made from other text, {self.texts.described}"
            return f"{other}; calibrate with prompts like these"
        calibrated = self.texts.tokens / max(self.texts.texts, 1)
        if max(calibrated, length) >= OTHER_LENGTH * min(calibrated, length):
            lengths = f"{length:.0f} tokens on average, and those of the calibration {calibrated:.0f}"
            return f"these texts have {lengths}; calibrate with the same --max-new-tokens"
        return "chance, or rounding that changed the text; calibrate with more prompts"


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
