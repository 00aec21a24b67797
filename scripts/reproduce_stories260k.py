"""Compare training recipes for heads of stories260K within equal CPU time, by tau on the original's 24 prompts.

    python scripts/reproduce_stories260k.py --backbone B --reference stories260K_greedy.json --openings train.txt \\
        --output runs/s260k

`--kinds` compares heads of other kinds by the same rules: `--recipes argmax-dpace --kinds paper medusa hydra
recurrent+prefix --num-heads 6 --trees dynamic:64`. `--prompts` measures on other prompts, for tuning.

For each seed, the backbone continues the openings of stories at three temperatures, heads are trained on that text with
each recipe, and tau is measured with the tree mc_sim_7b_63. `--minutes` limits the CPU time of one thread for all of
it: generating text, tokenization, hidden states, training and start-up. The recipes of a seed share the generated text;
its time counts for each of them. No training text shares a window of 32 tokens with the 24 prompts or with their greedy
continuations, and these prompts influence no choice.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from medusa.cpu import has_fast_bfloat16
from medusa.errors import RequestError
from medusa.files import read_json, write_json
from medusa.heads import KINDS
from medusa.loading import load_tokenizer
from script_tools import markdown_table, medusa, read_documents, run_script, script_parser, write_jsonl

Row = dict[str, object]
TREE = "mc_sim_7b_63"
RECIPES: dict[str, Row] = {  # "data" trains on stories that people wrote, the others on the backbone's own text
    "data": {"objective": "text", "head_weighting": "decay"},
    "own": {"objective": "text", "head_weighting": "decay"},
    "argmax": {"objective": "argmax", "head_weighting": "decay"},
    "argmax-dpace": {"objective": "argmax", "head_weighting": "dpace"},
    "distill": {"objective": "distill", "teacher_temperature": 0.5, "head_weighting": "decay"},
    "distill-dpace": {"objective": "distill", "teacher_temperature": 0.5, "head_weighting": "dpace"},
}
CHOICES = [kind + prefix for kind in ("paper", *KINDS) for prefix in ("", "+prefix")]
PAPER = {"kind": "medusa", "block": "square", "lm_head": "own"}  # one square block, as in published heads
TEMPERATURES = {0.0: 2, 0.3: 2, 0.5: 1}  # shares of the backbone's own text; the exclusion drops half of that at 0
OPENING = (6, 40)  # least and most tokens of a story's opening
NEW_TOKENS = 128
START_UP = 50  # CPU seconds of `medusa train` that are not training: imports, reading, hidden states, saving
ONE_THREAD = "--threads 1 --quiet"


def own_text(args: argparse.Namespace, seed: int) -> tuple[Path, float]:
    """Generate the backbone's own text for a seed, unless it exists; return its folder, and the CPU seconds it took."""
    place = args.output / f"seed{seed}"
    folder, cost = place / "text", place / "text_seconds.json"
    if not cost.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        start = cpu_seconds()
        tokenizer, draw, stories = load_tokenizer(args.backbone), random.Random(seed), read_documents(args.openings)
        draw.shuffle(stories)
        texts = [[tokenizer.bos_token_id, *tokenizer(s[:400], add_special_tokens=False)["input_ids"]] for s in stories]
        prompts = [ids[: draw.randint(*OPENING)] for ids in texts if len(ids) >= OPENING[1]][: args.texts]
        for temperature, share in TEMPERATURES.items():
            count = args.texts * share // sum(TEMPERATURES.values())
            source = write_jsonl(place / f"openings_{temperature}.jsonl", "input_ids", prompts[:count])
            prompts = prompts[count:]
            options = f"--max-new-tokens {NEW_TOKENS} --ignore-eos --batch-size 128 --temperature {temperature}"
            where = ["--backbone", args.backbone, "--prompts", source, "--output", folder / f"{temperature}.jsonl"]
            medusa(f"distill {ONE_THREAD} --overwrite --seed {1000003 * seed} {options}", *where)
        write_json(cost, cpu_seconds() - start)
    return folder, read_json(cost)


def train(args: argparse.Namespace, recipe: str, kind: str, seed: int, folder: Path, excluded: Path) -> Row:
    """Train heads into `folder`; return their cost: CPU minutes, steps, and minutes of generating text."""
    folder.mkdir(parents=True, exist_ok=True)
    text, written = (None, 0.0) if recipe == "data" else own_text(args, seed)
    data: Row = {"path": str(text)} if text else {"path": args.openings, "max_examples": args.texts // 2}
    limit = 60 * args.minutes
    seconds = limit - written - START_UP
    if seconds <= 0:
        raise RequestError(f"generating text took {written:.0f} s of {limit:.0f}; give more --minutes, less --texts")
    name, _, prefix = kind.partition("+")
    heads = {"num": args.num_heads, "prefix_layers": int(bool(prefix))}
    training = {"max_cpu_minutes": seconds / 60, "per_device_train_batch_size": 4, "seed": seed}
    training |= {"bf16": has_fast_bfloat16(), "logging_steps": 500, "save_strategy": "no"}
    config = {
        "backbone": args.backbone,
        "data": data | {"sequence_length": 256, "exclude": str(excluded), "exclude_window": 32},
        "output_dir": str(folder / "heads"),
        "heads": heads | (PAPER if name == "paper" else {"kind": name}),
        "cache_features": True,
        "device": "cpu",  # must be explicit with bf16
        "training": training | RECIPES[recipe],
    }
    write_json(folder / "train.json", config)  # JSON is YAML
    start = cpu_seconds()
    medusa(f"train {ONE_THREAD} --overwrite", folder / "train.json", *args.overrides)
    used = written + cpu_seconds() - start
    shutil.rmtree(folder / "heads" / "features")
    steps = read_json(folder / "heads" / "provenance.json")["result"]["steps"]
    return {"cpu_minutes": round(used / 60, 3), "steps": steps, "writing_minutes": round(written / 60, 3)}


def run(args: argparse.Namespace, recipe: str, kind: str, seed: int, prompts: Path, excluded: Path) -> list[Row]:
    """Train heads of one recipe, kind and seed, unless they exist, and measure them; return a row for each tree."""
    folder = args.output / f"seed{seed}" / (recipe if kind == "medusa" else f"{recipe}-{kind}")
    if not (folder / "cost.json").is_file():
        write_json(folder / "cost.json", train(args, recipe, kind, seed, folder, excluded))
    about, cost = {"recipe": recipe, "kind": kind, "seed": seed}, read_json(folder / "cost.json")
    rows: list[Row] = []
    for tree in args.trees:
        result = folder / f"generated_{prompts.stem}_{tree.replace(':', '_')}.json"
        where = ["--backbone", args.backbone, "--heads", folder / "heads", "--prompts", prompts, "--json", result]
        medusa(f"generate {ONE_THREAD} --tree {tree} --max-new-tokens 128 --ignore-eos", *where)
        results = read_json(result)["results"]
        # The cut at 128 tokens and the last root, which needs no forward, both lower tau here.
        tau = sum(len(entry["new_ids"]) for entry in results) / sum(entry["steps"] for entry in results)
        rows.append(about | {"tree": tree, "tau": round(tau, 4)} | cost)
    return rows


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children, in seconds."""
    return sum(os.times()[:4])


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--backbone", required=True, help="the folder of stories260K")
    parser.add_argument("--reference", required=True, type=Path, help="prompts and greedy ids of the original (JSON)")
    parser.add_argument("--openings", required=True, help="stories whose openings the backbone continues (.txt)")
    parser.add_argument("--output", required=True, type=Path, help="write here; heads that exist are kept")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--kinds", nargs="+", choices=CHOICES, default=["medusa"], help="+prefix adds a prefix layer")
    parser.add_argument("--num-heads", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--trees", nargs="+", default=[TREE], help="for measuring tau (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, help="JSON Lines to measure tau on, instead of the reference's 24")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--texts", type=int, default=10_000, help="of 128 tokens each (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=12, help="CPU minutes for everything (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for medusa train")
    args = parser.parse_args(argv)
    if args.prompts:
        read_documents(str(args.prompts))  # refused before the training if it cannot be read
    content = read_json(args.reference)
    continuations = next(iter(content["runs"].values()))["new_ids"]
    texts = [prompt + new for prompt, new in zip(content["prompts"], continuations, strict=True)]
    prompts = write_jsonl(args.output / "prompts.jsonl", "input_ids", content["prompts"])
    excluded = write_jsonl(args.output / "excluded.jsonl", "input_ids", texts)
    rows: list[Row] = []
    for seed, recipe, kind in itertools.product(args.seeds, args.recipes, args.kinds):
        rows += run(args, recipe, kind, seed, args.prompts or prompts, excluded)
        print(rows[-1], flush=True)
    if args.json:
        settings = {"texts": args.texts, "new_tokens": NEW_TOKENS, "minutes": args.minutes}
        settings |= {"temperatures": TEMPERATURES, "recipes": {name: RECIPES[name] for name in args.recipes}}
        write_json(args.json, {"settings": settings, "rows": rows})
    about, lines = itemgetter("recipe", "kind", "tree"), []
    for key in dict.fromkeys(map(about, rows)):
        group = [row for row in rows if about(row) == key]
        taus, longest = [row["tau"] for row in group], max(row["cpu_minutes"] for row in group)
        each = ", ".join(f"{tau:.3f}" for tau in taus)
        lines.append([*key, f"{statistics.median(taus):.3f}", each, f"at most {longest:.2f}"])
    print(markdown_table(["recipe", "heads", "tree", "tau", "of each seed", "CPU minutes"], lines))


if __name__ == "__main__":
    run_script(main)
