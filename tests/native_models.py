"""Tiny random models with an MTP layer in their files, for tests of `--drafter mtp` and `heads.kind: mtp`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.helpers import tiny_model

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


def save_with_mtp(model: PreTrainedModel, layers: nn.ModuleList, folder: Path) -> None:
    """Save a model with MTP layers (transformers' `MtpLayer`) in one file, by the names of DeepSeek's checkpoints."""
    tensors = {}
    for number, layer in enumerate(layers, model.config.num_hidden_layers):
        for key, tensor in layer.state_dict().items():
            name = key.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            tensors[f"model.layers.{number}.{name}"] = tensor
    model.save_pretrained(folder)
    add_tensors(folder, tensors)


def add_tensors(folder: Path, tensors: dict[str, Tensor], sharded: bool = False) -> None:
    """Add tensors to the one file of a saved model; or put them into a second file, and write the index of both."""
    whole = folder / "model.safetensors"
    files = {whole.name: load_file(whole) | tensors}
    if sharded:
        files = {"model-1.safetensors": load_file(whole), "mtp.safetensors": tensors}
        places = {name: file for file, content in files.items() for name in content}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        whole.unlink()
    for file, content in files.items():
        save_file(content, folder / file, metadata={"format": "pt"})
