"""Carry to a machine without a network what it lacks: packages, a chat model and files, in parts of a limited size.

    python -m scripts.gpu_battery.bundle make --gguf model.gguf --files questions.jsonl --output bundle
    python -m scripts.gpu_battery.bundle open bundle/1 --output carried        on the other machine
    python -m scripts.gpu_battery.bundle open bundle/2 bundle/3 --output carried

`make` needs a network. It writes the folders bundle/1, bundle/2, ..., of at most --mib MiB each: wheels of the packages
in the versions that are installed here, the files, and the GGUF file in pieces. `open` takes the parts in any number of
calls. It unpacks the packages into carried/site, for PYTHONPATH, and the files into carried/files. With the last part,
it writes the model to carried/model, and compares its greedy ids with those that `make` has found.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from medusa.errors import RequestError, RunError
from medusa.files import Json, read_json, write_json
from medusa.loading import LoadOptions, load_backbone
from script_tools import run_script, script_parser

PACKAGES = ("annotated-types", "gguf", "pydantic", "pydantic-core", "typing-extensions", "typing-inspection")
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
PROMPTS = ("The capital of France is", "def add(a, b):\n    return", "Once upon a time, there was")
NEW_TOKENS = 24  # after each of these prompts
PIECE, MANIFEST, MIB = "model.piece", "manifest.json", 1 << 20


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    verbs = parser.add_subparsers(required=True)
    maker, opener = verbs.add_parser("make"), verbs.add_parser("open")
    maker.set_defaults(run=make)
    maker.add_argument("--gguf", type=Path, metavar="FILE", help="carry this model")
    maker.add_argument("--files", type=Path, nargs="+", default=[], metavar="FILE", help="carry these files")
    maker.add_argument("--packages", nargs="+", default=PACKAGES, metavar="NAME", help="(default: %(default)s)")
    maker.add_argument("--python", default="3.12", help="the other machine's version of Python (default: %(default)s)")
    maker.add_argument("--platforms", nargs="+", default=PLATFORMS, help="its platforms (default: %(default)s)")
    maker.add_argument("--mib", type=float, default=40, help="size of a part, at most (default: %(default)s)")
    opener.set_defaults(run=open_parts)
    opener.add_argument("parts", nargs="+", type=Path, metavar="PART", help="folders that `make` has written")
    for verb in (maker, opener):
        verb.add_argument("--output", type=Path, required=True, metavar="DIR", help="write to this folder")
    args = parser.parse_args(argv)
    args.run(args)


def make(args: argparse.Namespace) -> None:
    """Write the parts."""
    if args.output.exists():
        raise RequestError(f"{args.output} exists; choose another --output")
    for file in [*args.files, *([args.gguf] if args.gguf else [])]:
        if not file.is_file():
            raise RequestError(f"there is no file {file}")
    first, manifest = args.output / "1", {"pieces": [], "texts": []}
    for name in ("wheels", "files"):
        (first / name).mkdir(parents=True)
    asked = [f"{name}=={version(name)}" for name in args.packages]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--python-version", args.python, "--implementation", "cp", "--dest", str(first / "wheels")]
    subprocess.run([*pip, *(f"--platform={name}" for name in args.platforms), *asked], check=True)
    for file in args.files:
        shutil.copy(file, first / "files")
    taken = sum(path.stat().st_size for path in first.rglob("*") if path.is_file()) + MIB // 16  # and the manifest
    if (room := int(args.mib * MIB) - taken) <= 0:
        raise RequestError(f"packages and files take {taken / MIB:.1f} MiB of a part of --mib {args.mib:g}")
    if args.gguf:
        with tempfile.TemporaryDirectory() as folder:
            manifest["texts"] = greedy(write_model(args.gguf, Path(folder)), PROMPTS)
        with args.gguf.open("rb") as file:
            while piece := file.read(room):
                manifest["pieces"].append(hashlib.sha256(piece).hexdigest())
                part, room = args.output / str(len(manifest["pieces"])), int(args.mib * MIB)
                part.mkdir(exist_ok=True)
                (part / PIECE).write_bytes(piece)
    write_json(first / MANIFEST, manifest)
    print(*sorted(args.output.iterdir()), sep="\n")


def open_parts(args: argparse.Namespace) -> None:
    """Take parts, and unpack what is whole: packages and files from the first, the model from all."""
    parts, site = args.output / "parts", args.output / "site"
    for part in args.parts:
        if not part.is_dir():
            raise RequestError(f"there is no part {part}")
        shutil.copytree(part, parts / part.name, dirs_exist_ok=True)
    first = parts / "1"
    if not (first / MANIFEST).is_file():
        print("part 1 is missing")
        return
    for wheel in (first / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:  # a wheel of a package without programs needs no installer
            packed.extractall(site)
    shutil.copytree(first / "files", args.output / "files", dirs_exist_ok=True)
    print(f"export PYTHONPATH={site.resolve()}")
    manifest = read_json(first / MANIFEST)
    pieces = [parts / str(number) / PIECE for number in range(1, 1 + len(manifest["pieces"]))]
    if missing := [piece.parent.name for piece in pieces if not piece.is_file()]:
        print("parts missing:", *missing)
    elif pieces and not (args.output / "model").exists():
        sys.path.insert(0, str(site.resolve()))
        join(pieces, manifest, args.output)


def join(pieces: Sequence[Path], manifest: Json, output: Path) -> None:
    """Write the model to the folder `model`, if the pieces have the right sums. RunError: it writes other texts."""
    gguf = output / "model.gguf"
    with gguf.open("wb") as file:
        for piece, digest in zip(pieces, manifest["pieces"], strict=True):
            content = piece.read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise RunError(f"{piece} is damaged: its sha256 is not {digest}")
            file.write(content)
    made, found = output / "model", greedy(write_model(gguf, output / "unchecked"), list(manifest["texts"]))
    for prompt, expected in manifest["texts"].items():
        if found[prompt] != expected:
            raise RunError(f"after {prompt!r} the model writes {found[prompt]}, not {expected}; it stays unchecked")
    (output / "unchecked").rename(made)
    print(f"{made}: {len(found)} greedy texts are equal")


def write_model(gguf: Path, folder: Path) -> Path:
    """Write the model of a GGUF file in bfloat16 to a folder, with its tokenizer; return the folder."""
    loaded = load_backbone(str(gguf), LoadOptions("bfloat16", "cpu"))
    if hasattr(loaded.model.config, "quantization_config"):
        del loaded.model.config.quantization_config
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def greedy(folder: Path, prompts: Sequence[str]) -> dict[str, list[int]]:
    """Return the ids of each prompt and of its greedy continuation, computed in float32 on the CPU."""
    loaded = load_backbone(str(folder), LoadOptions("float32", "cpu"))
    found = {}
    for prompt in prompts:
        ids = loaded.tokenizer(prompt, return_tensors="pt")
        found[prompt] = loaded.model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    return found


if __name__ == "__main__":
    run_script(main)
