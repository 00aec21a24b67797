"""The model card of a set of heads: `card.md.j2` filled with measured figures and the machine they were measured on.

Figures come from `provenance.json`, `calibration.json` and a file of `medusa benchmark --json`. If one of them is
missing, the card says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.export.facts import Facts, is_hub_id, without_folders
from medusa.files import Json
from medusa.tree import Tree

BOOKKEEPING = ("save_", "logging_", "eval_", "report_", "dataloader_", "disable_")
"""Settings that do not change what is trained."""
Rows = dict[str, str]
"""The rows of a table of two columns."""


def model_card(heads: Checkpoint, facts: Facts, with_code: bool) -> str:
    """README.md for these heads: metadata in YAML, and a page of text.

    `with_code`: the repository holds `custom_generate/generate.py`.
    """
    base = heads.config.base_model_name_or_path
    name = "a backbone that they do not name" if base is None else base if is_hub_id(base) else Path(base).name
    template = _environment().get_template("card.md.j2")
    return template.render(
        metadata=_metadata(base, facts, with_code).to_yaml(),
        base=name,
        base_is_on_hub=is_hub_id(base),
        commit=heads.config.backbone.get("revision"),
        num_heads=heads.config.num_heads,
        repo=facts.repo_id or "ORG/NAME-OF-THESE-HEADS",
        with_code=with_code,
        shape=_shape(heads),
        training=_training(facts),
        top1=_top1(facts),
        chosen_tree=(facts.provenance or {}).get("tree") or {},
        benchmark=facts.benchmark,
        settings=None if facts.benchmark is None else _settings(facts.benchmark["settings"]),
        calibrations=facts.calibrations,
        license=facts.license,
    )


def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"cell": _cell, "interval": _interval, "listed": _listed, "machine": _machine}
    return environment


def _metadata(base: str | None, facts: Facts, with_code: bool) -> ModelCardData:
    return ModelCardData(
        base_model=base if is_hub_id(base) else None,
        datasets=facts.data_name if is_hub_id(facts.data_name) else None,
        library_name="transformers" if with_code else "medusa-heads",
        license=facts.license,
        pipeline_tag="text-generation",
        tags=["medusa", "speculative-decoding", *(["custom_generate"] if with_code else [])],
    )


def _shape(heads: Checkpoint) -> Rows:
    config = heads.config
    prefix = f", {config.prefix_layers} layers of their own before them" if config.prefix_layers else ""
    width = f", {config.inner_size} wide" if config.block == "mlp" else ""
    vocabulary = f"{config.vocab_size:,}" if config.vocab_size else "the backbone's"
    rows = {
        "kind": config.kind + prefix,
        "heads": str(config.num_heads),
        "blocks of each": f"{config.num_layers} {config.block}{width}",
        "LM head": "of its own" if config.lm_head == "own" else "the backbone's",
        "hidden size": str(config.hidden_size),
        "vocabulary": f"{config.vocabulary:,} of {vocabulary} tokens" if config.vocabulary else vocabulary,
        "parameters": f"{heads.num_parameters:,}, {str(heads.dtype).removeprefix('torch.')}",
    }
    if config.tree:
        tree = Tree.from_paths(config.tree)
        rows["tree"] = f"{tree.num_nodes} nodes with the root, {tree.max_depth} deep"
    return rows


def _training(facts: Facts) -> Rows | None:
    """How the heads were made; `None` without provenance."""
    if not facts.provenance:
        return None
    made = without_folders(facts.provenance)
    config, result = made.get("config") or {}, made.get("result") or {}
    data, recipe = config.get("data") or {}, config.get("training") or {}
    rows = {
        "data": _listed({"from": facts.data_name, "split": data.get("split")} | (made.get("data") or {})),
        "recipe": _listed({name: value for name, value in recipe.items() if not name.startswith(BOOKKEEPING)}),
        "run": _listed({name: result.get(name) for name in ("steps", "seconds", "loss")}),
        "versions": _listed(made.get("versions") or {}),
        "command": f"`{made['command']}`" if made.get("command") else "",
    }
    return {name: text for name, text in rows.items() if text}


def _top1(facts: Facts) -> Rows:
    """The share of right best guesses of each head in the last steps of training."""
    result = (facts.provenance or {}).get("result") or {}
    found = ((re.fullmatch(r"head(\d+)_top1", name), value) for name, value in result.items())
    return {match[1]: f"{value:.1%}" for match, value in found if match}


def _settings(settings: Json) -> Json:
    """The settings of a benchmark that its figures depend on."""
    return {
        "prompts": settings["prompts"],
        "new tokens": settings["max_new_tokens"],
        "rounds": settings.get("rounds"),
        "batch size": settings.get("batch_size"),
        "temperature": settings["temperature"],
        "acceptance": settings["acceptance"],
        "nodes": settings.get("nodes"),
        "backbone": without_folders(settings["backbone"]),
        "heads": without_folders(settings["heads"]),
        "on": (settings.get("date") or "")[:10] or None,
    }


def _machine(machine: Json) -> str:
    names = ("threads", "dtype", "torch", "transformers")
    place = machine.get("gpu") or machine.get("processor") or "a machine that was not named"
    return ", ".join([place, *(f"{name} {machine[name]}" for name in names if machine.get(name) is not None)])


def _interval(ends: Sequence[float] | None) -> str:
    return "" if not ends else f" (95 %: {ends[0]:.2f} to {ends[1]:.2f})"


def _listed(values: Json) -> str:
    """`name value, name value`, in the order given, without unknown values."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_short(value)}" for name, value in values.items() if value not in (None, {})
    )


def _short(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cell(text: object) -> str:
    """Text for a cell of a Markdown table."""
    return str(text).replace("|", "\\|")
