"""Make the shipped heads of the embedded backbone from a text file of stories.

    python scripts/make_shipped_heads.py --data tinystories/train.txt --work runs/shipped --output medusa/assets/heads

The prompts are the first sentences of stories. The backbone continues three quarters of them greedily and the others at
temperature 0.7, and heads are trained on that text. Then the tree is grown on held-out texts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from decode.bench.calibration.recording import grow, predicted_tau, record
from medusa.backbone import Backbone
from medusa.checkpoints.stored import PROVENANCE
from medusa.cpu import has_fast_bfloat16
from medusa.files import read_json, write_json
from medusa.heads.independent import MedusaHeads
from medusa.loading import load_backbone
from medusa.records.sources import read_records
from script_tools import medusa, read_documents, run_script, script_parser, write_jsonl

SENTENCE = re.compile(r'.*?[.!?]["”]?(?=\s|$)', re.DOTALL)
TEXTS = {"greedy": (3200, 0), "warm": (1024, 0.7), "held_out": (200, 0)}  # prompts, temperature
TRAINING = {
    "objective": "argmax",
    "head_weighting": "dpace",
    "per_device_train_batch_size": 4,
    "num_train_epochs": 100,  # the time ends first
    "bf16": has_fast_bfloat16(),
    "save_strategy": "no",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", required=True, type=Path, help="stories separated by lines <|endoftext|>")
    parser.add_argument("--work", required=True, type=Path, help="write prompts and texts here")
    parser.add_argument("--output", required=True, type=Path, help="write the heads here")
    parser.add_argument("--minutes", type=float, default=30, metavar="M", help="CPU minutes (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="nodes of the tree (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    text = args.work / "own_text"
    text.mkdir(parents=True, exist_ok=True)
    stories = read_documents(str(args.data))
    openings = [(match[0] if (match := SENTENCE.match(story)) else story[:80])[:200] for story in stories]
    random.Random(0).shuffle(openings)
    for name, (count, temperature) in TEXTS.items():
        prompts = write_jsonl(args.work / f"{name}.jsonl", "prompt", openings[:count])
        openings = openings[count:]
        output = args.work / "own_held_out.jsonl" if name == "held_out" else text / f"{name}.jsonl"
        options = f"--temperature {temperature} --max-new-tokens 220 --batch-size 64 --threads {args.threads}"
        medusa(f"distill --backbone demo {options}", "--prompts", prompts, "--output", output)
    recipe = {
        "backbone": "demo",
        "data": {"path": str(text), "sequence_length": 256},
        "output_dir": str(args.output),
        "heads": {"num": 6, "kind": "markov"},
        "cache_features": True,
        "features_dir": str(args.work / "features"),
        "device": "cpu",  # must be explicit with bf16
        "training": {"max_cpu_minutes": args.minutes, "seed": 0} | TRAINING,
    }
    write_json(args.work / "train.json", recipe)  # JSON is YAML
    medusa(f"train --threads {args.threads} --overwrite", args.work / "train.json")
    finish(args.output, args.work / "own_held_out.jsonl", args.nodes)


def finish(folder: Path, held_out: Path, nodes: int) -> None:
    """Give the heads in `folder` a tree of `nodes` nodes for texts that took no part in the training, and shrink them.

    Weights are stored in bfloat16, and the provenance without the folders of this machine."""
    backbone, heads = Backbone(load_backbone("demo").model), MedusaHeads.from_pretrained(folder)
    records = read_records(str(held_out))
    texts = [(record.input_ids[: record.prompt_tokens], record.input_ids[record.prompt_tokens :]) for record in records]
    recording = record(backbone, heads, texts)
    tree = grow(recording, nodes)
    tau = predicted_tau(tree, recording)
    heads.config.tree = [list(path) for path in tree.rank_paths]
    provenance = read_json(folder / PROVENANCE) | {"command": "python scripts/make_shipped_heads.py"}
    config = provenance["config"]
    config["data"]["path"], config["output_dir"] = "own_text", folder.name
    provenance["tree"] = {"nodes": nodes, "texts": len(texts), "expected_tau": round(tau, 3)}
    heads.to(torch.bfloat16).save_pretrained(folder, provenance)
    print(f"{nodes}-node tree, expected tau {tau:.3f}: {heads.config.tree}")


if __name__ == "__main__":
    run_script(main)
