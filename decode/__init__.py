"""Decoding with Medusa heads: each step verifies a tree of candidate tokens in one forward of the unchanged model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decode.generation import generate as generate
    from decode.generation import medusa_generate as medusa_generate
    from decode.generation import steps as steps
    from decode.loop import Step as Step

__all__ = ["Step", "generate", "medusa_generate", "steps"]


def __getattr__(name: str) -> object:
    """Import a function of `decode` at its first use, so that `import decode.accept` does not load transformers."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("decode.generation"), name)
    raise AttributeError(f"module 'decode' has no attribute {name!r}")
