"""Medusa heads: their kinds, files, trees and backbones. `train` fits heads, `decode` uses them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa.config import MedusaConfig as MedusaConfig
    from medusa.errors import RequestError as RequestError
    from medusa.heads.independent import MedusaHeads as MedusaHeads
    from medusa.tree import Tree as Tree

__version__ = "0.1.0"
__all__ = ["MedusaConfig", "MedusaHeads", "RequestError", "Tree", "__version__"]

_HOMES = {"MedusaConfig": "config", "MedusaHeads": "heads.independent", "RequestError": "errors", "Tree": "tree"}


def __getattr__(name: str) -> object:
    """Import the public names at first use: `medusa --help` starts without torch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"medusa.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'medusa' has no attribute {name!r}")
