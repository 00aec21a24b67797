"""The model card of a set of heads: the template `card.md.j2`, filled with facts and measurements.

Measurements come from `provenance.json`, `calibration.json` and a file of `medusa benchmark --json`. Decoding speeds
are shown with the machine on which they were measured. If one of the files is missing, the card says so."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.errors import RequestError
from medusa.export.figures import Benchmark, Calibration, Provenance, require_figures
from medusa.files import Json, read_json
from medusa.places import HUB_ID
from medusa.records.sources import SUFFIXES
from medusa.tree import Tree

BOOKKEEPING = ("save_", "logging_", "eval_", "report_", "dataloader_", "disable_")
"""The prefixes of training settings that do not change the trained heads. The card leaves these settings out."""
LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
"""The form of the Hub's names of licences."""
FOLDERS = re.compile(r"(?:file://|(?<![\w/.~-])~?)/(?!/)(?:[^\s/'\"=,]+/)*")
"""The folders of an absolute path, or of a path in a home folder. Other URLs and Hub ids do not match."""
Content = TypeVar("Content")


@dataclass
class Facts:
    """Facts about heads for the model card. An invalid `license` or `repo_id` raises a RequestError."""

    repo_id: str | None = None
    """The id of the repository on the Hub; `None` if unknown."""
    license: str | None = None
    """The Hub's name of the licence, such as apache-2.0; `None` if unknown."""
    provenance: Json | None = None
    """The content of `provenance.json` (recipe, data, versions and results)."""
    calibrations: list[Json] = field(default_factory=list)
    """The entries of `calibration.json`, one for each calibrated machine."""
    benchmark: Json | None = None
    """The content of a file that `medusa benchmark --json` wrote."""

    def __post_init__(self) -> None:
        if self.license is not None and not LICENSE.fullmatch(self.license):
            raise RequestError(
                f"the license is {self.license!r}; give the Hub's name of it, such as apache-2.0, llama3.1 or other"
            )
        if self.repo_id is not None and not HUB_ID.fullmatch(self.repo_id):
            raise RequestError(f"the repository is {self.repo_id!r}; give its Hub id, such as org/heads")

    @property
    def data_name(self) -> str | None:
        """The name of the training data: the Hub id of a dataset, or the name of a file without its folders."""
        data = ((self.provenance or {}).get("config") or {}).get("data") or {}
        path: str | None = data.get("path")
        return path if is_hub_id(path) else without_folders(path)


def read_benchmark(path: str | Path) -> Json:
    """Read the benchmark of a set of heads from a file that `medusa benchmark --json` wrote.

    Raise RequestError if the file is not a benchmark, or it measured another drafter than heads."""
    content = read_json(Path(path))
    parts = ("machine", "settings", "methods")
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict) for part in parts):
        raise RequestError(f"{path} is no benchmark; give a file that medusa benchmark --json wrote")
    if not {"transformers", "medusa"} <= content["methods"].keys() or content["settings"].get("heads") is None:
        raise RequestError(f"{path} measured no heads; give a benchmark of these heads")
    drafter = content["settings"].get("drafter", "heads")
    if drafter != "heads":
        raise RequestError(
            f"{path} measured drafter {drafter!r} first, not these heads; repeat it with --drafter heads"
        )
    require_figures(Benchmark, content, str(path))
    return content


def is_hub_id(name: str | None) -> bool:
    """Whether a name has the form of a Hub id and is not a local file or folder."""
    is_file = name is None or Path(name).exists() or Path(name).suffix in SUFFIXES
    return not is_file and HUB_ID.fullmatch(str(name)) is not None


def without_folders(content: Content) -> Content:
    """Shorten absolute paths in JSON content, also inside longer strings, to the last component, for privacy.

    A path with spaces is found if it is a whole string, or an argument of a `command`."""
    clean: object = content
    if isinstance(content, dict):
        clean = {without_folders(key): without_folders(value) for key, value in content.items()}
        if isinstance(command := content.get("command"), str):
            clean["command"] = _private(command)
    elif isinstance(content, list):
        clean = [without_folders(value) for value in content]
    elif isinstance(content, str):
        whole = content.startswith(("file://", "~/")) or Path(content).is_absolute()
        clean = Path(content).name if whole else FOLDERS.sub("", content)
    return cast("Content", clean)


def _private(command: str) -> str:
    """Shorten the paths in the arguments of a command, which may be `key=path`."""
    try:
        words = shlex.split(command)
    except ValueError:  # written by an earlier version, which did not quote
        return FOLDERS.sub("", command)
    parts = [word.partition("=") for word in words]
    return shlex.join(f"{without_folders(name)}{equals}{without_folders(value)}" for name, equals, value in parts)


def model_card(heads: Checkpoint, facts: Facts, with_code: bool) -> str:
    """Return the model card (README.md) of a set of heads: metadata in YAML, and a page of text.

    Args:
        heads: the heads as they are written into the repository.
        with_code: whether the repository contains `custom_generate/generate.py`.

    Raise RequestError if a file of the facts lacks a figure that the card quotes."""
    _require_quotable(facts)
    base = heads.config.base_model_name_or_path
    name, base_is_on_hub = base or "an unknown backbone", is_hub_id(base)
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"listed": _listed, "machine": _machine}
    metadata = ModelCardData(
        base_model=base if base_is_on_hub else None,
        datasets=facts.data_name if is_hub_id(facts.data_name) else None,
        library_name="transformers" if with_code else "medusa-heads",
        license=facts.license,
        pipeline_tag="text-generation",
        tags=["medusa", "speculative-decoding", *(["custom_generate"] if with_code else [])],
    )
    return environment.get_template("card.md.j2").render(
        metadata=metadata.to_yaml(),
        bookkeeping=BOOKKEEPING,
        base=name if base_is_on_hub else Path(name).name,
        base_is_on_hub=base_is_on_hub,
        heads=heads,
        config=heads.config,
        facts=facts,
        tree=Tree.from_paths(heads.config.tree) if heads.config.tree else None,
        repo=facts.repo_id or "ORG/NAME-OF-THESE-HEADS",
        with_code=with_code,
        made=without_folders(facts.provenance),
        settings=without_folders((facts.benchmark or {}).get("settings")),
    )


def _require_quotable(facts: Facts) -> None:
    """Raise RequestError if a file of the facts lacks a figure that the card quotes."""
    if facts.benchmark is not None:
        require_figures(Benchmark, facts.benchmark, "the benchmark")
    for number, found in enumerate(facts.calibrations, 1):
        require_figures(Calibration, found, f"calibration.json, entry {number}")
    if facts.provenance is None:
        return
    require_figures(Provenance, facts.provenance, "provenance.json")
    for name, share in (facts.provenance.get("result") or {}).items():
        if name.startswith("head") and name.endswith("_top1") and not isinstance(share, int | float):
            raise RequestError(f"provenance.json: result.{name} is {share!r}, no number; train the heads again")
    tree = facts.provenance.get("tree") or {}
    if missing := [name for name in ("nodes", "texts") if "expected_tau" in tree and name not in tree]:
        raise RequestError(f"provenance.json: tree.{missing[0]} is missing; train the heads again")


def _machine(machine: Json) -> str:
    names = ("threads", "dtype", "torch", "transformers")
    place = machine.get("gpu") or machine.get("processor") or "a machine that was not named"
    return ", ".join([place, *(f"{name} {machine[name]}" for name in names if machine.get(name) is not None)])


def _listed(values: Json, without: tuple[str, ...] = ()) -> str:
    """Format a dictionary as `name value, name value`; omit empty values and names with a prefix in `without`."""
    known = {name: value for name, value in values.items() if value not in (None, {}) and not name.startswith(without)}
    return ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in known.items())


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
