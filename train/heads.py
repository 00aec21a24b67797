"""The heads that a training run starts with: new heads, trained heads, or the heads of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa.backbone import Backbone, FeatureLayers, new_layers
from medusa.checkpoints.folder import load
from medusa.config import USUAL_LAYERS, Fingerprint, MedusaConfig
from medusa.errors import RequestError
from medusa.fingerprint import fingerprint
from medusa.heads import class_of
from medusa.heads.independent import MedusaHeads
from medusa.places import SHIPPED
from train.architecture import BackboneSizes, choose
from train.config import NUM_HEADS, HeadsConfig, TrainConfig
from train.scales import state_sizes

SAME_NAMES = ["kind", "prefix_layers", "block", "expansion", "lm_head", "feature_layers", "vocabulary"]
HEADS_ASKED = {"num_heads": "num", "num_layers": "layers"} | {name: name for name in SAME_NAMES}
"""For each field of `MedusaConfig` that a recipe sets for any kind, its key in the section `heads`."""

START = 0.1
"""The size of the states that the matrix `fc` of new heads gives, at first copies of the last of the layers.

Small, because the heads add to these states what they learn (docs/log.md)."""


class Origin(TypedDict):
    """The fields of `MedusaConfig` that name the backbone of heads."""

    base_model_name_or_path: str
    backbone: Fingerprint


def new_heads(
    model: PreTrainedModel, asked: HeadsConfig, name: str, revision: str | None = None, vocabulary: Tensor | None = None
) -> MedusaHeads:
    """Make the heads of `asked` (the recipe's section `heads`) for the backbone `model` of this name and revision.

    The blocks of new heads start as the identity, so at first each head predicts what the backbone's LM head predicts.
    Heads that come with the model start as they are there.
    Heads guess among the N tokens with the ids `vocabulary` [N], by default among all tokens. Raise RequestError if the
    backbone has no linear LM head, or if trained heads to continue from (`asked.start`) differ from `asked`."""
    backbone = Backbone(model)
    if not isinstance(backbone.head, nn.Linear):
        raise RequestError(f"the backbone's LM head is a {type(backbone.head).__name__}; heads need a plain Linear one")
    if asked.start is not None:
        heads = _trained_heads(asked.start, asked, backbone)
        heads.config.backbone = fingerprint(model, name, revision)
        return heads
    heads = MedusaHeads.from_config(new_config(asked, model, name, revision))
    heads.start_from_model(model)
    if vocabulary is not None:
        heads.vocabulary = vocabulary
    heads.start_from(backbone.head_weight.detach())
    if heads.config.feature_layers is not None:
        sizes = state_sizes(Backbone(model, heads.config.feature_layers))
        with torch.no_grad():
            heads.get_parameter("fc.weight").mul_(START / sizes.cpu())
    return heads.to(backbone.head_weight.device)


def new_config(asked: HeadsConfig, model: PreTrainedModel, name: str, revision: str | None) -> MedusaConfig:
    """The configuration of new heads: values set in `asked` (see `new_heads`), and for the rest what suits `model`."""
    backbone, num_heads = Backbone(model), asked.num or NUM_HEADS
    if name != SHIPPED and Path(name).exists():  # absolute: the heads may be used from another folder
        name = str(Path(name).resolve())
    origin: Origin = {"base_model_name_or_path": name, "backbone": fingerprint(model, name, revision)}
    kind = asked.kind or "medusa"
    if (native := class_of(kind).config_from(model.config, num_heads)) is not None:
        found: MedusaConfig = replace(native, **origin, vocabulary=asked.vocabulary or None)
        return found
    if asked.lm_head is None and asked.block != "square" and getattr(backbone.head, "bias", None) is not None:
        # An own LM head has no bias, so its first predictions would be far from the backbone's.
        asked = asked.model_copy(update={"lm_head": "shared"})
    sizes = BackboneSizes(backbone.hidden_size, backbone.vocab_size, model.num_parameters())
    return MedusaConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        num_heads=num_heads,
        kind=kind,
        prefix_layers=asked.prefix_layers or 0,
        **origin,
        feature_layers=feature_layers(asked, backbone),
        vocabulary=asked.vocabulary or None,
        **choose(sizes, asked)._asdict(),
        **asked.own,
    )


def feature_layers(asked: HeadsConfig, backbone: Backbone) -> list[int] | None:
    """Return the layers that new heads read: the numbers in `asked`, or for `usual` those that suit the backbone."""
    asked_layers = asked.feature_layers
    return new_layers(backbone.num_layers) if isinstance(asked_layers, str) else asked_layers


def backbone_for(model: PreTrainedModel, layers: FeatureLayers) -> Backbone:
    """Wrap a backbone for training heads that read these layers (`MedusaConfig.feature_layers`).

    Its hidden states are those that the heads read, followed by the LM head's input, from which labels are made. For
    heads that read the last hidden state, both are the same."""
    read = Backbone(model, layers)
    return read if read.feature_layers is None else Backbone(model, (*read.feature_layers, read.num_layers))


def require_startable(start: str, asked: HeadsConfig, hidden_size: int, vocab_size: int) -> MedusaConfig:
    """Return the config of the trained heads `start`, from which the heads `asked` for are to continue.

    Raise RequestError if there are no such heads, or if they differ from `asked` or from the backbone's sizes."""
    held = load(start).config
    if held.block in class_of(held.kind).fixed_block_types:
        original = f"{start} holds heads with blocks of type {held.block}"
        raise RequestError(f"heads.start: {original}, which can decode but not be trained")
    wanted = {key: getattr(asked, name) for key, name in HEADS_ASKED.items()} | asked.own
    wanted |= {"hidden_size": hidden_size, "vocab_size": held.vocab_size and vocab_size}
    if isinstance(wanted["feature_layers"], str):  # any numbers will do
        wanted["feature_layers"] = held.feature_layers or USUAL_LAYERS
    for key, value in wanted.items():
        had = getattr(held, key, None)
        if value is not None and value != (had or 0):  # `None` and 0 mean all tokens
            raise RequestError(f"heads.start: {start} has {key} {had!r}, not {value!r}")
    return held


def _trained_heads(start: str, asked: HeadsConfig, backbone: Backbone) -> MedusaHeads:
    require_startable(start, asked, backbone.hidden_size, backbone.vocab_size)
    heads = MedusaHeads.from_pretrained(start, dtype=torch.float32, device=backbone.head_weight.device)
    heads.config.tree = None  # it was chosen for the old weights
    return heads.train()


def require_same_heads(checkpoint: Path, config: TrainConfig, model: PreTrainedModel) -> None:
    """Raise RequestError if a recipe describes other heads than the checkpoint from which its run is to resume."""
    held, asked = MedusaHeads.from_pretrained(checkpoint).config, config.heads
    if asked.start is None:
        wanted = new_config(asked, model, config.backbone, config.revision)
    else:
        wanted = MedusaHeads.from_pretrained(asked.start).config
    for key in ("hidden_size", "vocab_size", *HEADS_ASKED, *class_of(wanted.kind).setting_names(recipe=True)):
        if getattr(held, key, None) != getattr(wanted, key):
            found = f"{checkpoint} has {key} {getattr(held, key, None)!r}, not {getattr(wanted, key)!r}"
            raise RequestError(f"--resume: {found}; ask for the same heads again, or start in another output_dir")


def describe(config: MedusaConfig, parameters: int, backbone: Backbone) -> str:
    """Describe heads in one line: shape, size, and warnings if they lack the LM head's bias or no server loads them."""
    inner = class_of(config.kind).inner_width(config)
    width = f" of width {inner}" if inner else ""
    width += f" on {config.reads}" if config.feature_layers else ""
    tokens = f"{config.vocabulary:,} of {config.vocab_size:,} tokens, " if config.vocabulary else ""
    line = (
        f"heads: {config.num_heads} x {config.num_layers} {config.block} block(s){width}, {config.lm_head} LM head, "
        f"{tokens}{parameters:,} parameters ({parameters / backbone.model.num_parameters():.0%} of the backbone's)"
    )
    if config.lm_head == "own" and getattr(backbone.head, "bias", None) is not None:
        line += "; the backbone's LM head has a bias, which own ones lack: heads.lm_head=shared starts closer to it"
    if not config.servable:
        line += "; servers cannot load these heads, only square blocks of kind medusa and gated blocks of kind eagle"
    return line
