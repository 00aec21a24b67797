"""Recipes of training runs on a tiny backbone, and what their runs leave."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from medusa.heads.independent import MedusaHeads
from tests.helpers import tiny_model
from train.recipe import parse_recipe
from train.run import train


@functools.cache
def files_of_a_backbone() -> dict[str, bytes]:
    """The files of a tiny backbone by name, made once."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("llama").save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def recipes(folder: Path, rows: Iterable[dict[str, Any]], length: int, **usual: Any) -> Callable[..., dict[str, Any]]:
    """Save a tiny backbone and data; return a function of the output folder that makes recipes of two heads on them.

    Its keywords are training arguments, over the `usual` ones."""
    (folder / "backbone").mkdir()
    for name, content in files_of_a_backbone().items():
        (folder / "backbone" / name).write_bytes(content)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def made(output: str | Path, **training: Any) -> dict[str, Any]:
        return {
            "backbone": str(folder / "backbone"),
            "data": {"path": str(folder / "data.jsonl"), "sequence_length": length},
            "output_dir": str(folder / output),
            "heads": {"num": 2},
            "device": "cpu",
            "training": usual | training,
        }

    return made


def run(content: dict[str, Any], **options: Any) -> Any:
    """Train by a recipe, and return the figures of the run."""
    return train(parse_recipe(content, "test"), quiet=True, **options)


def assert_close(left: Path, right: Path, most: float) -> None:
    """Check that no number of the heads in two folders differs by more than `most`."""
    ours, theirs = (MedusaHeads.from_pretrained(folder).state_dict() for folder in (left, right))
    torch.testing.assert_close(ours, theirs, atol=most, rtol=0)


def same(left: Path, right: Path) -> bool:
    """Whether two folders hold equal heads, number for number."""
    ours, theirs = (MedusaHeads.from_pretrained(folder).state_dict() for folder in (left, right))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
