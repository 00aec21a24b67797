"""Draft with an export in speculators, for scripts/check_consumers.py. It runs without this project's packages.

speculators trains drafters and has no loop that decodes. Its model guesses at all positions of our texts, and a guess
is accepted if the text goes on with it."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from speculators import SpeculatorModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from transformers import AutoModelForCausalLM
from walk import step_lengths

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
place, guesses = JOB["export"], JOB["guesses"]
config = Eagle3SpeculatorConfig.from_pretrained(place)
config.transformer_layer_config._attn_implementation = "eager"  # its own is flex attention, which GPUs compile
drafter = SpeculatorModel.from_pretrained(place, config=config).float().eval()
backbone = AutoModelForCausalLM.from_pretrained(JOB["backbone"], dtype=torch.float32)
layers = drafter.config.eagle_aux_hidden_state_layer_ids
steps: list[list[int]] = []
with torch.no_grad():
    for row in JOB["prompts"]:
        ids = row["input_ids"] + row["new_ids"]
        states = backbone(torch.tensor([ids]), output_hidden_states=True).hidden_states
        hidden = torch.cat([states[layer] for layer in layers], dim=-1)[:, :-1]
        following = torch.tensor([ids[1:]])
        guessed = drafter(
            hidden_states=hidden, input_ids=following, document_ids=torch.zeros_like(following), ttt_steps=guesses
        )
        if drafter.d2t is not None:
            guessed = [tokens + drafter.d2t[tokens] for tokens in guessed]
        place = len(row["input_ids"])
        steps.append(step_lengths(ids, place, lambda at, guessed=guessed: [int(one[0, at - 1]) for one in guessed]))
found = {"version": f"speculators {version('speculators')}", "texts": None, "steps": steps}
Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
