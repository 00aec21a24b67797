"""FasterDecoding's first form: `config.json` and `medusa_lm_head.pt`, an nn.ModuleList's state_dict.

    {h}.{l}.linear.weight [H, H]   {h}.{l}.linear.bias [H]   {h}.{L}.weight [V, H]

Its code loads as many heads as it is told, five by default, and fills in random ones where the file has fewer.
"""

from __future__ import annotations

import shlex

import torch

from medusa.checkpoint import CONFIG, LEGACY_WEIGHTS, to_published
from medusa.config import PUBLISHED_KEYS
from medusa.files import write_json
from medusa.formats import Export, Written, require_square
from medusa.formats.own import with_own_lm_heads

NAME = "original-v1"


def write(export: Export) -> Written:
    require_square(export.heads.config, NAME)
    heads = with_own_lm_heads(export)
    # Each tensor by itself: views of the stacked weights would all be saved with their whole storage.
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in to_published(heads).items()
    }
    torch.save(tensors, export.folder / LEGACY_WEIGHTS)
    config = {theirs: getattr(heads.config, ours) for ours, theirs in PUBLISHED_KEYS.items()}
    write_json(export.folder / CONFIG, config)
    return Written(
        serve=f"python -m medusa.inference.cli --model {shlex.quote(str(export.place))}",
        lost="its sampling is lossy, and one text is decoded at a time",
        heads=heads,
        notes=[] if heads.config.num_heads == 5 else ["its loader makes five heads unless it is told another number"],
    )
