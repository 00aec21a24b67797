"""Which heads to train when nobody says: the ones that are expected to decode fastest, not those that guess best."""

from __future__ import annotations

from typing import Any

from train.config import HeadsConfig


def choose(hidden_size: int, vocab_size: int, asked: HeadsConfig) -> dict[str, Any]:
    """`block`, `num_layers`, `expansion` and `lm_head` for a backbone of these sizes; what was asked for stands."""
    block = asked.block or "mlp"
    default = {"num_layers": 2, "expansion": 4.0} if block == "mlp" else {"num_layers": 1, "expansion": 1.0}
    return {
        "block": block,
        "num_layers": asked.layers or default["num_layers"],
        "expansion": asked.expansion or default["expansion"],
        "lm_head": asked.lm_head or "shared",
    }
