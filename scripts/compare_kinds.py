"""Compare heads on one backbone: tau and speed.

    python scripts/compare_kinds.py --backbone B --prompts prompts.jsonl --trees dynamic:64 dynamic:16 --compile \\
        --heads paper=runs/paper medusa=runs/medusa hydra=runs/hydra --threads 1 --json kinds.json

In each round, plain decoding and all heads with all trees decode all prompts, in turns. Figures are medians over the
rounds, and a speedup is the median of the ratios within the rounds. With one thread, CPU time is measured. `medusa
benchmark` compares the drafters of one set of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from decode.bench.benchmark import Contender, run_rounds, summarize
from decode.bench.calibration.stored import files_for, situation, stored
from decode.bench.figures import MethodFigures
from decode.bench.machine import machine, stopwatch
from decode.bench.methods import Method, medusa_method, plain_method
from decode.compiled import region
from decode.drafters.layouts import Layout, with_shortlist
from decode.settings import Settings
from decode.tree_check import require_tree_forward
from medusa.arguments import parse
from medusa.commands.models import Opened, fitted_heads, open_models
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models, Prompts
from medusa.commands.trees import choose_tree, heads_folder
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded
from medusa.options import REQUIRED, count, dtype_name, group, option
from medusa.quantization import quantization_of
from medusa.tree import Tree
from script_tools import markdown_table, run_script, script_parser

TREES = """decode with these trees: as for medusa generate, or calibrated:N for the static tree of N nodes that
`medusa calibrate` stored with the heads (default: dynamic:64)"""


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
    batch_size: int = count(1, "decode N prompts together")


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
    if "transformers" not in methods:  # `summarize` needs it for a speedup over `generate`
        contenders.append(replace(contenders[0], name="transformers"))
    return summarize(contenders, [record.category for record in options.prompts.read()])


def without_folder(place: str) -> str:
    """Return the last part of a local folder, because results name no folders of a machine; other names stay."""
    return Path(place).resolve().name if Path(place).is_dir() else place


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(KindsOptions, script_parser(__doc__), argv)
    given = [named.partition("=")[0] for named in options.heads]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise RequestError(f"--heads names two folders {twice}; give each another name")
    measured, settings = open_models(options, options.prompts.read()), options.settings
    require_tree_forward(measured.loaded.model)
    loaded = measured.loaded
    methods: dict[str, Method] = {"plain": plain_method(loaded.model, settings)}
    rows: dict[str, dict[str, object]] = {}
    for named in options.heads:
        name, _, folder = named.partition("=")
        if not folder:
            raise RequestError(f"--heads {named}: write NAME=FOLDER")
        heads = fitted_heads(MedusaHeads.from_pretrained(folder), loaded)
        for asked in options.trees:
            own = replace(options, models=replace(options.models, heads=folder, tree=asked))
            tree = tree_for(own, loaded, heads)
            methods[f"{name} {asked}"] = medusa_method(loaded.model, heads, settings, tree=tree)
            about = {
                "heads": name,
                "folder": without_folder(folder),
                "tree": asked,
                "nodes": tree.num_nodes,
                "parameters": heads.num_parameters,
            }
            rows[f"{name} {asked}"] = about
    region.KEPT = max(region.KEPT, len(methods))  # compiled regions that are kept: each method needs its own
    figures = take_turns(options, measured, methods)
    for key, row in rows.items():
        found, plain = figures[key], figures["plain"].tokens_per_second.median
        row |= {"equal_to_plain": found.equal_to_plain, "tau": found.tau, "speedup": found.speedup}
        row |= {"tokens_per_second": found.tokens_per_second.median, "plain_tokens_per_second": plain}
    formats = {"parameters": ",", "tau": ".2f", "tokens_per_second": ".0f", "speedup": ".2f", "equal_to_plain": ".0%"}
    head = ["heads", "tree", "parameters", "tau", "tokens/s", "x plain", "same text"]
    lines = [[row["heads"], row["tree"], *(format(row[k], to) for k, to in formats.items())] for row in rows.values()]
    options.output.console.print(markdown_table(head, lines), markup=False, highlight=False, soft_wrap=True)
    about = {"backbone": without_folder(loaded.name), "compile": settings.compile, "prompts": len(measured.prompts)}
    about |= {
        "source": without_folder(options.prompts.prompts or "--prompt"),
        "max_new_tokens": settings.max_new_tokens,
    }
    about |= {"rounds": options.rounds, "batch_size": options.batch_size, "seed": options.runtime.seed}
    about |= {"dtype": dtype_name(loaded.model.dtype), "attention": loaded.model.config._attn_implementation}
    about |= {"numerics": settings.numerics, "quantization": quantization_of(loaded.model)}
    options.output.write({"machine": asdict(machine()), "settings": about, "rows": list(rows.values())})


if __name__ == "__main__":
    run_script(main)
