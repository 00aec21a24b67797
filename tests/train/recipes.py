"""Recipes of training runs on a tiny backbone, and what their runs leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from medusa.heads.independent import MedusaHeads
from tests.helpers import tiny_model
from train.recipe import parse_recipe
from train.run import train


def recipes(folder: Path, rows: Iterable[dict[str, Any]], length: int, **usual: Any) -> Callable[..., dict[str, Any]]:
    """Save a tiny backbone and data; return a function of the output folder that makes recipes of two heads on them.

    Its keywords are training arguments, over the `usual` ones."""
    tiny_model("llama").save_pretrained(folder / "backbone")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def content(output: str | Path, **training: Any) -> dict[str, Any]:
        return {
            "backbone": str(folder / "backbone"),
            "data": {"path": str(folder / "data.jsonl"), "sequence_length": length},
            "output_dir": str(folder / output),
            "heads": {"num": 2},
            "device": "cpu",
            "training": usual | training,
        }

    return content


def run(content: dict[str, Any], **options: Any) -> Any:
    """Train by a recipe, and return the figures of the run."""
    return train(parse_recipe(content, "test"), quiet=True, **options)


def same(left: Path, right: Path) -> bool:
    """Whether two folders hold equal heads, number for number."""
    ours, theirs = (MedusaHeads.from_pretrained(folder).state_dict() for folder in (left, right))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
