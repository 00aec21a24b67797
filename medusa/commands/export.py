"""Heads in the form that a server or another toolkit loads, read again and compared before they are given out.

  medusa export --heads runs/heads --to original-v1 --output exported
  medusa export --heads runs/heads --to hub --output exported --backbone org/model --benchmark bench.json

Servers know independent heads of square blocks (train with `heads.block=square`). What a server loses against decoding
here is printed, with the command that serves the result.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.commands import common
from medusa.errors import RequestError, RunError
from medusa.export import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

    from medusa.export.card import Facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", required=True, metavar="H", help="a local folder, a Hub id, or demo (shipped)")
    parser.add_argument("--to", required=True, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--backbone", metavar="B", help="the backbone's folder or Hub id (default: as the heads say)")
    parser.add_argument("--revision", help="of the backbone on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the backbone")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as the heads are)")
    group = parser.add_argument_group("what a model card says (--to hub)")
    group.add_argument("--benchmark", metavar="FILE", help="what medusa benchmark --json wrote about these heads")
    group.add_argument("--license", metavar="ID", help="the Hub's name of it, such as apache-2.0")
    group.add_argument("--repo-id", metavar="ORG/NAME", help="where they will lie on the Hub")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")
    parser.add_argument("--json", metavar="FILE", help="write machine-readable results")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


def run(args: argparse.Namespace) -> None:
    from medusa.checkpoints.folder import find_folder, load
    from medusa.export import writer
    from medusa.export.base import Export, read_lm_head
    from medusa.files import replacing_folder, require_absent
    from medusa.loading import DEMO as DEMO_BACKBONE
    from medusa.loading import DTYPES, LoadOptions

    common.check_output(args.json)
    write = writer(args.to)
    options = LoadOptions(dtype=args.dtype, revision=args.revision, trust_remote_code=args.trust_remote_code)
    facts = facts_of(args)
    source = find_folder(args.heads)
    output = Path(args.output)
    require_absent(output, args.overwrite)
    heads = load(source) if args.dtype is None else load(source).to(DTYPES[args.dtype])
    if args.to == "hub":
        facts.calibrations = calibrations_of(source)
    backbone = args.backbone or heads.config.base_model_name_or_path
    if backbone is None:
        raise RequestError(f"{args.heads} does not say which backbone it belongs to; add --backbone")

    @cache
    def lm_head() -> Tensor:
        return read_lm_head(backbone, replace(options, dtype=None))

    local = DEMO_BACKBONE if backbone == "demo" else Path(backbone)
    name = str(local.resolve()) if local.is_dir() else backbone  # who serves it stands elsewhere
    require_replaceable(output, keep=[source, local])
    heads.config = replace(heads.config, base_model_name_or_path=name)
    with replacing_folder(output) as folder:
        written = write(Export(heads, name, folder, output, lm_head, facts))
        if not load(folder).is_same(written.heads):
            raise RunError("what was written has other weights when it is read again; nothing was kept")
        files = {
            str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
        }
    about = {
        "format": args.to,
        "folder": str(output),
        "files": files,
        "serve": written.serve,
        "lost": written.lost,
        "notes": written.notes,
    }
    common.write_results(args, about)
    _show(args, about)


def facts_of(args: argparse.Namespace) -> Facts:
    """What is to be said on a model card.

    Raises:
        RequestError: something that is not what it should be, or a card asked of a format that has none.
    """
    from medusa.export.card import Facts, read_benchmark

    for option in ("benchmark", "license", "repo_id"):
        if args.to != "hub" and getattr(args, option) is not None:
            raise RequestError(f"--{option.replace('_', '-')} is for the model card of --to hub; leave it out")
    benchmark = None if args.benchmark is None else read_benchmark(args.benchmark)
    if benchmark is not None and not same_place(benchmark["settings"]["heads"], args.heads):
        common.warn(
            f"{args.benchmark} measured {benchmark['settings']['heads']}, and this is {args.heads}; the card names "
            "what was measured"
        )
    return Facts(repo_id=args.repo_id, license=args.license, benchmark=benchmark)


def same_place(name: str, other: str) -> bool:
    return name == other or Path(name).resolve() == Path(other).resolve()


def calibrations_of(source: Path) -> list[dict[str, Any]]:
    """Those kept beside the heads that were made with these very heads, and none of heads that lay there before."""
    from decode.bench.calibration.stored import FILE
    from medusa.files import read_json
    from medusa.fingerprint import heads_fingerprint
    from medusa.heads.independent import MedusaHeads
    from medusa.loading import DTYPES

    kept = read_json(source / FILE) if (source / FILE).is_file() else []
    # A calibration casts heads to the backbone's dtype first.
    dtypes = {found["holds_for"]["dtype"] for found in kept}
    prints = {dtype: heads_fingerprint(MedusaHeads.from_pretrained(source, dtype=DTYPES[dtype])) for dtype in dtypes}
    return [found for found in kept if found["holds_for"]["heads"] == prints[found["holds_for"]["dtype"]]]


def require_replaceable(output: Path, keep: list[Path]) -> None:
    """Raises:
    RequestError: replacing the output would remove what is read, or something that is no export."""
    place = output.resolve()
    for path in keep:
        if path.exists() and path.resolve().is_relative_to(place):
            raise RequestError(f"--output {output} would replace {path}, which is read from; choose another folder")
    if output.exists() and not (output.is_dir() and ((output / "config.json").is_file() or not any(output.iterdir()))):
        raise RequestError(f"--output {output} is no export that could be replaced; choose another folder")


def _show(args: argparse.Namespace, about: dict) -> None:
    from medusa.files import readable

    out = common.output_console(args)
    out.print(f"{about['folder']}:", highlight=False)
    for name, size in about["files"].items():
        out.print(f"  {name}  {readable(size)}", highlight=False)
    out.print("read again: the same weights, bit for bit", highlight=False)
    out.print(f"serve:  {about['serve']}", highlight=False, soft_wrap=True, markup=False)
    out.print(f"lost there:  {about['lost']}", highlight=False)
    for note in about["notes"]:
        out.print(f"note:  {note}", highlight=False)
