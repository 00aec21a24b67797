"""Medusa heads, their files, candidate trees and backbones. `train` trains heads, and `decode` generates with them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa.config import MedusaConfig as MedusaConfig
    from medusa.errors import RequestError as RequestError
    from medusa.heads.independent import MedusaHeads as MedusaHeads
    from medusa.tree import Tree as Tree

__version__ = "0.1.0"
__all__ = ["MedusaConfig", "MedusaHeads", "RequestError", "Tree", "__version__"]

_MODULES = {"MedusaConfig": "config", "MedusaHeads": "heads.independent", "RequestError": "errors", "Tree": "tree"}


def __getattr__(name: str) -> object:
    """Import a public class or function at its first use, so that `medusa --help` starts without torch."""
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"medusa.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'medusa' has no attribute {name!r}")
