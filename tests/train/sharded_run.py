"""A run of `medusa train` on a sharded backbone that looks at its own parameters; `test_scale.py` starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from medusa.backbone import Backbone
from medusa.loading import load_backbone
from train import MedusaTrainer, run
from train.recipe import load_recipe


def main() -> None:
    torch.set_num_threads(1)
    config = load_recipe(sys.argv[1], [])
    train = MedusaTrainer.train

    def look_and_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.backbone.model
        blocks = [parameter for layer in model.model.layers for parameter in layer.parameters()]
        assert all(isinstance(parameter, DTensor) for parameter in blocks)
        held = sum(parameter.to_local().numel() for parameter in blocks)
        whole = sum(parameter.numel() for parameter in blocks)
        assert held == whole / dist.get_world_size(), "every process holds its share"
        assert not isinstance(model.lm_head.weight, DTensor)
        assert not any(isinstance(parameter, DTensor) for parameter in self.heads.parameters())
        ids = torch.arange(10)[None]
        with torch.no_grad():
            ours = Backbone(model).hidden_states(ids, use_cache=False)
            theirs = Backbone(load_backbone(config.backbone).model).hidden_states(ids, use_cache=False)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        outcome = train(self, *args, **kwargs)
        assert all(isinstance(parameter, DTensor) for layer in model.model.layers for parameter in layer.parameters())
        return outcome

    MedusaTrainer.train = look_and_train
    figures = run.train(config, quiet=True)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(figures.to_dict()), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
