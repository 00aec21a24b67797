"""Convert heads to the format of a server or another toolkit, and read the result again to compare the weights.

  medusa export runs/heads --to vllm --output exported
  medusa export runs/heads --to hub --output repository --benchmark bench.json

vLLM, SGLang and llama.cpp load heads of kind `eagle` with `heads.block=gated`, which `medusa fit --for vllm` trains,
and vLLM 0.33 and SGLang those of kind `dflash`.
TGI, and vLLM up to 0.32, load kind `medusa` with `heads.block=square`. `hub` takes the kinds `medusa` and `cascade`.
Heads of kind `markov`, which `medusa1` trains, run only here. The command prints how to serve the exported heads, and
what decoding in that server lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from medusa.commands.effects import require_of_kind, require_revisions
from medusa.commands.options import Output, warn
from medusa.errors import RequestError, RunError, choose_one_of
from medusa.export import FORMATS, MARK, REMOVED, WRITTEN
from medusa.files import Json, readable, replacing_folder, require_absent, require_writable_folder
from medusa.options import DTYPE_NAMES, REQUIRED, LoadOptions, Options, group, option
from medusa.places import may_be_on_hub, require_backbone, require_file, require_heads

if TYPE_CHECKING:
    from medusa.export.card import Facts


class ExportOptions(Options):
    shown = "heads to output backbone dtype overwrite benchmark license repo-id json quiet"
    by_position = ("heads",)
    heads: str = option(
        REQUIRED,
        "export these heads: a folder, a Hub id, or demo (shipped)",
        metavar="H",
        brief="export these heads: a folder, a Hub id, or demo",
        exists=require_heads,
    )
    to: str = option(REQUIRED, f"write this format: {', '.join(FORMATS)}", metavar="FORMAT")
    out: str = option(REQUIRED, "write the export to this folder", metavar="DIR", name="output")
    overwrite: bool = option(False, "replace an earlier export in the folder")
    backbone: str | None = option(
        None,
        "name this backbone, a folder, a GGUF file or a Hub id (default: the one that the heads record)",
        metavar="B",
        brief="name this backbone (default: the heads' own)",
        exists=require_backbone,
    )
    dtype: str | None = option(
        None,
        f"write weights as {', '.join(DTYPE_NAMES[:-1])} or {DTYPE_NAMES[-1]} (default: unchanged)",
        f"one of {', '.join(DTYPE_NAMES)}",
        lambda value: value in DTYPE_NAMES,
        brief="write weights as float32, bfloat16 or float16",
    )
    load: LoadOptions = group(LoadOptions, "loading", only=("revision", "trust_remote_code"))
    benchmark: str | None = option(
        None,
        "with --to hub: quote these results of medusa benchmark --json in the model card",
        metavar="FILE",
        brief="with --to hub: quote these results of the benchmark",
        exists=require_file,
    )
    license: str | None = option(
        None,
        "with --to hub: the license in the model card, by the Hub's name, such as apache-2.0",
        metavar="ID",
        brief="with --to hub: the license, such as apache-2.0",
    )
    repo_id: str | None = option(
        None,
        "with --to hub: name this repository in the model card",
        metavar="ORG/NAME",
        brief="with --to hub: the name of the repository",
    )
    output: Output = group(Output, "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_writable_folder(self.out, option="--output")
        require_revisions(self.backbone, self.load.revision)


def run(options: ExportOptions) -> None:
    export(options)


def export(options: ExportOptions) -> Json:
    """Export the heads, print and write what was exported, and return it."""
    from decode.bench.calibration.stored import calibrations_of
    from medusa.checkpoints.folder import find_folder, load
    from medusa.export.base import Export, Written
    from medusa.export.belonging import require_own_backbone
    from medusa.loading import DEMO as DEMO_BACKBONE
    from medusa.loading import DTYPES

    if options.to in REMOVED:
        raise RequestError(f"--to {options.to} does not work: {REMOVED[options.to]}")
    if options.to not in FORMATS:
        raise RequestError(f"--to is {options.to!r}; {choose_one_of(options.to, FORMATS)}")
    write: Callable[[Export], Written] = resolve_name(f"medusa.export.{FORMATS[options.to]}")
    facts = _facts(options)
    source, place = find_folder(options.heads), Path(options.out)
    require_absent(place, options.overwrite)
    heads = load(options.heads)  # by name, because a model with heads inside is recorded as their backbone
    heads = heads if options.dtype is None else heads.to(DTYPES[options.dtype])
    if options.to == "hub":
        facts.calibrations = calibrations_of(source)
    backbone = options.backbone or heads.config.base_model_name_or_path
    if backbone is None:
        raise RequestError(f"{options.heads} does not record its backbone; add --backbone B")
    local = DEMO_BACKBONE if backbone == "demo" else Path(backbone)
    name = str(local.resolve()) if local.exists() else backbone  # absolute: a server may start in another folder
    _require_replaceable(place, keep=[source, local])
    recorded = (heads.config.base_model_name_or_path, heads.config.backbone.get("name"))
    its_revision = heads.config.backbone.get("revision") if backbone in recorded and may_be_on_hub(backbone) else None
    load_options = replace(options.load, revision=options.load.revision or its_revision)
    unchecked = require_own_backbone(heads, backbone, load_options, is_named=options.backbone is not None)
    heads.config = replace(heads.config, base_model_name_or_path=name)
    with replacing_folder(place) as folder:
        written = write(Export(heads, name, folder, place, load_options, facts))
        if not load(folder).is_same(written.heads):
            raise RunError("read again, the exported weights differ from the heads; no files were kept")
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        (folder / MARK).write_text(f"{options.to}\n", encoding="utf-8")
        files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    notes = [*written.notes, *([unchecked] if unchecked and options.backbone not in recorded else [])]
    about: Json = {"format": options.to, "folder": options.out, "files": files}
    about |= {"serve": written.serve, "lost": written.lost, "notes": notes}
    options.output.write(about)
    lines = [f"{place}:", *(f"  {name}  {readable(size)}" for name, size in files.items())]
    lines += ["read again: the same weights, bit for bit", f"serve:  {written.serve}", f"limitations:  {written.lost}"]
    for line in [*lines, *(f"note:  {note}" for note in notes)]:
        options.output.console.print(line, highlight=False, soft_wrap=True, markup=False)
    return about


def _facts(options: ExportOptions) -> Facts:
    """Collect the model card's facts from --benchmark, --license and --repo-id, which require --to hub."""
    from medusa.export.card import Facts, read_benchmark

    for name in ("benchmark", "license", "repo_id"):
        if options.to != "hub" and getattr(options, name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} is for the model card of --to hub; leave it out")
    benchmark = None if options.benchmark is None else read_benchmark(options.benchmark)
    measured = options.heads if benchmark is None else benchmark["settings"]["heads"]
    if Path(measured).resolve() != Path(options.heads).resolve():
        warn(f"{options.benchmark} measured {measured}, not {options.heads}; the card names {measured}")
    return Facts(repo_id=options.repo_id, license=options.license, benchmark=benchmark)


def _require_replaceable(output: Path, keep: list[Path]) -> None:
    """Raise a `RequestError` if `output` contains a path in `keep`, or is not empty and holds no earlier export."""
    place = output.resolve()
    for path in keep:
        if path.exists() and path.resolve().is_relative_to(place):
            raise RequestError(f"--output {output} would replace {path}, which is an input; choose another folder")
    require_of_kind("output", output, "an export of this version", MARK)
    for path in output.rglob("*") if output.is_dir() else ():
        if path.is_file() and str(path.relative_to(output)) not in (*WRITTEN, MARK):
            raise RequestError(f"--output {output} holds {path.name}, which no export writes; choose another folder")
