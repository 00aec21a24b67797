"""The check that heads read from a new folder are those that were written."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.load import load
from medusa.errors import RunError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs


def require_same(written: Checkpoint, folder: Path) -> None:
    """Check that heads read from `folder` give the logits of those that were written, bit for bit.

    Raises:
        RunError: they do not.
    """
    expected, found = (sample_logits(MedusaHeads.from_checkpoint(heads)) for heads in (written, load(folder)))
    if not torch.equal(expected, found):
        raise RunError("what was written gives other logits when it is read again; nothing was kept")


def sample_logits(heads: MedusaHeads) -> Tensor:
    """Logits [K, 8, ...] of eight random hidden states and paths; shared LM heads are 64 random rows.

    The same heads give the same logits.
    """
    config = heads.config
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(heads.device, heads.dtype)

    hidden, rows = random(8, config.hidden_size), random(64, config.hidden_size)
    following = random(8, config.num_heads, config.hidden_size) if heads.follows_path else None
    with torch.no_grad():
        return heads(HeadInputs(hidden, following), lambda feature: feature @ rows.T)
