"""The context of a stage: its sizes, folders and GPU monitor, and the file that every figure is appended to."""

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
from types import SimpleNamespace

import torch
import yaml

from medusa.__main__ import main as medusa
from medusa.files import read_json

Figure = dict[str, object]
FIGURES = "figures.jsonl"
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")  # MHz, MHz, W, degrees Celsius
# Sizes of everything that the battery measures. scale.yaml says what each one means.
SIZES = yaml.safe_load(Path(__file__).with_name("scale.yaml").read_text(encoding="utf-8"))
FULL, TOY = SimpleNamespace(**SIZES["full"]), SimpleNamespace(**SIZES["toy"])


def append(output: Path, figure: Figure) -> None:
    """Append a figure to the file of figures; the line is on disk when this function returns."""
    with (output / FIGURES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(figure) + "\n")


def read_figures(output: Path) -> dict[str, list[Figure]]:
    """Read the figures of the last run of each stage, in the order in which the stages ran."""
    found: dict[str, list[Figure]] = {}
    place = output / FIGURES
    for line in place.read_text(encoding="utf-8").splitlines() if place.is_file() else ():
        figure = json.loads(line)
        if figure.get("event") == "start":
            found.pop(figure["stage"], None)
        found.setdefault(figure["stage"], []).append(figure)
    return found


class GpuMonitor:
    """Follows the GPU's clocks, power and temperature, which nvidia-smi reports five times a second."""

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
    """One run of one stage, which may take `seconds`."""

    stage: str
    output: Path
    scale: SimpleNamespace
    device: str
    seconds: float

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.monitor = GpuMonitor()
        self.on_gpu = self.device.startswith("cuda")
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.backbone, self.prompts = self.output / "backbone", self.output / "prompts.jsonl"

    def heads(self, kind: str) -> Path:
        """Return the folder of the trained heads of this kind."""
        return self.output / "heads" / kind

    def keep(self, **figure: object) -> None:
        """Append a figure of this stage to the file of figures, with the GPU's clocks, power and temperature."""
        append(self.output, {"stage": self.stage} | figure | self.monitor.latest)

    @contextmanager
    def attempt(self, **about: object) -> Iterator[None]:
        """Record an exception inside the block as a figure, so that the stage goes on with its other figures."""
        try:
            yield
        except Exception as error:
            self.keep(**about, error=f"{type(error).__name__}: {error}".splitlines()[0][:300])

    def medusa(self, command: str, *more: object, result: str | None = None) -> dict[str, object]:
        """Run a `medusa` command in this process; `result` names the JSON file of its results, which are returned.

        Raises:
            RuntimeError: the command failed and wrote no JSON."""
        argv, place = [command, *map(str, more)], self.output / "json" / f"{result}.json"
        if result:
            place.parent.mkdir(exist_ok=True)
            place.unlink(missing_ok=True)
            argv += ["--json", str(place)]
        print("$ medusa", *argv, flush=True)
        status = medusa(argv)
        if place.is_file():
            return read_json(place)
        if status:
            raise RuntimeError(f"medusa {command} ended with status {status}; see the log")
        return {}
