"""Tiny random models with an MTP layer in their files, for tests of `--drafter mtp` and `heads.kind: mtp`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_layers import MtpModel

from tests.helpers import tiny_model
from tiny_models import save_with_mtp

needs_forward_layer = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="transformers has MtpModel.forward_layer since 5.20"
)


def save_native(family: str, folder: Path, **settings: Any) -> MtpModel:
    """Save a tiny random model with its MTP layer in `folder`; return transformers' own MTP layers."""
    model = tiny_model(family, **settings)
    layers = MtpModel(model, model.config.num_mtp_layers)
    for parameter in layers.layers.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_with_mtp(model, layers.layers, folder)
    return layers.eval()
