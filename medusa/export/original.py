"""FasterDecoding's first format: `config.json` and `medusa_lm_head.pt`, the state dict of an nn.ModuleList."""

from __future__ import annotations

import torch

from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, LEGACY_WEIGHTS
from medusa.errors import RequestError
from medusa.export.base import Export, Written, published_config, quoted, require_square
from medusa.export.lm_head import with_own_lm_heads
from medusa.files import write_json


def write(export: Export) -> Written:
    """Write `config.json` and `medusa_lm_head.pt` for FasterDecoding's package medusa-llm.

    This package builds all blocks of a head as one shared block. So the blocks of a head must have equal weights.

    Raises:
        RequestError: the heads are of another kind, or the blocks of a head differ.
    """
    name, config, tensors = "original-v1", export.heads.config, export.heads.tensors
    require_square(config, name)
    for module, tensor in tensors.items():
        if module.startswith("blocks.") and not torch.equal(tensor, tensors[f"blocks.0.{module.split('.')[2]}"]):
            raise RequestError(
                f"{name} cannot hold heads of {config.num_layers} different blocks: its loader would use "
                "one block for all; train them with heads.layers=1"
            )
    heads = with_own_lm_heads(export)
    # Cloned, because torch.save would store the weights of all heads for each view of them.
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in to_published(heads).items()}
    torch.save(copies, export.folder / LEGACY_WEIGHTS)
    write_json(export.folder / CONFIG, published_config(heads.config))
    return Written(
        serve=f"python -m medusa.inference.cli --model {quoted(export.place)}",
        lost="samples are not the model's (typical acceptance at every temperature above 0), one text at a time, "
        "Llama backbones only",
        heads=heads,
        notes=[
            "the command is that of FasterDecoding's package medusa-llm, in an environment without this one",
            "its last sources make five heads whatever the config says, and fill up with untrained ones",
        ],
    )
