"""Compare heads on one backbone: tau, the cost of a step, and speed.

    python scripts/compare_kinds.py --backbone B --prompts prompts.jsonl --trees dynamic:64 dynamic:16 --compile \\
        --heads paper=runs/paper medusa=runs/medusa hydra=runs/hydra --threads 1 --json kinds.json

In each round, plain decoding and all heads with all trees decode all prompts, in turns. Figures are medians over the
rounds, and a speedup is the median of the ratios within the rounds. With one thread, CPU time is measured. The cost of
a step is counted, not timed: floating point operations of matrix products and attention, and the bytes that they read
and write, in one step of one text after `--context` tokens. `medusa benchmark` compares the drafters of one set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from decode.bench.benchmark import Contender, run_rounds, summarize
from decode.bench.calibration.stored import files_for, situation, stored
from decode.bench.figures import MethodFigures
from decode.bench.machine import machine, stopwatch
from decode.bench.methods import Method, medusa_method, plain_method
from decode.compiled import region
from decode.drafters.layouts import Layout, with_shortlist
from decode.drafters.trained_heads import heads_drafter
from decode.drafters.trellis import TrellisDrafter
from decode.request import prepare
from decode.session import Session
from decode.settings import Settings
from decode.tree_check import require_tree_forward
from medusa.arguments import parse
from medusa.commands.models import Opened, choose_tree, heads_folder, open_heads, open_models
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models, Prompts
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded
from medusa.options import REQUIRED, count, group, option
from medusa.tree import Tree
from script_tools import markdown_table, run_script, script_parser

TREES = """decode with these trees: as for medusa generate, or calibrated:N for the static tree of N nodes that
`medusa calibrate` stored with the heads (default: dynamic:64)"""
PATH = 4  # nodes on the accepted path of the counted step
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's own counter knows those of GPUs only
# In inference mode, which `costs` uses, scaled_dot_product_attention is one operation.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_linear_pointwise", "scaled_dot_product_attention"}


class KindsOptions(CommandOptions):
    """Options of compare_kinds.py: greedy decoding, continued after EOS."""

    by_position = ()

    models: Models = group(Models, "models", only=("backbone",), backbone=REQUIRED)
    prompts: Prompts = group(Prompts, "prompts")
    settings: Settings = group(
        Settings, "generation", only=("max_new_tokens", "compile"), max_new_tokens=128, ignore_eos=True
    )
    contrasting: Contrasting = NO_CONTRAST
    heads: tuple[str, ...] = option(REQUIRED, "compare these heads", metavar="NAME=FOLDER", nargs="+")
    trees: tuple[str, ...] = option(("dynamic:64",), TREES, metavar="TREE", nargs="+")
    rounds: int = count(3, "decode all prompts N times")
    context: int = count(256, "count the step after N tokens")
    batch_size: int = count(1, "decode N prompts together; the cost of a step stays that of one text")


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: object, **kw: object) -> int:
    """Count the operations of two products of shapes [B, A heads, tokens, D]. Masks save none: all keys count."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def linear_flops(input: Sequence[int], weight: Sequence[int], *args: object, **kw: object) -> int:
    """Count the operations of a linear layer by oneDNN (`decode.ops.fast_linear`), which torch's counter leaves out."""
    return 2 * math.prod(input) * weight[0]


def counted() -> dict[object, Callable[..., int]]:
    """The operations that torch's counter does not know, each with its count."""
    known: dict[object, Callable[..., int]] = {ATTENTION: attention_flops}
    return known | ({torch.ops.mkldnn._linear_pointwise: linear_flops} if torch.backends.mkldnn.is_available() else {})


class Bytes(TorchDispatchMode):
    """Context manager that sums the bytes which matrix products read and write; a view counts with its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.total += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return out


@torch.inference_mode()
def costs(loaded: Loaded, heads: MedusaHeads, tree: Layout, prompt: list[int]) -> dict[str, float]:
    """Count the operations and bytes, in millions, of one step after `prompt`: of the draft and of the tree's forward.

    Only matrix products and attention count. For heads with a cache, the draft includes its update after a step."""
    requests = prepare(loaded.model, [prompt], max_new_tokens=PATH, do_sample=False)
    session = Session(loaded.model, requests, tree.num_nodes, heads=heads)
    frontier, drafter = session.prefill(), heads_drafter(heads, session.backbone, tree)
    if isinstance(drafter, TrellisDrafter):
        drafter.plan = None  # count whole tables; the operation that a CPU has computes only a part of them
    counter = partial(FlopCounterMode, display=False, custom_mapping=counted())
    with counter() as drafting, Bytes() as moved:
        draft = drafter.propose(frontier)
        if session.heads_cache is not None:  # updated with the accepted path, here of PATH nodes
            states = session.backbone.hidden_size * len(session.backbone.feature_layers or (None,))
            hidden = frontier.hidden.new_zeros(1, PATH, states)
            session.heads_cache.path(frontier.hidden, hidden, frontier.root[:, None].expand(-1, PATH), [PATH])
    with counter() as verifying, Bytes() as read:
        session.verifier(draft)
    of_draft = {"draft_mflop": drafting.get_total_flops() / 1e6, "draft_megabytes": moved.total / 1e6}
    return of_draft | {"forward_mflop": verifying.get_total_flops() / 1e6, "forward_megabytes": read.total / 1e6}


def tree_for(options: KindsOptions, loaded: Loaded, heads: MedusaHeads) -> Layout:
    """Return the tree that `options.models` names: as `medusa generate` does, or the stored tree of `calibrated:N`."""
    folder, tree = options.models.heads, str(options.models.tree)
    settings = replace(options.settings, compile=False)
    if not tree.startswith("calibrated:"):
        return choose_tree(options, loaded, heads, settings)
    found = stored(files_for(heads_folder(folder)), situation(loaded.model, heads, settings, 1))
    if found is None:
        raise RequestError(f"{folder} has no calibration for this situation; run `medusa calibrate` on it")
    paths = {str(point.nodes): point.paths for point in found.points if not point.dynamic}
    if (nodes := tree.partition(":")[2]) not in paths:
        raise RequestError(f"tree {tree}: {folder} was calibrated with {', '.join(paths)} nodes")
    return with_shortlist(Tree.from_paths(paths[nodes]), found.shortlist_for(int(nodes)))


def take_turns(options: KindsOptions, opened: Opened, methods: dict[str, Method]) -> dict[str, MethodFigures]:
    """Decode all prompts with all methods, which take turns, and return the figures of each method.

    The first method must be `plain`, plain decoding. With one CPU thread, CPU time is measured, else wall time."""
    contenders, size = [Contender(*named) for named in methods.items()], options.batch_size
    batches = [opened.prompts[start : start + size] for start in range(0, len(opened.prompts), size)]
    with options.output.progress_bars() as start_progress:
        advance = start_progress("measuring", options.rounds * len(batches))
        clock = stopwatch(opened.loaded.model.device)
        run_rounds(contenders, batches, options.rounds, advance, options.runtime.seed, clock)
    contenders.append(replace(contenders[0], name="transformers"))  # `summarize` needs it for a speedup over `generate`
    return summarize(contenders, [record.category for record in options.prompts.read()])


def without_folder(place: str) -> str:
    """Return the last part of a local folder, because results name no folders of a machine; other names stay."""
    return Path(place).resolve().name if Path(place).is_dir() else place


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(KindsOptions, script_parser(__doc__), argv)
    measured, settings = open_models(options, options.prompts.read()), options.settings
    require_tree_forward(measured.loaded.model)
    loaded, text = measured.loaded, list(islice(cycle(measured.prompts[0]), options.context))
    methods: dict[str, Method] = {"plain": plain_method(loaded.model, settings)}
    rows: dict[str, dict[str, object]] = {}
    for named in options.heads:
        name, _, folder = named.partition("=")
        if not folder:
            raise RequestError(f"--heads {named}: write NAME=FOLDER")
        heads = open_heads(folder, loaded)
        for asked in options.trees:
            own = replace(options, models=replace(options.models, heads=folder, tree=asked))
            tree = tree_for(own, loaded, heads)
            methods[f"{name} {asked}"] = medusa_method(loaded.model, heads, settings, tree=tree)
            about = {"heads": name, "tree": asked, "nodes": tree.num_nodes, "parameters": heads.num_parameters}
            rows[f"{name} {asked}"] = about | costs(loaded, heads, tree, text)
    region.KEPT = max(region.KEPT, len(methods))  # compiled regions that are kept: each method needs its own
    figures = take_turns(options, measured, methods)
    for key, row in rows.items():
        found, plain = figures[key], figures["plain"].tokens_per_second.median
        row |= {"equal_to_plain": found.equal_to_plain, "tau": found.tau, "speedup": found.speedup}
        row |= {"tokens_per_second": found.tokens_per_second.median, "plain_tokens_per_second": plain}
    formats = {"parameters": ",", "draft_mflop": ".2f", "draft_megabytes": ".2f", "tau": ".2f"}
    formats |= {"tokens_per_second": ".0f", "speedup": ".2f", "equal_to_plain": ".0%"}
    head = ["heads", "tree", "parameters", "draft MFLOP", "MB", "tau", "tokens/s", "x plain", "same text"]
    lines = [[row["heads"], row["tree"], *(format(row[k], to) for k, to in formats.items())] for row in rows.values()]
    options.output.console.print(markdown_table(head, lines), markup=False, highlight=False, soft_wrap=True)
    about = {"backbone": without_folder(loaded.name), "compile": settings.compile, "prompts": len(measured.prompts)}
    about |= {
        "max_new_tokens": settings.max_new_tokens,
        "rounds": options.rounds,
        "context": options.context,
        "batch_size": options.batch_size,
    }
    options.output.write({"machine": asdict(machine()), "settings": about, "rows": list(rows.values())})


if __name__ == "__main__":
    run_script(main)
