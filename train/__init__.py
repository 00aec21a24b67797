"""Fitting heads on a frozen backbone."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.trainer import MedusaTrainer as MedusaTrainer
    from train.trainer import MedusaTrainingArguments as MedusaTrainingArguments

__all__ = ["MedusaTrainer", "MedusaTrainingArguments"]


def __getattr__(name: str) -> object:
    """Import the Trainer, and with it transformers, only when it is asked for."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("train.trainer"), name)
    raise AttributeError(f"module 'train' has no attribute {name!r}")
