"""Write a random layer of EAGLE-3 with SpecForge's own code, and the logits of its forward, for check_layouts.py.

It runs without this project's packages. The loop over the steps is that of SpecForge's training."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from specforge.export.checkpoint_io import apply_legacy_rope_scaling
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import AutoModelForCausalLM, LlamaConfig

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
torch.manual_seed(0)
backbone = AutoModelForCausalLM.from_pretrained(JOB["backbone"], dtype=torch.float32)
vocab_size, output = backbone.config.vocab_size, Path(JOB["output"])
kept = torch.randperm(vocab_size)[: JOB["vocabulary"]].sort().values
layers = [layer - 1 for layer in JOB["layers"]]  # SpecForge counts from the output of a layer
config = LlamaConfig(
    **JOB["layer"],
    **JOB["switches"],
    draft_vocab_size=len(kept),
    target_hidden_size=backbone.config.hidden_size,
    eagle_config={"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
)
drafter = LlamaForCausalLMEagle3(config).float()
for name, parameter in drafter.named_parameters():
    torch.nn.init.normal_(parameter, float("norm" in name), 0.3 if "norm" in name else parameter.shape[-1] ** -0.5)
drafter.t2d.copy_(torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, kept, True))
drafter.d2t.copy_(kept - torch.arange(len(kept)))
drafter.eval().save_pretrained(output)
apply_legacy_rope_scaling(str(output))
logits = {}
with torch.no_grad():
    for number, ids in enumerate(JOB["texts"]):
        states = backbone(torch.tensor([ids]), output_hidden_states=True).hidden_states
        joined = torch.cat([states[index] for index in JOB["layers"]], dim=-1)[:, :-1]
        hidden, following, cache = drafter.project_hidden_states(joined), torch.tensor([ids[1:]]), [[], []]
        length = following.shape[1]
        mask = drafter.prepare_decoder_attention_mask(torch.ones_like(following), hidden, 1, length, 0)
        found = []
        for _ in range(JOB["steps"]):
            hidden = drafter.backbone(
                input_embeds=drafter.embed_input_ids(following),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(length)[None],
            )
            found.append(drafter.compute_logits(hidden)[0])
            following = torch.nn.functional.pad(following[:, 1:], (0, 1))
        logits[str(number)] = torch.stack(found)
save_file(logits, sys.argv[2], {"version": f"SpecForge {version('specforge')}"})
