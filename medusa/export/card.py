"""The model card of a set of heads: what was measured, with the machine it was measured on, and nothing else.

Figures come from `provenance.json` (recipe, data, training), `calibration.json` and what `medusa benchmark --json`
wrote. Where one of them is missing, the card says so instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa.checkpoints.load import HUB_ID
from medusa.errors import RequestError
from medusa.files import read_json
from medusa.heads.independent import MedusaHeads
from medusa.tree import Tree

HUB = "https://huggingface.co"
SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
BOOKKEEPING = ("save_", "logging_", "eval_", "report_", "dataloader_", "disable_")  # settings that teach nothing
LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
# An absolute path, or one of somebody's home, up to its last part; not the slashes of a URL or a Hub id.
FOLDERS = re.compile(r"(?<![\w:/.~-])~?/(?:[^\s/'\"=,]+/)*")


@dataclass
class Facts:
    """What is known of a set of heads besides what they show themselves."""

    repo_id: str | None = None
    """Where they will lie on the Hub, if that is known."""
    license: str | None = None
    """The Hub's name of it, such as apache-2.0."""
    provenance: dict[str, Any] | None = None
    calibrations: list[dict[str, Any]] = field(default_factory=list)
    """As `calibration.json` lists them."""
    benchmark: dict[str, Any] | None = None
    """As `medusa benchmark --json` writes it."""

    def __post_init__(self) -> None:
        if self.license is not None and not LICENSE.fullmatch(self.license):
            raise RequestError(
                f"the license is {self.license!r}; give the Hub's name of it, such as apache-2.0, llama3.1 or other"
            )
        if self.repo_id is not None and not HUB_ID.fullmatch(self.repo_id):
            raise RequestError(f"the repository is {self.repo_id!r}; give its Hub id, such as org/heads")


def read_benchmark(path: str | Path) -> dict[str, Any]:
    """What `medusa benchmark --json` wrote about heads.

    Raises:
        RequestError: something else stands there, or figures of a drafter other than heads.
    """
    content = read_json(Path(path))
    parts = ("machine", "settings", "methods")
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict) for part in parts):
        raise RequestError(f"{path} is no benchmark; give a file that medusa benchmark --json wrote")
    if not {"transformers", "medusa"} <= content["methods"].keys() or content["settings"].get("heads") is None:
        raise RequestError(f"{path} measured no heads; give a benchmark of these heads")
    drafter = content["settings"].get("drafter", "heads")
    if drafter != "heads":
        raise RequestError(f"{path} measured drafter {drafter!r} first, not these heads; run it without --drafter")
    return content


def is_hub_id(name: str | None) -> bool:
    """Whether this names something on the Hub, as far as can be told without asking."""
    is_file = name is None or Path(name).exists() or Path(name).suffix in SUFFIXES
    return not is_file and HUB_ID.fullmatch(str(name)) is not None


def without_folders(content: Any) -> Any:
    """JSON without the folders of this machine: absolute paths become their last part, also within commands."""
    if isinstance(content, dict):
        return {key: without_folders(value) for key, value in content.items()}
    if isinstance(content, list):
        return [without_folders(value) for value in content]
    if not isinstance(content, str):
        return content
    return Path(content).name if Path(content).is_absolute() else FOLDERS.sub("", content)


def model_card(heads: MedusaHeads, facts: Facts, with_code: bool) -> str:
    """README.md for these heads: metadata in YAML, and a page of text.

    `with_code`: the repository holds `custom_generate/generate.py`.
    """
    sections = [
        _introduction(heads, facts),
        _use(heads, facts, with_code),
        _what_they_are(heads),
        _how_made(facts),
        _how_fast(facts),
        *_calibrated(facts),
        _licence(facts),
    ]
    return "\n\n".join([_metadata(heads, facts, with_code), *sections]) + "\n"


def _metadata(heads: MedusaHeads, facts: Facts, with_code: bool) -> str:
    from huggingface_hub import ModelCardData

    base = heads.config.base_model_name_or_path
    data = _data_name(facts)
    known = ModelCardData(
        base_model=base if is_hub_id(base) else None,
        datasets=data if is_hub_id(data) else None,
        library_name="transformers" if with_code else "medusa-heads",
        license=facts.license,
        pipeline_tag="text-generation",
        tags=["medusa", "speculative-decoding", *(["custom_generate"] if with_code else [])],
    )
    return f"---\n{known.to_yaml()}\n---"


def _introduction(heads: MedusaHeads, facts: Facts) -> str:
    base = _base(heads)
    linked = f"[{base}]({HUB}/{base})" if is_hub_id(base) else base
    commit = heads.config.backbone.get("revision")
    at = f" (revision `{commit}`)" if commit else ""
    return (
        f"# Medusa heads for {base}\n\n"
        f"{heads.config.num_heads} heads that guess several tokens ahead of {linked}{at}. The model checks all guesses "
        "in one forward and keeps those that it would have written itself, so its text does not change: greedy text is "
        "its greedy text (up to near-ties in half precision), samples are samples of its distribution. They are of no "
        "use for another model, and say nothing by themselves."
    )


def _use(heads: MedusaHeads, facts: Facts, with_code: bool) -> str:
    repo = facts.repo_id or "ORG/NAME-OF-THESE-HEADS"
    base = _base(heads) if is_hub_id(heads.config.base_model_name_or_path) else f"PATH/TO/{_base(heads)}"
    parts = ["## Use"]
    if with_code:
        parts.append(
            "With transformers alone. One file of this repository is run, `custom_generate/generate.py`: read it "
            "first, and pin `revision=` to a commit.\n\n"
            "```python\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto", device_map="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{base}")\n'
            'inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)\n'
            f'out = model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True, max_new_tokens=256)\n'
            "print(tokenizer.decode(out[0], skip_special_tokens=True))\n"
            "```"
        )
    parts.append(
        "With the package medusa-heads, which has dynamic trees, calibration, real batches and compiled steps:\n\n"
        f'```bash\nmedusa generate --backbone {base} --heads {repo} --prompt "Once upon a time"\n```'
    )
    return "\n\n".join(parts)


def _what_they_are(heads: MedusaHeads) -> str:
    config = heads.config
    width = f", {config.inner_size} wide" if config.block == "mlp" else ""
    rows = {
        "kind": config.kind
        + (f", {config.prefix_layers} layers of their own before them" * bool(config.prefix_layers)),
        "heads": str(config.num_heads),
        "blocks of each": f"{config.num_layers} {config.block}{width}",
        "LM head": "of its own" if config.lm_head == "own" else "the backbone's",
        "hidden size": str(config.hidden_size),
        "vocabulary": f"{config.vocabulary:,} of {config.vocab_size:,} tokens"
        if config.vocabulary
        else f"{config.vocab_size:,}"
        if config.vocab_size
        else "the backbone's",
        "parameters": f"{heads.num_parameters:,}, {_dtype(heads)}",
    }
    if config.tree:
        tree = Tree.from_paths(config.tree)
        rows["tree"] = f"{tree.num_nodes} nodes with the root, {tree.max_depth} deep"
    return "## What they are\n\n" + _table(["", ""], rows.items())


def _how_made(facts: Facts) -> str:
    made = facts.provenance
    if not made:
        return "## How they were made\n\nNot known: they came without a record of their training."
    made = without_folders(made)
    config, result = made.get("config") or {}, made.get("result") or {}
    data, recipe = config.get("data") or {}, config.get("training") or {}
    rows = {
        "data": _listed({"from": _data_name(facts), "split": data.get("split")} | (made.get("data") or {})),
        "recipe": _listed({name: value for name, value in recipe.items() if not name.startswith(BOOKKEEPING)}),
        "run": _listed({name: result.get(name) for name in ("steps", "seconds", "loss")}),
        "versions": _listed(made.get("versions") or {}),
        "command": f"`{made['command']}`" if made.get("command") else "",
    }
    parts = ["## How they were made", _table(["", ""], ((name, text) for name, text in rows.items() if text))]
    top1 = {name.removesuffix("_top1"): value for name, value in result.items() if re.fullmatch(r"head\d+_top1", name)}
    if top1:
        shares = ", ".join(f"head {name.removeprefix('head')} {value:.1%}" for name, value in top1.items())
        parts.append(f"On the training text, in the last steps, the best guess was the right one at: {shares}.")
    tree = made.get("tree") or {}
    if "expected_tau" in tree:
        parts.append(
            f"The tree of {tree['nodes']} nodes was chosen on {tree['texts']} texts that took no part in the training; "
            f"{tree['expected_tau']} tokens a step were expected there."
        )
    return "\n\n".join(parts)


def _how_fast(facts: Facts) -> str:
    title = "## How fast they are"
    bench = facts.benchmark
    if bench is None:
        return f"{title}\n\nNot measured: no benchmark came with these heads, so nothing is said about speed."
    settings, methods, medusa = bench["settings"], bench["methods"], bench["methods"]["medusa"]
    names = {"plain": "the same loop without heads", "transformers": "`model.generate`", "medusa": "**these heads**"}
    rows = []
    for name, figures in methods.items():
        rate = figures["tokens_per_second"]
        rows.append(
            [
                names.get(name, name),
                f"{rate['median']:.1f} ({rate['min']:.1f} to {rate['max']:.1f})",
                f"{figures['tau']:.2f}",
                f"{figures['speedup_vs_generate']:.2f}{_interval(figures.get('speedup_vs_generate_interval'))}",
            ]
        )
    temperature, acceptance = settings["temperature"], settings["acceptance"]
    tree = settings.get("nodes")
    how = {
        "prompts": settings["prompts"],
        "new tokens": settings["max_new_tokens"],
        "rounds": settings.get("rounds"),
        "batch size": settings.get("batch_size"),
        "temperature": temperature,
        "acceptance": acceptance,
        "nodes": tree,
        "backbone": without_folders(settings["backbone"]),
        "heads": without_folders(settings["heads"]),
        "on": (settings.get("date") or "")[:10] or None,
    }
    parts = [
        title,
        _table(["", "tokens/s, median (range)", "tokens a step", "against `model.generate`"], rows),
        _listed(how) + ".",
        _machine(bench["machine"]),
    ]
    if acceptance not in ("greedy", "rejection"):
        parts.append(f"Acceptance `{acceptance}` is lossy: what was written there is not the backbone's own text.")
    elif temperature == 0:
        parts.append(f"Texts equal to plain decoding, token for token: {medusa['equal_to_plain']:.1%} of the prompts.")
    depths = medusa.get("accepted_by_depth") or []
    if depths:
        shares = ", ".join(f"{depth} {share:.1%}" for depth, share in enumerate(depths, 1))
        parts.append(f"Share of the steps in which a guess of each depth was kept: {shares}.")
    return "\n\n".join(parts)


def _calibrated(facts: Facts) -> list[str]:
    if not facts.calibrations:
        return []
    rows = []
    for found in facts.calibrations:
        points, situation = found["points"], found["holds_for"]
        plain, best = points[0], points[found["chosen"]]
        speed = best["tau"] * plain["step_ms"] / (plain["tau"] * best["step_ms"])
        rows.append(
            [
                _machine(situation),
                f"{situation['batch_size']}, temperature {situation['temperature']:g}",
                f"{best['nodes']} nodes, {'dynamic' if best['dynamic'] else 'static'}" if best["nodes"] > 1 else "none",
                f"{best['tau']:.2f}",
                f"{best['step_ms']:.2f}, plain {plain['step_ms']:.2f}",
                f"{speed:.2f}",
            ]
        )
    return [
        "## Which tree\n\nBy calibration: tokens a step are foretold from recorded text, the time of a step is "
        "measured. (The tree in `config.json` is static and need not be this one.)\n\n"
        + _table(["on", "batch size", "tree", "tokens a step, foretold", "ms a step", "against plain, by these"], rows)
    ]


def _licence(facts: Facts) -> str:
    text = f"`{facts.license}`, as their publisher says." if facts.license else "Their publisher has not said."
    return f"## Licence\n\n{text} The backbone, and the data, have licences of their own."


def _base(heads: MedusaHeads) -> str:
    name = heads.config.base_model_name_or_path or "a backbone that they do not name"
    return name if is_hub_id(name) else Path(name).name


def _data_name(facts: Facts) -> str | None:
    data = ((facts.provenance or {}).get("config") or {}).get("data") or {}
    path = data.get("path")
    return path if is_hub_id(path) else without_folders(path)


def _dtype(heads: MedusaHeads) -> str:
    return str(heads.dtype).removeprefix("torch.")


def _machine(machine: dict[str, Any]) -> str:
    names = ("threads", "dtype", "torch", "transformers")
    place = machine.get("gpu") or machine.get("processor") or "a machine that was not named"
    return ", ".join([place, *(f"{name} {machine[name]}" for name in names if machine.get(name) is not None)])


def _interval(ends: Sequence[float] | None) -> str:
    return "" if not ends else f" (95 %: {ends[0]:.2f} to {ends[1]:.2f})"


def _listed(values: dict[str, Any]) -> str:
    """`name value, name value`, in the order given; what is not known is left out."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_short(value)}" for name, value in values.items() if value not in (None, {})
    )


def _short(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
