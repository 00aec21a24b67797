"""Benchmarks with made-up times and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.bench.benchmark import Contender, StageTimer, run_rounds, summarize
from decode.bench.calibration.stored import Calibration, CalibrationPoint, RecordedTexts
from decode.bench.figures import AcceptedNode, MethodFigures, Prediction
from decode.bench.result import (
    BenchmarkMachine,
    BenchmarkResult,
    LossyFigures,
    MemoryFigures,
    RunSettings,
    TemperatureFigures,
)
from decode.texts import Result

TOKENS = 12


class Fake:
    """A method that takes `seconds[call]` for a batch and gives every prompt 12 tokens in steps of `length`."""

    def __init__(self, name: str, seconds: Sequence[float], length: int = 1, order: list[str] | None = None) -> None:
        self.name, self.seconds, self.length, self.calls, self.order = name, seconds, length, 0, order

    def __call__(self, prompts: Sequence[Sequence[int]], on_step: Any = None, seeds: Any = None) -> list[Result]:
        seconds = self.seconds[self.calls % len(self.seconds)]
        self.calls += 1
        if self.order is not None:
            self.order.append(f"{self.name}{prompts[0][0]}")
        steps = [self.length] * (TOKENS // self.length)
        return [Result(list(p), [p[0]] * TOKENS, steps, list(steps), "length", seconds) for p in prompts]


def contenders(plain: Any, transformers: Any, medusa: Any) -> list[Contender]:
    methods = {"plain": plain, "transformers": transformers, "medusa": medusa}
    return [Contender(name, method) for name, method in methods.items()]


def result_of(methods: dict[str, MethodFigures], **settings: Any) -> BenchmarkResult:
    """A benchmark with these figures; `settings` are fields of `RunSettings`."""
    machine = BenchmarkMachine(
        processor="a processor",
        gpu=None,
        threads=1,
        system="Linux",
        python="3.11",
        torch="2.13",
        transformers="5.23",
        dtype="float32",
        memory=MemoryFigures(22_000_000, 4_000_000, {"process": 600_000_000}),
        medusa="0.1.0",
    )
    about: dict[str, Any] = {
        "max_new_tokens": TOKENS,
        "temperature": 0.0,
        "acceptance": "greedy",
        "generation": {"stop": []},
        "backbone": "demo",
        "heads": "<b>heads</b>",
        "prompts": 8,
        "rounds": 2,
        "batch_size": 1,
        "tree": [[0], [1], [0, 0]],
        "nodes": 4,
        "prompts_sha256": "x",
        "date": "2026-01-02",
        "commit": "abc",
        "command": "medusa benchmark --x 'a b'",
    }
    return BenchmarkResult(machine, RunSettings(**about | settings), methods)


def outcome(seconds: list[float], **settings: Any) -> BenchmarkResult:
    """A result with everything that a page can show, from methods with made-up times."""
    clocks = StageTimer(), StageTimer()
    them = [
        Contender("plain", Fake("p", [1.0, 1.1]), clocks[0]),
        Contender("transformers", Fake("t", [1.3, 1.2])),
        Contender("medusa", Fake("m", [1.0, *seconds], 3), clocks[1]),
    ]
    run_rounds(them, [[[index]] for index in range(8)], rounds=2)
    for clock in clocks:
        clock.seconds = {"propose": 0.1, "verify": 0.7, "accept": 0.05, "compact": 0.02, "other": 0.03}
    result = result_of(summarize(them, ["narration", "dialogue"] * 4), **settings)
    medusa = result.medusa
    medusa.accepted_by_node = [
        AcceptedNode(path, share) for path, share in (([0], 0.9), ([0, 0], 0.8), ([1], 0.05), ([2], 0.004))
    ]
    points = [CalibrationPoint(n, [], 1 + n / 8, 3 + n / 4, n == 8) for n in (1, 4, 8)]
    medusa.calibration = Calibration(points, 2, [1.0], {}, RecordedTexts(32))
    medusa.predicted = Prediction(3.75, RecordedTexts(32, 3072, source="a<b.jsonl"))
    result.temperatures = [
        TemperatureFigures(
            at, medusa.tau, medusa.tau_interval, medusa.speedup_vs_generate, medusa.speedup_vs_generate_interval
        )
        for at in (0.0, 1.0)
    ]
    result.lossy = [LossyFigures("typical", False, 1.0, 3.25, 2.125, -1.375)]
    return result
