"""The input and output of every format, and the backbone's LM head for formats in which every head owns one."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.stored import Stored
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.export.card import Facts
from medusa.loading import DEMO, LOAD_DEFAULTS, LoadOptions, load_backbone, load_config

FORMER_NAMES = ("embed_out.weight",)
"""Names under which transformers still saves an LM head."""


@dataclass(frozen=True)
class Export:
    """The input of a format."""

    heads: Checkpoint
    """The heads in the dtype to write."""
    backbone: str
    """The backbone's name or folder, for configs and commands."""
    folder: Path
    """An empty folder to fill; it becomes `place` on success."""
    place: Path
    """The folder of the result, for the serving command."""
    lm_head: Callable[[], Tensor]
    """Reads the backbone's LM head [V, H] from its files, at the first call."""
    facts: Facts
    """Facts for a model card that the heads themselves do not hold."""


@dataclass(frozen=True)
class Written:
    """The output of a format."""

    serve: str
    """The command that serves the result, or lines of Python."""
    lost: str
    """The features of this package's decoding that are missing there, in a sentence."""
    heads: Checkpoint
    """The heads that reading the folder again must give."""
    notes: list[str] = field(default_factory=list)
    """Other hints for the user."""


def require_square(config: MedusaConfig, name: str, kinds: str = "heads.kind=medusa") -> None:
    """Raise RequestError unless the format `name` can hold the heads: independent heads of square blocks.

    `kinds` is the setting that the message recommends if the kind is wrong.
    """
    for wrong, way_out in {
        f"kind {config.kind}": kinds if config.kind != "medusa" else None,
        f"{config.prefix_layers} prefix layers": "heads.prefix_layers=0" if config.prefix_layers else None,
        f"a vocabulary of {config.vocabulary} tokens": "heads.vocabulary=0" if config.vocabulary else None,
        f"{config.block} blocks": "heads.block=square" if config.block != "square" else None,
    }.items():
        if way_out:
            raise RequestError(f"{name} cannot hold heads with {wrong}; train them with {way_out}")


def quoted(argument: str | Path) -> str:
    """An argument of a shell command, quoted if needed."""
    return shlex.quote(str(argument))


def with_own_lm_heads(export: Export) -> Checkpoint:
    """The heads, each with an LM head. Heads that share the backbone's get copies of it in the heads' dtype."""
    heads, config = export.heads, export.heads.config
    if config.lm_head == "own":
        return heads
    weight = export.lm_head()
    if weight.shape[1] != config.hidden_size or config.vocab_size not in (None, len(weight)):
        raise RequestError(
            f"these heads are for {config.vocab_size or 'any number of'} tokens and hidden size {config.hidden_size}, "
            f"the LM head of {export.backbone} for {len(weight)} and {weight.shape[1]}; name their own backbone"
        )
    copies = weight.T.to(heads.dtype).expand(config.num_heads, -1, -1).contiguous()
    own = replace(config, lm_head="own", vocab_size=len(weight))
    return replace(heads, config=own, tensors=heads.tensors | {"lm_heads": copies})


def read_lm_head(name: str, options: LoadOptions = LOAD_DEFAULTS) -> Tensor:
    """Read the LM head [V, H] of a backbone: from a local folder this tensor alone, else with the whole model.

    Raises:
        RequestError: no such backbone, or an LM head with a bias, which no other format holds.
    """
    folder = DEMO if name == "demo" else Path(name)
    if folder.is_dir() and not (folder / "adapter_config.json").is_file():
        config = load_config(name, options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=options.trust_remote_code)
        weight = _without_bias(model.get_output_embeddings(), name)
        text = config.get_text_config(decoder=True)
        tied = model.get_input_embeddings().weight if getattr(text, "tie_word_embeddings", False) else None
        names = [
            key for key, value in model.named_parameters(remove_duplicate=False) if value is weight or value is tied
        ]
        stored = Stored.of_model(folder)
        for key in (*names, *(key.removeprefix(f"{model.base_model_prefix}.") for key in names), *FORMER_NAMES):
            if key in stored and stored[key].shape == weight.shape:
                return stored[key]
    model = load_backbone(name, replace(options, device="cpu")).model
    return _without_bias(model.get_output_embeddings(), name).detach()


def _without_bias(head: nn.Module | None, name: str) -> Tensor:
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise RequestError(f"{name} has no LM head; name the backbone that the heads were trained for")
    if getattr(head, "bias", None) is not None:
        raise RequestError(f"the LM head of {name} has a bias, which LM heads of this format cannot have")
    return weight
