"""Measure tau of heads, and what a draft costs, by the length of the text before it.

    python scripts/context_lengths.py --backbone stories260K --data train.txt --eval eval.txt --output runs/context \\
        --json context_lengths.json

The backbone is first trained further on rows of 2,048 tokens. Heads are then trained for equal CPU time on such rows
(`long`) or on rows of 512 tokens (`short`). A window of eagle heads can also be set after the training (`+`). All heads
continue the same held-out texts, of which they are shown the last 512 to 1,950 tokens.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, TrainingArguments

from backbone_training import BackboneTrainer, Recipe, cut_rows, encode
from compare_kinds import costs
from decode.bench.methods import medusa_method
from decode.drafters.layouts import resolve_tree
from decode.drafters.trained_heads import heads_drafter
from decode.request import prepare
from decode.results import Result, tau
from decode.session import Session
from decode.settings import Settings
from medusa import MedusaHeads
from medusa.errors import RequestError
from medusa.files import Json, write_json
from medusa.loading import Loaded, load_backbone, load_tokenizer
from medusa.options import LoadOptions
from script_tools import markdown_table, medusa, read_documents, run_script, script_parser, write_jsonl
from train.config import HeadsConfig
from train.heads import new_heads

LENGTH, SHORT, WINDOW, NUM_HEADS = 2048, 512, 256, 6
RECIPE = Recipe(row_length=LENGTH, batch_size=2, muon_lr=0.005, adamw_lr=1e-3, warmup_steps=20)
KINDS: dict[str, Json] = {
    "medusa": {"kind": "medusa"},
    "prefix": {"kind": "medusa", "prefix_layers": 1},
    "eagle": {"kind": "eagle"},
    "eagle, window": {"kind": "eagle", "window": WINDOW},
}
SERIES = {"long": LENGTH, "short": SHORT}
CONTEXTS, NEW_TOKENS, PROMPTS = (512, 1024, 1536, 1950), 96, 20
TREES = ("mc_sim_7b_63", "dynamic:64")
COST_CONTEXTS, REPEATS = (512, 2048, 8192), 15
LOSS_BINS = ("to 512", "to 1024", "to 1536", "to 2048")
EXACT = LoadOptions("float32", "cpu")


def rows_of(backbone: str, path: str) -> Tensor:
    """Cut stories, joined in the order of the name that each has most often, into rows [R, LENGTH] of token ids.

    So most stories of a row are about the same name, and early text tells the model what to expect later."""

    def name(story: str) -> str:
        found = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", story)).most_common(1)
        return found[0][0] if found else ""

    stories = sorted(read_documents(path), key=name)
    return cut_rows(encode(load_tokenizer(backbone), stories), LENGTH).datasets["input_ids"]


def lengthen(args: argparse.Namespace) -> None:
    """Train the backbone further on rows of `LENGTH` tokens, and write it."""
    model, folder = load_backbone(args.backbone, EXACT).model, args.output / "backbone"
    model.config.max_position_embeddings = LENGTH
    rows = cut_rows([rows_of(args.backbone, args.data).flatten()], LENGTH)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=args.steps,
        per_device_train_batch_size=RECIPE.batch_size,
        use_cpu=True,
        seed=0,
        save_strategy="no",
        remove_unused_columns=False,
    )
    BackboneTrainer(model, rows, RECIPE, arguments, None).train()
    model.eval().save_pretrained(folder)
    tokenizer = load_tokenizer(args.backbone)
    tokenizer.model_max_length = LENGTH
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def losses(model: PreTrainedModel, rows: Tensor) -> list[float]:
    """Compute the mean loss in nats a token of `rows` [R, LENGTH] in four bins of positions."""
    found = []
    for row in rows.long().split(1):
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        found.append(F.cross_entropy(logits, row[0, 1:], reduction="none"))
    return [round(float(part.mean()), 4) for part in torch.stack(found).mean(0).split(LENGTH // len(LOSS_BINS))]


def train_heads(args: argparse.Namespace, kind: str, series: str) -> Path:
    """Train heads of a kind on rows of a series, unless they exist; return their folder."""
    folder, length = args.output / series / kind.replace(", ", "-"), SERIES[series]
    if (folder / "provenance.json").is_file():
        return folder
    rows = args.output / "rows.jsonl"
    if not rows.is_file():
        write_jsonl(rows, "input_ids", rows_of(args.backbone, args.data).tolist())
    training = {"objective": "argmax", "head_weighting": "dpace", "bf16": True, "seed": 0, "save_strategy": "no"}
    training |= {"max_cpu_minutes": args.minutes, "per_device_train_batch_size": LENGTH // length}
    config = {
        "backbone": str(args.output / "backbone"),
        "data": {"path": str(rows), "sequence_length": length, "max_examples": args.rows},
        "output_dir": str(folder),
        "heads": {"num": NUM_HEADS} | KINDS[kind],
        "cache_features": True,
        "features_dir": str(args.output / f"features_{series}"),
        "device": "cpu",  # must be explicit with bf16
        "training": training | {"logging_steps": 50, "num_train_epochs": 1000},
    }
    write_json(folder.with_suffix(".json"), config)  # JSON is YAML
    medusa("train --threads 1 --quiet --overwrite", folder.with_suffix(".json"))
    return folder


def with_window(heads: MedusaHeads, window: int) -> MedusaHeads:
    """Set the window of trained eagle heads, which then attend only to their last `window` pairs; return them."""
    heads.config.window = heads.window = window
    return heads


def measured_heads(args: argparse.Namespace) -> dict[str, MedusaHeads]:
    """Train what is missing, and return all sets of heads by their names."""
    found: dict[str, MedusaHeads] = {}
    for kind in args.kinds:
        for series in SERIES:
            folder = train_heads(args, kind, series)
            found[f"{kind}, {series}"] = MedusaHeads.from_pretrained(folder)
            if kind == "eagle":
                found[f"{kind}, {series} + window"] = with_window(MedusaHeads.from_pretrained(folder), WINDOW)
    return found


def tau_by_context(loaded: Loaded, heads: dict[str, MedusaHeads], rows: Tensor) -> list[Json]:
    """Continue `rows` [R, LENGTH] greedily after contexts of several lengths, which end at the same token of a row."""
    settings, found, end = Settings(max_new_tokens=NEW_TOKENS, ignore_eos=True), [], max(CONTEXTS)
    for context in CONTEXTS:
        prompts, texts = rows[:, end - context : end].tolist(), None
        for name, own in heads.items():
            for tree in TREES:
                results: list[Result] = medusa_method(loaded.model, own, settings, tree=tree)(prompts)
                written = [result.new_ids for result in results]
                texts = texts or written
                if written != texts:
                    raise RequestError(f"{name} wrote another text after {context} tokens, which is a fault")
                each = [round(tau([result]), 4) for result in results]
                found.append({"heads": name, "tree": tree, "context": context, "tau": tau(results), "each": each})
                print(name, tree, context, f"{tau(results):.3f}", flush=True)
    return found


@torch.inference_mode()
def draft_costs(loaded: Loaded) -> list[Json]:
    """Count and time the drafts of new heads of each kind after texts of several lengths."""
    found: list[Json] = []
    loaded.model.config.max_position_embeddings = 2 * max(COST_CONTEXTS)  # no number depends on the text's quality
    for kind, settings in KINDS.items():
        heads = new_heads(loaded.model, HeadsConfig(num=NUM_HEADS, **settings), loaded.name).eval()
        for tree, context in ((tree, context) for tree in TREES for context in COST_CONTEXTS):
            layout, prompt = resolve_tree(tree, heads), [5] * context
            session = Session(loaded.model, prepare(loaded.model, [prompt]), layout.num_nodes, heads=heads)
            start, drafter, times = session.prefill(), heads_drafter(heads, session.backbone, layout), []
            for _ in range(REPEATS):
                begin = process_time()
                drafter.propose(session.frontier(start.root, start.hidden, start.rows))
                times.append(1000 * (process_time() - begin))
            counted = costs(loaded, heads, layout, prompt)
            found.append({"heads": kind, "tree": tree, "context": context, "draft_ms": median(times)} | counted)
            print(kind, tree, context, f"{median(times):.2f} ms, {counted['draft_mflop']:.1f} MFLOP", flush=True)
    return found


def show(rows: list[Json], value: str, form: str) -> str:
    """Format `value` of the rows as a table with a column for each context."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    by_heads: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        by_heads.setdefault((row["heads"], row["tree"]), []).append(format(row[value], form))
    return markdown_table(["heads", "tree", *map(str, contexts)], [[*key, *cells] for key, cells in by_heads.items()])


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--backbone", required=True, help="a small model, such as stories260K")
    parser.add_argument("--data", required=True, help="stories to train on (.txt)")
    parser.add_argument("--eval", required=True, help="other stories, for prompts (.txt)")
    parser.add_argument("--output", required=True, type=Path, help="write here; what exists is kept")
    parser.add_argument("--steps", type=int, default=160, help="of the backbone's training (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=600, help="to train heads on (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=4, help="CPU minutes for each heads (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--costs", default="demo", help="time drafts for this backbone (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    held_out = rows_of(args.backbone, args.eval)
    torch.set_num_threads(1)
    if not (args.output / "backbone" / "config.json").is_file():
        lengthen(args)
    loaded = load_backbone(str(args.output / "backbone"), EXACT)
    before, after = (losses(model, held_out) for model in (load_backbone(args.backbone, EXACT).model, loaded.model))
    print(markdown_table(["loss by position", *LOSS_BINS], [["before", *before], ["after", *after]]))
    taus = tau_by_context(loaded, measured_heads(args), held_out[:PROMPTS])
    drafts = draft_costs(load_backbone(args.costs, EXACT))
    print(show(taus, "tau", ".3f"), show(drafts, "draft_mflop", ".1f"), show(drafts, "draft_ms", ".2f"), sep="\n\n")
    if args.json:
        settings = {"minutes": args.minutes, "rows": args.rows, "steps": args.steps, "window": WINDOW}
        losses_by_position = {"before": before, "after": after}
        write_json(args.json, {"settings": settings, "losses": losses_by_position, "tau": taus, "costs": drafts})


if __name__ == "__main__":
    run_script(main)
