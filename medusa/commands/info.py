"""What a set of heads is: kind, shapes, tree, the backbone it belongs to, how it was trained.

medusa info demo
medusa info runs/my-heads --json info.json
"""

from __future__ import annotations

import argparse
from typing import Any

from medusa.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("heads", metavar="HEADS", help="a local folder, a Hub id, or demo (shipped)")
    parser.add_argument("--json", metavar="FILE", help="write the same, machine-readable")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


def run(args: argparse.Namespace) -> None:
    common.check_output(args.json)
    from medusa.checkpoints.folder import find_folder
    from medusa.checkpoints.stored import PROVENANCE
    from medusa.config import GATED
    from medusa.files import read_json
    from medusa.heads.independent import MedusaHeads
    from medusa.tree import Tree

    folder = find_folder(args.heads)
    heads = MedusaHeads.from_pretrained(folder)
    provenance = read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else {}
    config = heads.config
    about: dict[str, Any] = {
        "folder": str(folder),
        "kind": config.kind + (f", {config.prefix_layers} prefix layers" if config.prefix_layers else ""),
        "heads": config.num_heads,
        "blocks per head": f"{config.num_layers} {config.block}"
        + (f", {config.inner_size} wide" if config.block in ("mlp", GATED) else ""),
        "LM head": config.lm_head,
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size or "the backbone's",
        "tokens guessed among": config.vocabulary or "all",
        "parameters": heads.num_parameters,
        "backbone": config.base_model_name_or_path or "not said",
        "loadable by servers": "yes"
        if config.servable
        else "no: they load independent heads of square blocks, and kind eagle with block gated",
    }
    if config.tree:
        tree = Tree.from_paths(config.tree)
        about["tree"] = f"{tree.num_nodes} nodes, {tree.max_depth} deep"
    else:
        about["tree"] = "none saved; the default one is used"
    for key in ("command", "data", "versions", "result"):
        if key in provenance:
            about[key] = provenance[key]
    _show(args, about)
    if args.json:
        common.write_results(args, about | {"config": config.to_dict()})


def _show(args: argparse.Namespace, about: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in about.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    common.output_console(args).print(table)
