"""Heads for stories260K within a CPU budget, and their tau on the original's 24 prompts.

    python scripts/reproduce_stories260k.py --backbone B --reference stories260K_greedy.json --output runs/s260k

For each seed the backbone writes text, heads are trained on it, and tau is measured with the tree mc_sim_7b_63; the CPU
time of all three commands (process time, start-up included) is added up. No training text shares a window of 32 tokens
with the prompts or with their greedy continuations, and nothing is chosen by looking at them.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TREE = "mc_sim_7b_63"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="the folder of stories260K")
    parser.add_argument("--reference", required=True, help="prompts and greedy ids of the original (JSON)")
    parser.add_argument("--output", required=True, type=Path, help="an empty or new folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--texts", type=int, default=2500, help="of 255 tokens each (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.5, help="of training (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for medusa train")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    prompts, excluded = write_inputs(json.loads(Path(args.reference).read_text(encoding="utf-8")), args.output)
    rows = [run_seed(args, seed, prompts, excluded) for seed in args.seeds]
    for row in rows:
        print(json.dumps(row))
    print(f"tau: median {statistics.median(row['tau'] for row in rows):.3f}")
    print(f"CPU minutes of writing and training: at most {max(row['cpu_minutes'] for row in rows):.2f}")


def write_inputs(reference: dict[str, Any], output: Path) -> tuple[Path, Path]:
    """The prompts, and the texts that no training text may share a window with."""
    continuations = next(iter(reference["runs"].values()))["new_ids"]
    prompts, excluded = output / "prompts.jsonl", output / "excluded.jsonl"
    pairs = list(zip(reference["prompts"], continuations, strict=True))
    prompts.write_text("".join(json.dumps({"input_ids": p}) + "\n" for p, _ in pairs), encoding="utf-8")
    excluded.write_text("".join(json.dumps({"input_ids": p + new}) + "\n" for p, new in pairs), encoding="utf-8")
    return prompts, excluded


def run_seed(args: argparse.Namespace, seed: int, prompts: Path, excluded: Path) -> dict[str, Any]:
    folder = args.output / f"seed{seed}"
    folder.mkdir(exist_ok=True)
    text, heads, result = folder / "own_text.jsonl", folder / "heads", folder / "generated.json"
    start = cpu_seconds()
    medusa(
        *f"distill --backbone {args.backbone} --self-talk {args.texts} --temperature 0.7 --max-new-tokens 255".split(),
        *f"--ignore-eos --batch-size 64 --seed {1000003 * seed} --threads 1 --overwrite --output {text}".split(),
    )
    config = folder / "train.json"  # JSON is YAML
    config.write_text(json.dumps(recipe(args, seed, text, heads, excluded)), encoding="utf-8")
    medusa("train", str(config), *args.overrides, "--threads", "1", "--overwrite")
    used = cpu_seconds() - start
    medusa(
        *f"generate --backbone {args.backbone} --heads {heads} --prompts {prompts} --tree {TREE}".split(),
        *f"--max-new-tokens 128 --ignore-eos --threads 1 --quiet --json {result}".split(),
    )
    results = json.loads(result.read_text(encoding="utf-8"))["results"]
    steps = sum(entry["steps"] for entry in results)
    # Lengths cut at 128 tokens and a last root that needs no forward both count against tau here.
    return {"seed": seed, "tau": sum(len(e["new_ids"]) for e in results) / steps, "cpu_minutes": used / 60}


def recipe(args: argparse.Namespace, seed: int, text: Path, heads: Path, excluded: Path) -> dict[str, Any]:
    return {
        "backbone": args.backbone,
        "data": {"path": str(text), "sequence_length": 256, "exclude": str(excluded), "exclude_window": 32},
        "output_dir": str(heads),
        "heads": {"num": 4},
        "training": {
            "max_minutes": args.minutes,
            "per_device_train_batch_size": 2,
            "learning_rate": 3e-3,  # that of the figures in docs/results.md
            "seed": seed,
            "save_steps": 5000,
        },
    }


def medusa(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "medusa", *arguments], check=True)


def cpu_seconds() -> float:
    """CPU time of all finished children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
