"""Describe a set of heads: kind, shapes, tree, backbone and training.

  medusa info demo
  medusa info runs/my-heads --json info.json

HEADS may have any published format (docs/formats.md), which is recognised from the tensors."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.table import Table

from medusa.commands.options import Output
from medusa.options import REQUIRED, Options, group, option
from medusa.places import require_heads

if TYPE_CHECKING:
    from medusa.config import MedusaConfig
    from medusa.files import Json
    from medusa.heads.independent import MedusaHeads

PROMPTS = {True: "plain text when distilling", False: "through the chat template when distilling", None: "not recorded"}


class InfoOptions(Options):
    by_position = ("heads",)
    heads: str = option(
        REQUIRED, "describe these heads: a folder, a Hub id, or demo (shipped)", metavar="H", exists=require_heads
    )
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
    own = {name: getattr(config, name) for name in class_of(config.kind).setting_names(recipe=True)}
    own = {name: value for name, value in own.items() if value is not None and value is not False}
    about: dict[str, object] = {
        "folder": str(find_folder(options.heads)),
        "kind": config.kind + (f", {config.prefix_layers} prefix layers" if config.prefix_layers else ""),
        "settings of the kind": ", ".join(f"{name} {value}" for name, value in own.items()) or "none",
        "heads": config.num_heads,
        "blocks per head": f"{config.num_layers} {config.block}{width}",
        "reads": config.reads,
        "LM head": config.lm_head,
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size or "the backbone's",
        "tokens guessed among": config.vocabulary or "all",
        "parameters": heads.num_parameters,
        "backbone": config.base_model_name_or_path or "not recorded",
        "loadable by servers": servers_for(config),
        "prompts": PROMPTS[config.raw_prompts],
        "options of the chat template": config.template_options or "none",
        "tree": f"{tree.num_nodes} nodes, {tree.max_depth} deep" if tree else "none saved: --tree auto is the default",
        "tree of --tree auto": "; ".join(calibrated(heads, options.heads)) or "calibrated at the first use",
    }
    provenance = heads.provenance or {}
    about |= {key: provenance[key] for key in ("command", "data", "versions", "result") if key in provenance}
    shown = about | told(provenance)
    shown["installed"] = about["installed"] = {name: f"{version(name)} (tested: {in_words(name)})" for name in TESTED}
    others = [
        f"{registry.what} {one.name} ({one.package})" + (f" does not load: {one.failure}" if one.failure else "")
        for registry in (HEADS, REGISTRY)
        for one in registry.extensions()
    ]
    if others:
        shown["from other packages"] = about["from other packages"] = "; ".join(others)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in shown.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    options.output.console.print(table)
    options.output.write(about | {"config": config.to_dict()})


def servers_for(config: MedusaConfig) -> str:
    """Name the servers that load heads with this config after `medusa export`."""
    if not config.servable:
        return "none: vLLM and SGLang load kinds eagle and dflash (medusa fit --for vllm)"
    from medusa.heads import class_of

    if class_of(config.kind).form == "medusa":
        return "TGI, LoRAX and vLLM up to 0.32 (medusa export)"
    return "vLLM, SGLang and others (medusa export)"


def told(provenance: Json) -> dict[str, object]:
    """Return the training data and the result of the training in words, as far as the heads record them."""
    data, result, found = provenance.get("data") or {}, provenance.get("result") or {}, dict[str, object]()
    if "documents" in data:
        dropped = sum((data.get("dropped") or {}).values())
        texts = f"{data['documents']:,} texts, {data['tokens']:,} tokens, {data['taught']:,} of them taught"
        found["data"] = texts + (f"; {dropped:,} texts dropped" if dropped else "")
    if "steps" in result:
        right = [result[key] for head in range(1, 100) if (key := f"head{head}_top1") in result]
        shares = "; heads right: " + ", ".join(f"{share:.0%}" for share in right) if right else ""
        ran = f"{result['steps']:,} steps, {result['seconds'] / 60:.3g} minutes, loss {result['loss']:.2f}"
        found["result"] = ran + shares
    return found


def calibrated(heads: MedusaHeads, name: str) -> list[str]:
    """Describe the trees that calibrations have chosen for these heads, in the situations that `--tree auto` knows."""
    from decode.bench.calibration.stored import calibrations_for
    from decode.bench.result import counted
    from medusa.commands.trees import heads_folder

    lines = []
    for found in calibrations_for(heads, heads_folder(name)):
        best, at = found.best, found.holds_for
        tree = f"{best.kind}, {best.nodes} nodes, predicted tau {best.tau:.2f}"
        tree = "plain decoding" if best.kind == "plain" else tree
        steps = "compiled" if at.get("compile") else "eager"
        place = (
            f"{at.get('gpu') or at.get('processor')}, {counted(int(str(at['threads'])), 'thread')}, {at.get('dtype')}"
        )
        lines.append(f"{tree} ({steps} steps, batch size {at.get('batch_size')}, {place})")
    return lines
