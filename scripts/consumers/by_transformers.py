"""Decode with a Hub export in plain transformers, for scripts/check_consumers.py, without this project's packages."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
import transformers

if importlib.util.find_spec("medusa") or importlib.util.find_spec("decode"):
    sys.exit("this environment has our own packages, so it shows nothing")
JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
model = transformers.AutoModelForCausalLM.from_pretrained(JOB["backbone"], dtype=torch.float32)
texts, steps = [], []
for row in JOB["prompts"]:
    lengths: list[int] = []
    ids = model.generate(
        torch.tensor([row["input_ids"]]),
        attention_mask=torch.ones(1, len(row["input_ids"]), dtype=torch.long),
        max_new_tokens=JOB["tokens"],
        do_sample=False,
        custom_generate=JOB["export"],
        trust_remote_code=True,
        medusa_step_lengths=lengths,
    )
    texts.append(ids[0, len(row["input_ids"]) :].tolist())
    steps.append(lengths)
found = {"version": f"transformers {transformers.__version__}", "texts": texts, "steps": steps}
Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
