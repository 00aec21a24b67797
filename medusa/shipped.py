"""Files that come with the package and have names: recipes, trees and prompts.

In a wheel, the content of the sources' folder `configs` is in `medusa/configs`; `setup.py` copies it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from medusa.errors import RequestError, did_you_mean
from medusa.files import ASSETS
from medusa.places import SHIPPED

PROMPTS = {SHIPPED: ASSETS / "prompts.jsonl"}  # files of prompts, by the names that --prompts and --data take


def shipped_configs() -> Path:
    """Return the folder of the shipped recipes, with `trees` and `accelerate` (launcher settings) in it."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipe_file(name: str | Path) -> Path:
    """Return the file of a training recipe, given by its path or by the name of a shipped recipe.

    Raise RequestError if there is neither such a file nor such a recipe."""
    if Path(name).is_file():
        return Path(name)
    recipes = _by_name(shipped_configs())
    if str(name) in recipes:
        return recipes[str(name)]
    stem = Path(name).stem  # also answers a path such as configs/medusa1.yaml where there are no sources
    hint = f"; did you mean {stem}?" if stem in recipes else did_you_mean(stem, recipes)
    raise RequestError(f"no such file: {name}; give a YAML file or a shipped recipe ({', '.join(recipes)}){hint}")


def tree_files() -> dict[str, Path]:
    """Return the files of the shipped trees that `configs/trees` holds, by name."""
    return _by_name(shipped_configs() / "trees")


@cache
def named_trees() -> dict[str, list[list[int]]]:
    """Return the node paths of each named tree, by name: nine of the original Medusa, and `eight`, a tree for CPUs."""
    shipped = json.loads(Path(__file__).with_name("trees.json").read_text(encoding="utf-8"))
    return shipped["trees"] | shipped["ours"]


def require_tree(spec: str) -> None:
    """Raise RequestError if `spec` is no form such as chain:3, no shipped tree and no file. No file is read."""
    is_form = spec.startswith("dynamic") or spec.partition(":")[0] in ("auto", "chain", "topk")
    if not is_form and spec not in named_trees() | tree_files() and not Path(spec).is_file():
        raise no_tree(spec)


def no_tree(spec: str) -> RequestError:
    """Return the error for a tree that does not exist."""
    name, names = spec.partition(":")[0], sorted([*named_trees(), *tree_files()])
    near = did_you_mean(Path(name).stem, ["auto", "chain", "topk", "dynamic", *names])
    known = "" if near else f": give a file, auto, chain, chain:3, topk:3,3,2 or one of {', '.join(names)}"
    return RequestError(f"there is no tree {spec!r}{near}{known}")


def _by_name(folder: Path) -> dict[str, Path]:
    """Return the YAML files in `folder` by their names without the suffix, sorted."""
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
