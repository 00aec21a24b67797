"""One verification: greedy texts compared, and draws of the first prompts tested."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decode.bench.job import Job
from decode.bench.losslessness.cases import FALSE_ALARM, Case, passes, rules_for, threshold
from decode.bench.losslessness.context import require_room
from decode.bench.losslessness.experiment import Experiment
from decode.bench.losslessness.greedy import GreedyOutcome, compare_greedy
from medusa.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Verification(Job):
    """What to verify, and how much of it. The settings are those of greedy decoding.

    Raises:
        RequestError: a drafter that drafts nothing, or a prompt that leaves no room to draw."""

    draws: int = 1_000_000
    sampled_prompts: int = 4
    """Number of prompts, the first ones, that are drawn from."""
    full: bool = False
    """Try three temperatures, with and without top-p, instead of one."""

    def __post_init__(self) -> None:
        if self.source.num_nodes == 1:
            raise RequestError("the tree chain:0 drafts nothing, so there is nothing to verify; give a deeper one")
        require_room(self.prompts[: self.sampled_prompts], self.settings, self.loaded.model)

    @property
    def targets(self) -> list[tuple[float, float]]:
        """The (temperature, top-p) of all targets."""
        temperatures, top_ps = ((0.5, 1.0, 1.5), (1.0, 0.9)) if self.full else ((1.0,), (1.0,))
        return [(temperature, top_p) for temperature in temperatures for top_p in top_ps]


@dataclass
class VerificationResult:
    """Both experiments of a verification."""

    asked: Verification
    greedy: GreedyOutcome
    cases: list[Case]

    @property
    def passed(self) -> bool:
        return self.greedy.passed and passes(self.cases)

    def to_json(self) -> dict[str, object]:
        """The content of `medusa verify --json`."""
        asked, settings = self.asked, self.asked.settings
        about = {
            "backbone": asked.loaded.name,
            "heads": asked.heads,
            "drafter": asked.drafter,
            "tree": asked.tree,
            "nodes": asked.source.num_nodes,
            "amateur": None if settings.amateur is None else settings.amateur.to_dict(),
            "dtype": asked.dtype,
            "max_new_tokens": settings.max_new_tokens,
            "batch_size": asked.batch_size,
            "epsilon": settings.epsilon,
            "delta": settings.delta,
            "seed": asked.seed,
        }
        sampling = {
            "draws": asked.draws,
            "false_alarm_rate": FALSE_ALARM,
            "smallest_allowed_p_value": threshold(self.cases),
            "cases": [line for case in self.cases for line in case.to_json()],
        }
        return {"settings": about, "greedy": self.greedy.to_json(), "sampling": sampling, "passed": self.passed}


def verify(asked: Verification) -> VerificationResult:
    """Run both experiments. Only greedy decoding with the drafter is compiled, if asked for."""
    plainly = replace(asked.settings, compile=False)
    greedy = compare_greedy(
        asked.loaded.model,
        asked.plain(plainly),
        asked.drafted(asked.settings),
        asked.prompts,
        asked.batch_size,
        asked.start_progress("greedy", len(asked.prompts)),
        asked.settings.amateur,
    )
    rules, chosen, model = rules_for(asked.source), asked.prompts[: asked.sampled_prompts], asked.loaded.model
    advance = asked.start_progress("draws", len(chosen) * len(asked.targets) * len(rules) * asked.draws)
    generator = torch.Generator(model.device).manual_seed(asked.seed)
    cases = []
    for number, prompt in enumerate(chosen):
        for temperature, top_p in asked.targets:
            sampling = replace(plainly, temperature=temperature, top_p=top_p)
            experiment = Experiment(model, asked.source, prompt, sampling, generator)
            cases += [experiment.run(rule, number, asked.draws, advance) for rule in rules]
    return VerificationResult(asked, greedy, cases)
