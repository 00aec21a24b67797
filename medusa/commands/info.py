"""Describe a set of heads: kind, shapes, tree, backbone and training.

  medusa info demo
  medusa info runs/my-heads --json info.json

HEADS may have any published format (docs/formats.md), which is recognised from the tensors."""

from __future__ import annotations

from importlib.metadata import version

from rich.table import Table

from medusa.commands.options import Output
from medusa.options import REQUIRED, Options, group, option

PROMPTS = {True: "plain text when distilling", False: "through the chat template when distilling", None: "not recorded"}


class InfoOptions(Options):
    by_position = ("heads",)
    heads: str = option(REQUIRED, "describe these heads: a folder, a Hub id, or demo (shipped)", metavar="H")
    output: Output = group(Output, "output")


def run(options: InfoOptions) -> None:
    from decode.drafters import REGISTRY
    from medusa.checkpoints.folder import find_folder
    from medusa.heads import HEADS, class_of
    from medusa.heads.independent import MedusaHeads
    from medusa.tree import Tree
    from medusa.versions import TESTED, in_words

    heads = MedusaHeads.from_pretrained(options.heads)
    config = heads.config
    tree = Tree.from_paths(config.tree) if config.tree else None
    inner = class_of(config.kind).inner_width(config)
    width = f", {inner} wide" if inner else ""
    about: dict[str, object] = {
        "folder": str(find_folder(options.heads)),
        "kind": config.kind + (f", {config.prefix_layers} prefix layers" if config.prefix_layers else ""),
        "heads": config.num_heads,
        "blocks per head": f"{config.num_layers} {config.block}{width}",
        "reads": config.reads,
        "LM head": config.lm_head,
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size or "the backbone's",
        "tokens guessed among": config.vocabulary or "all",
        "parameters": heads.num_parameters,
        "backbone": config.base_model_name_or_path or "not recorded",
        "loadable by servers": "yes"
        if config.servable
        else "no: servers load only square blocks of kind medusa and gated blocks of kind eagle",
        "prompts": PROMPTS[config.raw_prompts],
        "options of the chat template": config.template_options or "none",
        "tree": f"{tree.num_nodes} nodes, {tree.max_depth} deep" if tree else "none saved; the default tree is used",
    }
    provenance = heads.provenance or {}
    about |= {key: provenance[key] for key in ("command", "data", "versions", "result") if key in provenance}
    about["installed"] = {name: f"{version(name)} (tested: {in_words(name)})" for name in TESTED}
    others = [
        f"{registry.what} {one.name} ({one.package})" + (f" does not load: {one.failure}" if one.failure else "")
        for registry in (HEADS, REGISTRY)
        for one in registry.extensions()
    ]
    if others:
        about["from other packages"] = "; ".join(others)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in about.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    options.output.console.print(table)
    options.output.write(about | {"config": config.to_dict()})
