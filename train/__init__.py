"""Training of Medusa heads on a frozen backbone."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.arguments import MedusaTrainingArguments as MedusaTrainingArguments
    from train.trainer import MedusaTrainer as MedusaTrainer

__all__ = ["MedusaTrainer", "MedusaTrainingArguments"]


def __getattr__(name: str) -> object:
    """Import the public classes on first use, because they import transformers, which takes seconds."""
    if name in __all__:
        return getattr(import_module("train.trainer"), name)
    raise AttributeError(f"module 'train' has no attribute {name!r}")
