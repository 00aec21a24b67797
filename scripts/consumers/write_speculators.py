"""Write a random layer of EAGLE-3 with speculators' own code, and the logits of its forward, for check_layouts.py.

It runs without this project's packages."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import AutoConfig, AutoModelForCausalLM

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
torch.manual_seed(0)
backbone = AutoModelForCausalLM.from_pretrained(JOB["backbone"], dtype=torch.float32)
kept = torch.randperm(backbone.config.vocab_size)[: JOB["vocabulary"]].sort().values
layer = AutoConfig.for_model(JOB["model_type"], **JOB["layer"])
drafter = Eagle3DraftModel.from_training_args(
    layer,
    t2d=torch.zeros(backbone.config.vocab_size, dtype=torch.bool).index_fill(0, kept, True),
    d2t=kept - torch.arange(len(kept)),
    draft_vocab_size=len(kept),
    target_layer_ids=JOB["layers"],
    verifier_name_or_path=JOB["backbone"],
    ttt_steps=JOB["steps"],
    draft_attn_impl="eager",
    **{"norm_before_residual": False, **JOB["switches"]},
).float()
for name, parameter in drafter.named_parameters():
    if parameter.requires_grad:  # not the backbone's embeddings
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3 if "norm" in name else parameter.shape[-1] ** -0.5)
drafter.eval().save_pretrained(JOB["output"])
seen: list[torch.Tensor] = []
drafter.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits[0]))
logits = {}
with torch.no_grad():
    for number, ids in enumerate(JOB["texts"]):
        states = backbone(torch.tensor([ids]), output_hidden_states=True).hidden_states
        following = torch.tensor([ids[1:]])
        drafter(
            hidden_states=torch.cat([states[index] for index in JOB["layers"]], dim=-1)[:, :-1],
            input_ids=following,
            document_ids=torch.zeros_like(following),
            ttt_steps=JOB["steps"],
        )
        logits[str(number)] = torch.stack(seen)
        seen.clear()
save_file(logits, sys.argv[2], {"version": f"speculators {version('speculators')}"})
