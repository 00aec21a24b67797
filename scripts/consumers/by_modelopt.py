"""Decode with an export in nvidia-modelopt, for scripts/check_consumers.py. It runs without this project's packages.

Its Medusa model returns the logits of all heads but has no loop for them, so this file takes the best guesses and
lets the model's own next forward judge them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import modelopt
import modelopt.torch.speculative as mtsp
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
place = Path(JOB["export"])
model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
about = json.loads((place / "config.json").read_text(encoding="utf-8"))["medusa"]
shape = {"medusa_num_heads": about["num_medusa_heads"], "medusa_num_layers": about["num_medusa_layers"]}
mtsp.convert(model, [("medusa", shape)])
for parameter in model.medusa_heads.parameters():
    parameter.data.fill_(float("nan"))  # so that a parameter that is not loaded shows
stored = {name: value for file in sorted(place.glob("*.safetensors")) for name, value in load_file(file).items()}
loaded = model.load_state_dict(stored, strict=False)
if loaded.unexpected_keys:
    sys.exit(f"unknown tensors: {loaded.unexpected_keys}")
ends = model.generation_config.eos_token_id
ends = ends if isinstance(ends, list) else [ends]
texts, steps = [], []
with torch.no_grad():
    for row in JOB["prompts"]:
        ids, written, lengths = list(row["input_ids"]), 0, []
        out = model(input_ids=torch.tensor([ids]))
        while written < JOB["tokens"] and ids[-1] not in ends:
            guesses = [int(logits[0, -1].argmax()) for logits in (out["logits"], *out["medusa_logits"])]
            judged = model(input_ids=torch.tensor([ids + guesses]))["logits"][0].argmax(-1).tolist()
            count = 1
            while count < len(guesses) and guesses[count] == judged[len(ids) + count - 1]:
                count += 1
            new = guesses[: min(count, JOB["tokens"] - written)]
            new = new[: next((at + 1 for at, token in enumerate(new) if token in ends), len(new))]
            ids, written = ids + new, written + len(new)
            lengths.append(len(new))
            out = model(input_ids=torch.tensor([ids]))
        texts.append(ids[len(row["input_ids"]) :])
        steps.append(lengths)
found = {"version": f"nvidia-modelopt {modelopt.__version__}", "texts": texts, "steps": steps}
Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
