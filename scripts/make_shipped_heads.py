"""The heads that are shipped for the embedded backbone, from a text file of stories to `medusa/assets/heads`.

    python scripts/make_shipped_heads.py --data tinystories/train.txt --work runs/shipped --output medusa/assets/heads

The first sentences of stories are the prompts; the backbone continues three quarters of them greedily and the others
at temperature 0.7, and heads learn from that. Then the tree is chosen: on texts that took no part in the training,
paths of guesses are counted where steps start, and those that were right most often make the tree.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SENTENCE = re.compile(r'.*?[.!?]["”]?(?=\s|$)', re.DOTALL)
GREEDY, WARM, HELD_OUT = 3200, 1024, 200
TREE_NODES = 8
SWEEPS = 4  # the positions where steps start depend on the tree: count, build, count again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="stories separated by lines <|endoftext|>")
    parser.add_argument("--work", required=True, type=Path, help="prompts, texts and checkpoints")
    parser.add_argument("--output", required=True, type=Path, help="where the heads go")
    parser.add_argument("--minutes", type=float, default=30, help="of training (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=TREE_NODES, help="of the tree (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    prompts = write_prompts(args.data, args.work)
    threads = ["--threads", str(args.threads)]
    for name, temperature in (("greedy", "0"), ("warm", "0.7"), ("held_out", "0")):
        medusa(
            *f"distill --backbone demo --prompts {prompts[name]} --temperature {temperature}".split(),
            *f"--max-new-tokens 220 --batch-size 64 --output {args.work / f'own_{name}.jsonl'}".split(),
            *threads,
        )
    text = args.work / "own_text"
    text.mkdir(exist_ok=True)
    for name in ("greedy", "warm"):
        (text / f"{name}.jsonl").write_bytes((args.work / f"own_{name}.jsonl").read_bytes())
    recipe = args.work / "train.json"
    recipe.write_text(json.dumps(training(text, args.output, args.minutes)), encoding="utf-8")
    medusa("train", str(recipe), *threads, "--overwrite")
    finish(args.output, args.work / "own_held_out.jsonl", args.nodes)


def write_prompts(data: Path, work: Path) -> dict[str, Path]:
    """First sentences of shuffled stories, in three files."""
    stories = [story.strip() for story in data.read_text(encoding="utf-8").split("<|endoftext|>")]
    openings = [(match[0] if (match := SENTENCE.match(s)) else s[:80])[:200] for s in stories if s]
    random.Random(0).shuffle(openings)
    paths, start = {}, 0
    for name, count in (("greedy", GREEDY), ("warm", WARM), ("held_out", HELD_OUT)):
        paths[name] = work / f"{name}.jsonl"
        lines = [json.dumps({"prompt": opening}) + "\n" for opening in openings[start : start + count]]
        paths[name].write_text("".join(lines), encoding="utf-8")
        start += count
    return paths


def training(text: Path, output: Path, minutes: float) -> dict[str, Any]:
    return {
        "backbone": "demo",
        "data": {"path": str(text), "sequence_length": 256},
        "output_dir": str(output),
        "heads": {"num": 4},
        "training": {
            "max_minutes": minutes,
            "per_device_train_batch_size": 4,
            "learning_rate": 4e-3,
            "seed": 0,
            "save_strategy": "no",
            "logging_steps": 100,
        },
    }


def finish(folder: Path, held_out: Path, nodes: int) -> None:
    """Choose the tree, and store weights in bfloat16, as the backbone's are."""
    import torch

    from medusa.backbone import Backbone
    from medusa.checkpoints.layout import PROVENANCE
    from medusa.files import read_json
    from medusa.heads.independent import MedusaHeads
    from medusa.loading import load_backbone
    from train.evaluate import guess_ranks

    backbone = Backbone(load_backbone("demo").model)
    heads = MedusaHeads.from_pretrained(folder)
    texts = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    with torch.no_grad():
        ranks = [
            guess_ranks(backbone, heads, torch.tensor([t["input_ids"]]), t["prompt_tokens"]).T.tolist() for t in texts
        ]
    paths, tau = choose_tree(ranks, nodes - 1)
    heads.config.tree = [list(path) for path in paths]
    provenance = read_json(folder / PROVENANCE)
    provenance["command"] = "python scripts/make_shipped_heads.py"
    config = provenance["config"]  # folders of the machine that it ran on mean nothing elsewhere
    config["data"]["path"], config["output_dir"] = Path(config["data"]["path"]).name, Path(config["output_dir"]).name
    provenance["tree"] = {"nodes": nodes, "texts": len(texts), "expected_tau": round(tau, 3)}
    heads.to(torch.bfloat16).save_pretrained(folder, provenance)
    print(f"{nodes}-node tree, expected tau {tau:.3f}: {heads.config.tree}")


def choose_tree(ranks: list[list[list[int]]], size: int) -> tuple[list[tuple[int, ...]], float]:
    """The `size` paths that were right most often where steps start, and the tau that they give.

    Args:
        ranks: per text and position, per head, the rank of the token that came.
    """
    paths: list[tuple[int, ...]] = [(0,), (0, 0), (0, 0, 0)]
    best: tuple[float, list[tuple[int, ...]]] = (0.0, paths)
    for _ in range(SWEEPS):
        tree, counts, tokens, steps = set(paths), Counter[tuple[int, ...]](), 0, 0
        for text in ranks:
            position = 0
            while position < len(text):
                came = tuple(text[position])
                counts.update(came[:depth] for depth in range(1, len(came) + 1))
                length = 1 + next((d for d in range(len(came), 0, -1) if came[:d] in tree), 0)
                position, tokens, steps = position + length, tokens + length, steps + 1
        best = max(best, (tokens / steps, paths))
        # A prefix is never rarer than what it begins, so taking the most frequent ones always keeps parents.
        usable = [path for path in counts if max(path) < 10]
        paths = sorted(usable, key=lambda path: (-counts[path], len(path), path))[:size]
    return best[1], best[0]


def medusa(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "medusa", *arguments], check=True)


if __name__ == "__main__":
    main()
