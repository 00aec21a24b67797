"""Trees loaded by name, by description or from a file."""

from __future__ import annotations

import json
from pathlib import Path

from medusa.errors import RequestError, first_line
from medusa.tree import Tree

TREES = Path(__file__).parent / "trees.json"


def named_trees() -> dict[str, list[list[int]]]:
    """The paths of all trees with a name: nine published with the original Medusa, and `eight`, made for a CPU."""
    shipped = json.loads(TREES.read_text(encoding="utf-8"))
    return shipped["trees"] | shipped["ours"]


def load_tree(spec: str, num_heads: int) -> Tree:
    """Load the tree that `spec` describes: `chain`, `chain:3`, `topk:3,3,2`, a name (`named_trees`) or a file.

    `num_heads` is the depth of a `chain` without a number. A JSON or YAML file holds `{"paths": [[0], [0, 0], ...]}`.

    Raises:
        RequestError: no such tree or file, or the file does not describe one.
    """
    name, _, argument = spec.partition(":")
    if name == "chain":
        lengths = _whole_numbers(spec, argument) if argument else [num_heads]
        if len(lengths) > 1:
            raise RequestError(f"the tree {spec!r} has two depths; write chain:{lengths[0]} or topk:{argument}")
        return Tree.chain(lengths[0])
    if name == "topk":
        return Tree.top_k(_whole_numbers(spec, argument))
    named = named_trees()
    if spec in named:
        return Tree.from_paths(named[spec])
    if Path(spec).is_file():
        return Tree.from_paths(_read_paths(Path(spec)))
    raise RequestError(
        f"no tree {spec!r}: give a file, auto, chain, chain:3, topk:3,3,2 or one of {', '.join(sorted(named))}"
    )


def _whole_numbers(spec: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0:
        raise RequestError(f"the tree {spec!r} needs whole numbers after the colon, as in chain:3 or topk:3,3,2")
    return numbers


def _read_paths(path: Path) -> list[list[int]]:
    import yaml  # JSON is YAML, so one reader serves both

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"the tree file {path} is neither JSON nor YAML ({first_line(error)})") from None
    if not isinstance(content, dict) or not isinstance(content.get("paths"), list):
        raise RequestError(f'the tree file {path} must hold {{"paths": [[0], [0, 0], [1], ...]}}')
    return content["paths"]
