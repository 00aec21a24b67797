"""The description of the machine in a benchmark."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import ClassVar

import pytest
import torch

from decode.bench.benchmark import StageTimer
from decode.bench.machine import commit, machine, stopwatch


def test_the_machine_is_described() -> None:
    about = asdict(machine())
    assert {"processor", "gpu", "threads", "system", "python", "torch", "transformers"} == about.keys()
    assert about["processor"]


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert commit() is None


def test_the_clock_waits_for_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "synchronize", waited.append)
    stopwatch(torch.device("cuda:1"))()
    assert waited == [torch.device("cuda:1")]


class Event:
    """An event of a made-up GPU, which works through its queue: an event is past once `done` reaches its place."""

    queued, done = 0.0, 0.0  # seconds of work
    streams: ClassVar[list[object]] = []
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.place = Event.queued
        Event.streams.append(stream)

    def query(self) -> bool:
        return Event.done >= self.place

    def synchronize(self) -> None:
        Event.waits += Event.done < self.place
        Event.done = max(Event.done, self.place)

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.place - self.place)


def test_stages_on_a_gpu_are_timed_without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 3 s (propose), 5 s (verify) and 1 s (other) on the second GPU."""

    def must_not_wait(device: object = None) -> None:
        raise AssertionError("the timer made a step wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", must_not_wait)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = StageTimer(torch.device("cuda:1"))
    for _ in range(2):
        clock.start()
        for stage, seconds in {"propose": 3.0, "verify": 5.0, "other": 1.0}.items():
            Event.queued += seconds
            clock.lap(stage)
    assert Event.waits == 0
    assert clock.seconds == {"propose": 6.0, "verify": 10.0, "accept": 0.0, "compact": 0.0, "other": 2.0}
    assert set(Event.streams) == {"stream of cuda:1"}
    Event.done = Event.queued
    clock.start()
    assert clock.seconds["other"] == 2.0, "reading the seconds twice counts nothing twice"
