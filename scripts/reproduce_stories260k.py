"""Recipes for heads of stories260K within the same CPU time, and their tau on the original's 24 prompts.

    python scripts/reproduce_stories260k.py --backbone B --reference stories260K_greedy.json --openings train.txt \\
        --output runs/s260k

With `--kinds` heads of other kinds are compared by the same rules: `--recipes argmax-dpace --kinds paper medusa hydra
recurrent+prefix --num-heads 6 --trees dynamic:64`; `--prompts` compares them on other prompts, for tuning.

For each seed the backbone continues openings of stories at three temperatures, heads are trained on that text by each
recipe, and tau is measured with the tree mc_sim_7b_63. Writing, tokenising, the backbone's hidden states and training
all count: `--minutes` of process time with one thread, start-up included. What a seed's recipes share, its text, is
written once and counts for each. No training text shares a window of 32 tokens with the 24 prompts or with their greedy
continuations, and nothing is chosen by looking at them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TREE = "mc_sim_7b_63"
RECIPES: dict[str, dict[str, Any]] = {
    "data": {"objective": "text", "head_weighting": "decay"},  # cross-entropy on stories that people wrote
    "own": {"objective": "text", "head_weighting": "decay"},  # ... on the tokens of the backbone's own text
    "argmax": {"objective": "argmax", "head_weighting": "decay"},
    "argmax-dpace": {"objective": "argmax", "head_weighting": "dpace"},
    "distill": {"objective": "distill", "teacher_temperature": 0.5, "head_weighting": "decay"},
    "distill-dpace": {"objective": "distill", "teacher_temperature": 0.5, "head_weighting": "dpace"},
}
PAPER = {"kind": "medusa", "block": "square", "lm_head": "own"}  # one square block: what everyone publishes
TEMPERATURES = {0.0: 2, 0.3: 2, 0.5: 1}  # shares of the own text; at 0 half of it falls to the exclusion
OPENING = (6, 40)  # tokens
NEW_TOKENS = 128
START_UP = 50  # CPU seconds of `medusa train` that are not training: imports, reading, hidden states, saving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="the folder of stories260K")
    parser.add_argument("--reference", required=True, help="prompts and greedy ids of the original (JSON)")
    parser.add_argument("--openings", required=True, help="stories whose beginnings the backbone continues (.txt)")
    parser.add_argument("--output", required=True, type=Path, help="a folder; what is there already is not run again")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--kinds", nargs="+", default=["medusa"], help="of heads, or paper; +prefix adds a layer of their own"
    )
    parser.add_argument("--num-heads", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--trees", nargs="+", default=[TREE], help="that tau is measured with (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, help="JSON Lines to measure tau on in place of the 24 of the reference")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--texts", type=int, default=10_000, help="of 128 tokens each (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=12, help="CPU minutes for everything (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for medusa train")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    prompts, excluded = write_inputs(json.loads(Path(args.reference).read_text(encoding="utf-8")), args.output)
    rows = []
    for seed in args.seeds:
        for recipe, kind in itertools.product(args.recipes, args.kinds):
            found = run(args, recipe, kind, seed, prompts, excluded)
            rows += found
            print(*(json.dumps(row) for row in found), sep="\n", flush=True)
    if args.json:
        about = {"texts": args.texts, "new_tokens": NEW_TOKENS, "minutes": args.minutes}
        about |= {"temperatures": TEMPERATURES, "recipes": {name: RECIPES[name] for name in args.recipes}}
        args.json.write_text(json.dumps({"settings": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print("| recipe | heads | tree | tau | of each seed | CPU minutes |\n|---|---|---|---|---|---|")
    for recipe, kind, tree in itertools.product(args.recipes, args.kinds, args.trees):
        mine = [row for row in rows if (row["recipe"], row["kind"], row["tree"]) == (recipe, kind, tree)]
        taus = [row["tau"] for row in mine]
        each = ", ".join(f"{tau:.3f}" for tau in taus)
        longest = max(row["cpu_minutes"] for row in mine)
        print(f"| {recipe} | {kind} | {tree} | {statistics.median(taus):.3f} | {each} | at most {longest:.2f} |")


def write_inputs(reference: dict[str, Any], output: Path) -> tuple[Path, Path]:
    """The prompts, and the texts that no training text may share a window with."""
    continuations = next(iter(reference["runs"].values()))["new_ids"]
    prompts, excluded = output / "prompts.jsonl", output / "excluded.jsonl"
    pairs = list(zip(reference["prompts"], continuations, strict=True))
    write_ids(prompts, [prompt for prompt, _ in pairs])
    write_ids(excluded, [prompt + new for prompt, new in pairs])
    return prompts, excluded


def write_ids(path: Path, texts: list[list[int]]) -> None:
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in texts), encoding="utf-8")


def own_text(args: argparse.Namespace, seed: int) -> tuple[Path, float]:
    """The backbone's own text of a seed, written unless it is there, and its CPU seconds."""
    folder, told = args.output / f"seed{seed}" / "text", args.output / f"seed{seed}" / "text_seconds.json"
    if not told.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        start = cpu_seconds()
        prompts = openings(args, seed)
        for temperature, share in TEMPERATURES.items():
            count = args.texts * share // sum(TEMPERATURES.values())
            mine, prompts = prompts[:count], prompts[count:]
            source = args.output / f"seed{seed}" / f"openings_{temperature}.jsonl"
            write_ids(source, mine)
            medusa(
                *f"distill --backbone {args.backbone} --prompts {source} --temperature {temperature}".split(),
                *f"--max-new-tokens {NEW_TOKENS} --ignore-eos --batch-size 128 --seed {1000003 * seed}".split(),
                *f"--threads 1 --quiet --overwrite --output {folder}/{temperature}.jsonl".split(),
            )
        told.write_text(json.dumps(cpu_seconds() - start), encoding="utf-8")
    return folder, json.loads(told.read_text(encoding="utf-8"))


def openings(args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Beginnings of stories, of random lengths, in random order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.backbone)
    draw = random.Random(seed)
    stories = [s.strip() for s in Path(args.openings).read_text(encoding="utf-8").split("<|endoftext|>") if s.strip()]
    draw.shuffle(stories)
    texts = [[tokenizer.bos_token_id, *tokenizer(s[:400], add_special_tokens=False)["input_ids"]] for s in stories]
    cut = [ids[: draw.randint(*OPENING)] for ids in texts if len(ids) >= OPENING[1]]
    return cut[: args.texts]


def run(
    args: argparse.Namespace, recipe: str, kind: str, seed: int, prompts: Path, excluded: Path
) -> list[dict[str, Any]]:
    """One recipe and kind with one seed, a row for each tree; what an earlier call did is read, not done again."""
    folder = args.output / f"seed{seed}" / (recipe if kind == "medusa" else f"{recipe}-{kind}")
    told = folder / "cost.json"
    if not told.is_file():
        told.write_text(json.dumps(train(args, recipe, kind, seed, folder, excluded)), encoding="utf-8")
    cost = json.loads(told.read_text(encoding="utf-8"))
    about = {"recipe": recipe, "kind": kind, "seed": seed}
    prompts = args.prompts or prompts
    return [about | {"tree": tree, "tau": measure(args, folder, tree, prompts)} | cost for tree in args.trees]


def train(args: argparse.Namespace, recipe: str, kind: str, seed: int, folder: Path, excluded: Path) -> dict[str, Any]:
    """Heads in `folder`, and what they cost."""
    folder.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"path": args.openings, "max_examples": args.texts // 2}
    written = 0.0
    if recipe != "data":
        text, written = own_text(args, seed)
        data = {"path": str(text)}
    seconds = 60 * args.minutes - written - START_UP
    if seconds <= 0:
        raise SystemExit(
            f"writing took {written:.0f} s of {60 * args.minutes:.0f}; give --minutes more or --texts less"
        )
    config = folder / "train.json"  # JSON is YAML
    content = {
        "backbone": args.backbone,
        "data": data | {"sequence_length": 256, "exclude": str(excluded), "exclude_window": 32},
        "output_dir": str(folder / "heads"),
        "heads": heads_of(kind, args.num_heads),
        "cache_features": True,
        "device": "cpu",  # bf16 asks whether that is meant
        "training": {
            "max_cpu_minutes": seconds / 60,
            "per_device_train_batch_size": 4,
            "bf16": True,
            "seed": seed,
            "logging_steps": 500,
            "save_strategy": "no",
        }
        | RECIPES[recipe],
    }
    config.write_text(json.dumps(content, indent=1), encoding="utf-8")
    start = cpu_seconds()
    medusa("train", str(config), *args.overrides, "--threads", "1", "--overwrite", "--quiet")
    used = written + cpu_seconds() - start
    shutil.rmtree(folder / "heads" / "features")
    steps = json.loads((folder / "heads" / "provenance.json").read_text(encoding="utf-8"))["result"]["steps"]
    return {"cpu_minutes": round(used / 60, 3), "steps": steps, "writing_minutes": round(written / 60, 3)}


def heads_of(kind: str, num: int) -> dict[str, Any]:
    """What `--kinds` means by a name."""
    name, _, prefix = kind.partition("+")
    if prefix not in ("", "prefix"):
        raise SystemExit(f"--kinds {kind}: only +prefix can be added to a kind")
    return {"num": num, "prefix_layers": int(bool(prefix))} | (PAPER if name == "paper" else {"kind": name})


def measure(args: argparse.Namespace, folder: Path, tree: str, prompts: Path) -> float:
    """Tau on the 24 prompts."""
    result = folder / f"generated_{prompts.stem}_{tree.replace(':', '_')}.json"
    medusa(
        *f"generate --backbone {args.backbone} --heads {folder / 'heads'} --prompts {prompts} --tree {tree}".split(),
        *f"--max-new-tokens 128 --ignore-eos --threads 1 --quiet --json {result}".split(),
    )
    results = json.loads(result.read_text(encoding="utf-8"))["results"]
    # Lengths cut at 128 tokens and a last root that needs no forward both count against tau here.
    return round(sum(len(entry["new_ids"]) for entry in results) / sum(entry["steps"] for entry in results), 4)


def medusa(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "medusa", *arguments], check=True, stdout=subprocess.DEVNULL)


def cpu_seconds() -> float:
    """CPU time of this process and all finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
