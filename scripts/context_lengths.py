"""Measure tau of heads, and what a draft costs, by the length of the text before it.

    python scripts/context_lengths.py --backbone stories260K --data train.txt --eval eval.txt --output runs/context \\
        --json context_lengths.json

The backbone is first trained further on long rows (2,048 tokens, or `--length`). Heads are then trained for equal time,
on such rows and on rows of 512 tokens; a window is also set after the training. All heads continue the same held-out
texts after their last 512 to 1,950 tokens, or `--contexts`. On a CPU, CPU time counts, and the costs of new heads for
the embedded backbone are measured, too.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, TrainingArguments

from backbone_training import BackboneTrainer, Recipe, cut_rows, encode
from compare_kinds import PATH, counted
from decode.bench.machine import machine
from decode.bench.methods import Method, medusa_method, plain_method
from decode.draft import Frontier
from decode.drafters.layouts import resolve_tree
from decode.drafters.trained_heads import heads_drafter
from decode.heads_cache import HeadsCache
from decode.results import Result, tau
from decode.settings import Settings
from medusa import MedusaHeads
from medusa.backbone import Backbone
from medusa.errors import RequestError, RunError
from medusa.files import Json, write_json
from medusa.heads.eagle import EagleHeads
from medusa.loading import Loaded, load_backbone, load_tokenizer
from medusa.options import LoadOptions
from script_tools import markdown_table, medusa, read_documents, run_script, script_parser, write_jsonl
from train.config import HeadsConfig
from train.heads import new_heads

LENGTH, WINDOW, NUM_HEADS = 2048, 256, 6
SHORT = 512  # tokens of the other rows that heads are trained on
TRAINING_TOKENS, STEPS = 600 * LENGTH, 160  # tokens for the heads, and steps of the backbone's training
RECIPE = Recipe(row_length=LENGTH, batch_size=2, muon_lr=0.005, adamw_lr=1e-3, warmup_steps=20)
KINDS: dict[str, Json] = {
    "medusa": {"kind": "medusa"},
    "prefix": {"kind": "medusa", "prefix_layers": 1},
    "eagle": {"kind": "eagle"},
    "eagle, window": {"kind": "eagle", "window": WINDOW},
}
CONTEXTS, NEW_TOKENS, PROMPTS = (512, 1024, 1536, 1950), 96, 20
READ_AT_ONCE = 40_000  # tokens of prompts: attention over a prompt may hold its whole scores in memory
TREES = ("mc_sim_7b_63", "dynamic:64")
COST_CONTEXTS, REPEATS = (512, 2048, 8192), 15
CPU = "cpu"


def exact(backbone: str | Path, device: str = CPU) -> Loaded:
    """Load a model in float32."""
    return load_backbone(str(backbone), LoadOptions("float32", device))


def rows_of(backbone: str, path: str, length: int) -> Tensor:
    """Cut stories, joined in the order of the name that each has most often, into rows [R, length], which are shuffled.

    So most stories of a row are about the same name, and early text tells the model what to expect later."""

    def name(story: str) -> str:
        found = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", story)).most_common(1)
        return found[0][0] if found else ""

    stories = sorted(read_documents(path), key=name)
    rows = cut_rows(encode(load_tokenizer(backbone), stories), length).datasets["input_ids"]
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def lengthen(args: argparse.Namespace) -> None:
    """Train the backbone further on rows of `--length` tokens, and write it."""
    model, folder = exact(args.backbone, args.device).model, args.output / "backbone"
    model.config.max_position_embeddings = args.length
    rows = cut_rows([rows_of(args.backbone, args.data, args.length).flatten()], args.length)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=RECIPE.batch_size,
        use_cpu=args.device == CPU,
        seed=0,
        save_strategy="no",
        remove_unused_columns=False,
    )
    BackboneTrainer(model, rows, replace(RECIPE, row_length=args.length), arguments, None).train()
    model.eval().save_pretrained(folder)
    tokenizer = load_tokenizer(args.backbone)
    tokenizer.model_max_length = args.length
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def losses(model: PreTrainedModel, rows: Tensor) -> list[float]:
    """Compute the mean loss in nats a token of `rows` [R, T] in four bins of positions."""
    found = []
    for row in rows.long().to(model.device).split(1):
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        found.append(F.cross_entropy(logits, row[0, 1:], reduction="none"))
    return [round(float(part.mean()), 4) for part in torch.stack(found).mean(0).split(rows.shape[1] // 4)]


def train_heads(args: argparse.Namespace, kind: str, length: int) -> Path:
    """Train heads of a kind on rows of `length` tokens, unless they exist; return their folder."""
    folder, rows = args.output / f"{kind.replace(', ', '-')}-{length}", args.output / "rows.jsonl"
    if (folder / "provenance.json").is_file():
        return folder
    if not rows.is_file():
        taken = TRAINING_TOKENS // args.length
        write_jsonl(rows, "input_ids", rows_of(args.backbone, args.data, args.length)[:taken].tolist())
    training = {"objective": "argmax", "head_weighting": "dpace", "bf16": True, "seed": 0, "save_strategy": "no"}
    budget = "max_cpu_minutes" if args.device == CPU else "max_minutes"
    training |= {budget: args.minutes, "per_device_train_batch_size": args.length // length}
    config = {
        "backbone": str(args.output / "backbone"),
        "data": {"path": str(rows), "sequence_length": length},
        "output_dir": str(folder),
        "heads": {"num": NUM_HEADS} | KINDS[kind],
        "cache_features": True,
        "features_dir": str(args.output / f"features-{length}"),
        "device": args.device,  # must be explicit with bf16
        "training": training | {"num_train_epochs": 1000},
    }
    write_json(folder.with_suffix(".json"), config)  # JSON is YAML
    medusa("train --threads 1 --quiet --overwrite", folder.with_suffix(".json"))
    return folder


def measured_heads(args: argparse.Namespace) -> dict[str, MedusaHeads]:
    """Train what is missing, and return all sets of heads by their names."""
    found: dict[str, MedusaHeads] = {}
    for kind, length in product(KINDS, args.rows or (args.length, SHORT)):
        folder = train_heads(args, kind, length)
        found[f"{kind}, rows of {length}"] = MedusaHeads.from_pretrained(folder).to(args.device)
        if kind == "eagle":
            narrow = MedusaHeads.from_pretrained(folder).to(args.device)
            assert isinstance(narrow, EagleHeads)
            narrow.config.own.window = narrow.window = WINDOW
            found[f"{kind}, rows of {length}, window after training"] = narrow
    return found


def continued(method: Method, prompts: Sequence[list[int]]) -> list[Result]:
    """Decode prompts of one length in batches of at most `READ_AT_ONCE` tokens."""
    batch = max(1, READ_AT_ONCE // len(prompts[0]))
    return [result for start in range(0, len(prompts), batch) for result in method(prompts[start : start + batch])]


def tau_by_context(loaded: Loaded, heads: dict[str, MedusaHeads], rows: Tensor, contexts: Sequence[int]) -> list[Json]:
    """Continue `rows` [R, T] greedily after contexts of several lengths, which end at the same token of a row.

    RunError: on a CPU, heads wrote another text than plain decoding. On a GPU, where kernels for several tokens round
    differently, the equal texts are counted."""
    settings, found, end = Settings(max_new_tokens=NEW_TOKENS, ignore_eos=True), [], max(contexts)
    for context in contexts:
        prompts = rows[:, end - context : end].tolist()
        texts = [result.new_ids for result in continued(plain_method(loaded.model, settings), prompts)]
        for (name, own), tree in product(heads.items(), TREES):
            results = continued(medusa_method(loaded.model, own, settings, tree=tree), prompts)
            equal = sum(result.new_ids == text for result, text in zip(results, texts, strict=True))
            if equal < len(texts) and loaded.model.device.type == CPU:
                raise RunError(f"{name} wrote another text after {context} tokens than plain decoding")
            each = [round(tau([result]), 4) for result in results]
            found.append({"heads": name, "tree": tree, "context": context, "tau": tau(results), "each": each})
            found[-1]["equal_texts"] = equal
    return found


@torch.inference_mode()
def cost_of_draft(heads: MedusaHeads, backbone: Backbone, tree: str, context: int) -> Json:
    """Count the MFLOP and measure the CPU milliseconds of a draft after a random text of `context` tokens.

    A draft includes the update of the heads' cache with the accepted path. Neither depends on what heads learned."""
    cache, ids = HeadsCache(heads, backbone, 1, 2 * context), torch.zeros(1, context, dtype=torch.long)
    hidden = cache.piece(torch.randn(1, context, backbone.hidden_size), ids)
    drafter = heads_drafter(heads, backbone, resolve_tree(tree, heads))

    def draft() -> None:
        drafter.propose(Frontier(ids[:, 0], hidden[:, -1], [0], cache.context_kv()))
        cache.path(hidden[:, -1], hidden[:, :PATH], ids[:, :PATH], [PATH])

    with FlopCounterMode(display=False, custom_mapping=counted()) as counter:
        draft()
    times = []
    for _ in range(REPEATS):
        start = process_time()
        draft()
        times.append(process_time() - start)
    return {"mflop": counter.get_total_flops() / 1e6, "milliseconds": 1000 * median(times)}


def costs(backbone: Backbone) -> list[Json]:
    """Measure the drafts of new heads of each kind (`cost_of_draft`) for a backbone, after texts of several lengths."""
    found: list[Json] = []
    for kind, settings in KINDS.items():
        heads = new_heads(backbone.model, HeadsConfig(num=NUM_HEADS, **settings), "backbone").eval()
        for tree, context in product(TREES, COST_CONTEXTS):
            found.append({"heads": kind, "tree": tree, "context": context})
            found[-1] |= cost_of_draft(heads, backbone, tree, context)
    return found


def table(rows: list[Json], value: str, digits: int) -> str:
    """Format `value` of the rows as a Markdown table with a column for each context."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cells.setdefault((row["heads"], row["tree"]), []).append(f"{row[value]:.{digits}f}")
    contexts = sorted({row["context"] for row in rows})
    return f"{value}\n\n" + markdown_table(["heads", "tree", *contexts], [[*key, *own] for key, own in cells.items()])


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--backbone", required=True, help="a small model, such as stories260K")
    parser.add_argument("--data", required=True, help="stories to train on (.txt)")
    parser.add_argument("--eval", required=True, help="other stories, for prompts (.txt)")
    parser.add_argument("--output", required=True, type=Path, help="write here; what exists is kept")
    parser.add_argument("--minutes", type=float, default=4, help="minutes for each heads (default: %(default)s)")
    parser.add_argument("--length", type=int, default=LENGTH, metavar="T", help="tokens of long rows (default: 2048)")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="T", help="tokens before a text")
    parser.add_argument("--rows", type=int, nargs="+", metavar="T", help="train heads only on rows of these lengths")
    parser.add_argument("--device", default=CPU, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    if max(args.contexts) + NEW_TOKENS > args.length:
        raise RequestError(f"--contexts must be at most {args.length - NEW_TOKENS}: a text has {NEW_TOKENS} new tokens")
    if max(args.rows or [SHORT]) > args.length:
        raise RequestError(f"--rows must be at most --length, {args.length}, and by default it is {SHORT}")
    args.output /= f"{args.length} tokens"  # so that a run with another length does not continue from these files
    held_out = rows_of(args.backbone, args.eval, args.length)
    torch.set_num_threads(1)
    if not (args.output / "backbone" / "config.json").is_file():
        lengthen(args)
    loaded = exact(args.output / "backbone", args.device)
    found: Json = {"minutes": args.minutes, "window": WINDOW, "length": args.length}
    found["machine"] = asdict(machine())
    found["loss before"] = losses(exact(args.backbone, args.device).model, held_out)
    found["loss after"] = losses(loaded.model, held_out)
    found["tau"] = tau_by_context(loaded, measured_heads(args), held_out[:PROMPTS], args.contexts)
    print(f"nats a token in the four quarters of rows: {found['loss before']}, then {found['loss after']}")
    print(table(found["tau"], "tau", 3), end="\n\n")
    if args.device == CPU:
        found["costs"] = costs(Backbone(exact("demo").model))
        print(table(found["costs"], "mflop", 1), table(found["costs"], "milliseconds", 2), sep="\n\n")
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    run_script(main)
