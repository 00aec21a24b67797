"""The description of the machine in a benchmark."""

from __future__ import annotations

from dataclasses import asdict

from decode.bench.machine import machine


def test_the_machine_is_described() -> None:
    about = asdict(machine())
    assert {"processor", "gpu", "threads", "system", "python", "torch", "transformers"} == about.keys()
    assert about["processor"]
