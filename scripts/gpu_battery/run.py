"""What a stage works with: sizes, places, clocks, and a file that keeps every figure as soon as it is made."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch

from scripts.gpu_battery.scale import Scale

Figure = dict[str, object]
FIGURES = "figures.jsonl"
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")  # MHz, MHz, W, degrees Celsius


def append(output: Path, figure: Figure) -> None:
    """Add a line to the file of figures, written to disk before this returns."""
    with (output / FIGURES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(figure) + "\n")


def read_figures(output: Path) -> dict[str, list[Figure]]:
    """The figures of each stage's last run, in the order in which stages were run."""
    found: dict[str, list[Figure]] = {}
    place = output / FIGURES
    for line in place.read_text(encoding="utf-8").splitlines() if place.is_file() else ():
        figure = json.loads(line)
        if figure.get("event") == "start":
            found.pop(figure["stage"], None)
        found.setdefault(figure["stage"], []).append(figure)
    return found


class GpuMonitor:
    """The GPU's clocks, power and temperature, as nvidia-smi reports them five times a second."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        if shutil.which("nvidia-smi") and torch.cuda.is_available():
            Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits", "-lms", "200"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                values = zip(CLOCKS, line.replace(" ", "").split(","), strict=False)
                self.latest = {name: float(value) for name, value in values if value[:1].isdigit()}


@dataclass(eq=False)
class Run:
    """One run of one stage."""

    stage: str
    output: Path
    scale: Scale
    device: str
    seconds: float
    """How long the stage may take."""

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.monitor = GpuMonitor()
        self.on_gpu = self.device.startswith("cuda")
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.backbone, self.prompts = self.output / "backbone", self.output / "prompts.jsonl"

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def heads(self, kind: str) -> Path:
        """The folder of the trained heads of this kind."""
        return self.output / "heads" / kind

    def keep(self, **figure: object) -> None:
        """Write a figure to disk, with the GPU's clocks and power."""
        append(self.output, {"stage": self.stage} | figure | self.monitor.latest)

    @contextmanager
    def attempt(self, **about: object) -> Iterator[None]:
        """Keep what goes wrong inside as a figure, so that one failure does not cost the other figures."""
        try:
            yield
        except Exception as error:
            self.keep(**about, error=f"{type(error).__name__}: {error}".splitlines()[0][:300])

    def medusa(self, command: str, *more: object, result: str | None = None) -> dict[str, object]:
        """Run a `medusa` command in this process; returns the JSON that it wrote, if `result` names the file.

        Raises:
            RuntimeError: its exit status is not 0, and it wrote no JSON."""
        from medusa.__main__ import main

        argv = [*command.split(), *map(str, more)]
        place = self.output / "json" / f"{result}.json"
        if result:
            place.parent.mkdir(exist_ok=True)
            place.unlink(missing_ok=True)
            argv += ["--json", str(place)]
        print("$ medusa", *argv, flush=True)
        status = main(argv)
        if place.is_file():
            return json.loads(place.read_text(encoding="utf-8"))
        if status:
            raise RuntimeError(f"medusa {argv[0]} ended with status {status}; see the log")
        return {}
