"""The versions of torch and transformers that the tests run with, and a warning about others."""

from __future__ import annotations

import logging
from importlib.metadata import version

TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.24")}
"""The lowest and the newest tested version of each package, without the number of the patch."""


def in_words(name: str) -> str:
    """The tested versions of a package in words, such as `2.11 to 2.13`."""
    return " to ".join(TESTED[name])


def minor(version: str) -> tuple[int, ...]:
    """The numbers of a version, without that of the patch."""
    return tuple(map(int, version.split(".")[:2]))


def warn_if_untested() -> None:
    """Log one warning if a package has a version that was not tested; without a log, it is a line on standard error."""
    found = []
    for name, (lowest, newest) in TESTED.items():
        if not minor(lowest) <= minor(installed := version(name)) <= minor(newest):
            found.append(f"{name} {installed} was not tested ({in_words(name)} was)")
    if found:
        logging.getLogger("medusa").warning("%s; if something fails, install a tested version", " and ".join(found))
