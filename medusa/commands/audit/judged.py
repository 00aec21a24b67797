"""What an audit finds: deviations of greedy texts, and tests of sampled first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from decode.bench.losslessness.cases import CAUTION, FALSE_ALARM
from decode.bench.losslessness.chi2 import GoodnessOfFit
from medusa.commands.audit.asked import Setting
from medusa.files import Json

SHOWN = 5  # faults that are printed for each way of asking
ROUNDING_16 = 1.0  # logits: bfloat16 changed gaps by up to 0.75 on SmolLM2-135M


@dataclass(frozen=True)
class Deviation:
    """A token of the server that is not the reference's most probable one at its place."""

    prompt: int  # index of the prompt
    position: int  # index of the token in the text
    written: str
    expected: str
    gap: float | None  # logit of `expected` minus that of `written`; `None` if the reference gives none
    tolerance: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the deviation."""
        return self.gap is not None and self.gap <= self.tolerance

    def __str__(self) -> str:
        gap = "" if self.gap is None else f" ({self.gap:.3g} below)"
        written, expected = repr(self.written), repr(self.expected)
        return f"prompt {self.prompt + 1}, token {self.position + 1}: {written}{gap} instead of {expected}"


@dataclass
class Texts:
    """The greedy texts of all prompts, asked in one way and judged."""

    way: str
    texts: int
    tokens: int = 0
    deviations: list[Deviation] = field(default_factory=list)

    @property
    def faults(self) -> list[Deviation]:
        return [found for found in self.deviations if not found.is_tie]

    @property
    def ties(self) -> list[Deviation]:
        return [found for found in self.deviations if found.is_tie]

    @property
    def largest(self) -> float:
        """The largest gap of a near tie; 0 without one."""
        return max((found.gap or 0.0 for found in self.ties), default=0.0)

    def to_json(self) -> Json:
        listed = [asdict(found) | {"is_tie": found.is_tie} for found in self.deviations]
        return {"texts": self.texts, "tokens": self.tokens, "near_ties": len(self.ties), "deviations": listed}


@dataclass
class Sampled:
    """A chi-square test of the first tokens after one prompt, or of all tokens of sampled texts."""

    prompt: int | None  # index of the prompt; `None`: the texts of several prompts
    setting: Setting
    fit: GoodnessOfFit
    remark: str = ""  # how the distribution was made, if not in transformers' order

    def to_json(self) -> Json:
        named = {"prompt": self.prompt, **self.setting._asdict(), "remark": self.remark}
        return named | {"impossible_draws": self.fit.impossible} | self.fit._asdict()


@dataclass
class Audit:
    """The result of an audit."""

    about: Json
    limits: list[str]
    tolerance: str  # which gap counts as a near tie, and why
    greedy: list[Texts]
    changed: int  # texts that differ between both ways of asking
    sampled: list[Sampled]

    @property
    def smallest(self) -> float:
        """The smallest p-value that passes, as for `medusa verify` of a drafter (`cases.threshold`)."""
        return FALSE_ALARM / CAUTION / max(len(self.sampled), 1)

    @property
    def failed(self) -> list[Sampled]:
        return [case for case in self.sampled if not case.fit.p_value >= self.smallest]

    @property
    def passed(self) -> bool:
        return not self.failed and not any(way.faults for way in self.greedy)

    @property
    def hint(self) -> str | None:
        """What to try if all faults are as small as rounding in a dtype of 16 bits."""
        gaps = [fault.gap for way in self.greedy for fault in way.faults]
        if not gaps or self.about.get("dtype") != "float32" or any(gap is None or gap > ROUNDING_16 for gap in gaps):
            return None
        return "all gaps are small; if the server computes in bfloat16 or float16, add --dtype bfloat16 or float16"

    def to_json(self) -> Json:
        """Return the content of --json."""
        limits: Json = {"false_alarm_rate": FALSE_ALARM, "smallest_allowed_p_value": self.smallest}
        greedy: Json = {"tolerance": self.tolerance, "changed_together": self.changed}
        greedy |= {way.way: way.to_json() for way in self.greedy}
        sampling = limits | {"cases": [case.to_json() for case in self.sampled]}
        return {
            "settings": self.about,
            "limits": self.limits,
            "greedy": greedy,
            "sampling": sampling,
            "passed": self.passed,
        }

    def greedy_rows(self) -> list[list[str]]:
        """Return a row of the printed table for each way of asking."""
        rows = []
        for way in self.greedy:
            ties = f"{len(way.ties)}" + (f" (up to {way.largest:.2g})" if way.ties else "")
            verdict = "FAULT" if way.faults else "passed"
            rows.append([way.way, str(way.texts), str(way.tokens), ties, str(len(way.faults)), verdict])
        return rows

    def sampled_rows(self) -> list[list[str]]:
        """Return a row of the printed table for each test of first tokens."""
        rows = []
        for case in self.sampled:
            fit, setting = case.fit, case.setting
            figures = [f"{fit.total_variation:.3f}", f"{fit.expected_total_variation:.3f}", f"{fit.p_value:.2g}"]
            verdict = "passed" if fit.p_value >= self.smallest else "FAULT"
            about = ["texts" if case.prompt is None else f"prompt {case.prompt + 1}", str(setting), str(fit.draws)]
            rows.append([*about, *figures, verdict + (f", {case.remark}" if case.remark else "")])
        return rows


def shown_faults(ways: Sequence[Texts]) -> list[str]:
    """Describe the first fault of each text, at most `SHOWN` in each way of asking."""
    lines = []
    for way in ways:
        first = {found.prompt: found for found in reversed(way.faults)}
        lines += [f"{way.way}: {found}" for found in sorted(first.values(), key=lambda one: one.prompt)[:SHOWN]]
        lines += [f"{way.way}: faults in {len(first) - SHOWN} more texts"] if len(first) > SHOWN else []
    return lines
