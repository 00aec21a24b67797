"""Checks of options that have no effect, or that name a file or folder with other content."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from medusa.errors import RequestError
from medusa.places import SHIPPED, may_be_on_hub


def require_revisions(backbone: str | None, revision: str | None) -> None:
    """Raise a `RequestError` if a revision is given for a backbone that is not on the Hub."""
    if revision is not None and backbone and not may_be_on_hub(backbone):
        what = "is shipped with this package" if backbone == SHIPPED else "is a folder"
        raise RequestError(f"--revision chooses a version on the Hub, and {backbone} {what}; leave out --revision")


def require_distinct(**paths: str | None) -> None:
    """Raise a `RequestError` if two options name the same file. `paths`: paths by the names of their options."""
    given = [(name, path) for name, path in paths.items() if path is not None]
    for (one, path), (other, place) in combinations(given, 2):
        if Path(path).resolve() == Path(place).resolve():
            raise RequestError(f"--{one} and --{other} both write {path}; give them different names")


def require_no_input(output: str | None, option: str, **inputs: str | None) -> None:
    """Raise a `RequestError` if the file `output` of an option is one of the `inputs`, or lies in a folder of them.

    `inputs`: paths by the names of their options."""
    for name, given in inputs.items():
        if output is None or given is None or not (source := Path(given).resolve()).exists():
            continue
        place, flag = Path(output).resolve(), f"--{name.replace('_', '-')}"
        if place == source:
            raise RequestError(f"--{option} {output} would replace {flag}, which is an input; choose another file")
        if source.is_dir() and place.is_relative_to(source):
            told = f"--{option} {output} lies in {flag} {given}, and would be read there"
            raise RequestError(f"{told}; choose another folder")


def require_of_kind(option: str, folder: Path, kind: str, *names: str) -> None:
    """Raise a `RequestError` if a folder to replace has content, but not the files `names` of a folder of its kind."""
    if folder.is_dir() and (all((folder / name).is_file() for name in names) or not any(folder.iterdir())):
        return
    if folder.exists():
        raise RequestError(f"--{option} {folder} is not {kind}, so it is not replaced; choose another folder")
