"""Heads side by side, on one backbone: what they accept, what a step of theirs costs, how fast they write.

    python scripts/compare_kinds.py --backbone B --prompts prompts.jsonl --trees dynamic:64 dynamic:16 --compile \\
        --heads paper=runs/paper medusa=runs/medusa hydra=runs/hydra --threads 1 --json kinds.json

Every round decodes all prompts with all heads and trees, in turns, and plainly; a figure is the median over rounds, a
speedup the median of the ratios within a round. On one thread its CPU time counts, so that a busy machine does little
harm. The cost of drafting is counted, not timed: floating point operations of matrix products and attention, and the
bytes that they read and write, in one step for one text, behind `--context` tokens of it. What
`scripts/reproduce_stories260k.py` trains can be compared as it stands.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import asdict
from functools import partial
from itertools import cycle
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from decode.bench import benchmark
from decode.bench.calibration.stored import files_for, situation, stored
from decode.bench.machine import machine
from decode.bench.methods import Method, medusa_method, plain_method
from decode.compiled import regions as compiled
from decode.drafters.dynamic_tree import Layout
from decode.drafters.trained_heads import heads_drafter
from decode.loop import Session
from decode.request import prepare
from decode.results import tau
from decode.settings import Settings
from decode.timers import stopwatch
from decode.tree_check import require_tree_forward
from decode.verify import Verifier
from medusa.commands import common
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded
from medusa.records import prompt_ids
from medusa.tree import Tree

TREES = """as for medusa generate, or calibrated:N, the static tree of N nodes that `medusa calibrate` has found and
kept beside the heads (default: dynamic:64)"""
WIDTH = 112  # letters, which the table takes; a narrow terminal breaks lines, and no figure is cut off
PATH = 4
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's own counter knows a GPU's only
PRODUCTS |= {"scaled_dot_product_attention"}  # whole in inference mode, which `costs` is in


def attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Both products, from shapes [B, A, queries or keys, D]; for every query all keys, as masks save nothing."""
    *rows, queries, size = query
    return 2 * math.prod(rows) * queries * key[2] * (size + value[3])


class Bytes(TorchDispatchMode):
    """Adds up what matrix products read and write; a part of a tensor counts as such."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.total += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_backbone(parser, heads=False)
    common.add_prompts(parser)
    parser.add_argument("--heads", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--trees", nargs="+", default=["dynamic:64"], metavar="TREE", help=TREES)
    parser.add_argument("--max-new-tokens", type=common.positive, default=128)
    parser.add_argument("--rounds", type=common.positive, default=3, help="(default: 3)")
    parser.add_argument(
        "--context",
        type=common.positive,
        default=256,
        metavar="N",
        help="tokens before the step that is counted (default: 256)",
    )
    parser.add_argument("--compile", action="store_true", help="compiled steps, plain decoding's too")
    common.add_machine(parser)
    args = parser.parse_args()
    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    require_tree_forward(loaded.model)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in common.read_prompts(args)]
    settings = Settings(max_new_tokens=args.max_new_tokens, ignore_eos=True, compile=args.compile)
    text = [token for token, _ in zip(cycle(prompts[0]), range(args.context), strict=False)]
    methods: dict[str, Method] = {"plain": plain_method(loaded.model, settings)}
    rows: dict[str, dict[str, Any]] = {}
    for named in args.heads:
        name, _, folder = named.partition("=")
        if not folder:
            parser.error(f"--heads {named}: write NAME=FOLDER")
        for asked in args.trees:
            own = argparse.Namespace(**vars(args) | {"heads": folder, "tree": asked, "batch_size": 1})
            heads = common.open_heads(own, loaded)
            tree = tree_for(own, loaded, heads)
            key = f"{name} {asked}"
            methods[key] = medusa_method(loaded.model, heads, settings, tree=tree)
            about = {"heads": name, "tree": asked, "nodes": tree.num_nodes, "parameters": heads.num_parameters}
            rows[key] = about | costs(loaded, heads, tree, text)
    measure(loaded, methods, rows, prompts, args)
    show(args, rows)
    about = {"backbone": args.backbone, "compile": args.compile, "prompts": len(prompts), "rounds": args.rounds}
    about["context"] = args.context
    common.write_results(args, {"machine": asdict(machine()), "settings": about, "rows": list(rows.values())})


def tree_for(args: argparse.Namespace, loaded: Loaded, heads: MedusaHeads) -> Layout:
    """As for `medusa generate`, and `calibrated:N`.

    Raises:
        RequestError: no such tree, or the heads cannot fill it."""
    settings = Settings(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    if not args.tree.startswith("calibrated:"):
        return common.choose_tree(args, loaded, heads, settings)
    files = files_for(common.heads_folder(args.heads))
    found = stored(files, situation(loaded.model, heads, settings, args.batch_size))
    if found is None:
        raise RequestError(f"{args.heads} has no calibration for this situation; run `medusa calibrate` on it")
    paths = {str(point.nodes): point.paths for point in found.points if not point.dynamic}
    if (nodes := args.tree.partition(":")[2]) not in paths:
        raise RequestError(f"tree {args.tree}: {args.heads} was calibrated with {', '.join(paths)} nodes")
    return Tree.from_paths(paths[nodes])


@torch.inference_mode()
def costs(loaded: Loaded, heads: MedusaHeads, tree: Layout, prompt: list[int]) -> dict[str, float]:
    """Of one step behind `prompt`: millions of operations and of bytes, for drafting and for the tree's forward.

    Matrix products and attention; of a prefix layer and `eagle` heads also the reading of what was accepted."""
    session = Session(
        loaded.model, prepare(loaded.model, [prompt], max_new_tokens=PATH, do_sample=False), tree.num_nodes, heads=heads
    )
    frontier, drafter = session.prefill(), heads_drafter(heads, session.backbone, tree)
    verifier = Verifier(session.backbone, session.cache, session.sequences)
    counter = partial(FlopCounterMode, display=False, custom_mapping={ATTENTION: attention_flops})
    with counter() as operations, Bytes() as moved:
        draft = drafter.propose(frontier)
        if session.reader is not None:  # reads what was accepted: here a path of PATH nodes
            hidden = frontier.hidden[:, None].expand(-1, PATH, -1)
            session.reader.path(frontier.hidden, hidden, frontier.root[:, None].expand(-1, PATH), [PATH])
    with counter() as verifying, Bytes() as read:
        verifier(draft)
    return {
        "draft_mflop": operations.get_total_flops() / 1e6,
        "draft_megabytes": moved.total / 1e6,
        "forward_mflop": verifying.get_total_flops() / 1e6,
        "forward_megabytes": read.total / 1e6,
    }


def measure(
    loaded: Loaded,
    methods: dict[str, Method],
    rows: dict[str, dict[str, Any]],
    prompts: list[list[int]],
    args: argparse.Namespace,
) -> None:
    """Put tau and rates into `rows`."""
    compiled.KEPT = max(compiled.KEPT, len(methods))  # in turns, all of them are needed again and again
    contenders = [benchmark.Contender(name, method) for name, method in methods.items()]
    with Progress(console=common.console(args), disable=args.quiet, transient=True) as progress:
        task = progress.add_task("measuring", total=args.rounds * len(prompts))
        turn = partial(progress.advance, task)
        batches = [[prompt] for prompt in prompts]
        benchmark.run_rounds(contenders, batches, args.rounds, turn, args.seed, stopwatch(loaded.model.device))
    plain = contenders[0]
    rates = {contender.name: contender.tokens_per_second() for contender in contenders}
    for contender in contenders[1:]:
        row, results = rows[contender.name], contender.rounds[0]
        same = [a.new_ids == b.new_ids for a, b in zip(results, plain.rounds[0], strict=True)]
        row |= {"equal_to_plain": sum(same) / len(same), "tau": tau(results)}
        row["tokens_per_second"] = statistics.median(rates[contender.name])
        row["speedup"] = statistics.median(a / b for a, b in zip(rates[contender.name], rates["plain"], strict=True))
        row["plain_tokens_per_second"] = statistics.median(rates["plain"])


def show(args: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> None:
    console = common.output_console(args)
    console.width = max(console.width, WIDTH)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("heads", "tree", "parameters", "draft MFLOP", "MB", "tau", "tokens/s", "x plain", "same text"):
        figure = head not in ("heads", "tree")
        table.add_column(head, justify="right" if figure else "left", no_wrap=not figure)
    for row in rows.values():
        table.add_row(
            row["heads"],
            row["tree"],
            f"{row['parameters']:,}",
            f"{row['draft_mflop']:.2f}",
            f"{row['draft_megabytes']:.2f}",
            f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['equal_to_plain']:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        print(f"compare_kinds: error: {error}", file=sys.stderr)
        sys.exit(2)
