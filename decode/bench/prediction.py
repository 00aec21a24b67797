"""Compares the tau that a calibration predicted for a tree with the tau that a benchmark measured with this tree."""

from __future__ import annotations

from dataclasses import dataclass

from decode.bench.calibration.stored import RecordedTexts
from decode.bench.headline import PERCENT, Interval, interval_in_words

TOLERANCE = 0.05  # a larger difference, relative to the prediction, is reported
OTHER_LENGTH = 1.25  # texts that are so many times as long as others are called longer


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
