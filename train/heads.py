"""The heads that a training run starts with: new heads, trained heads, or the heads of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa.backbone import Backbone, FeatureLayers, new_layers
from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.folder import load
from medusa.config import USUAL_LAYERS, Fingerprint, MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.fingerprint import differs, fingerprint, weight_sample
from medusa.heads import class_of
from medusa.heads.independent import MedusaHeads
from medusa.places import SHIPPED
from medusa.vocabulary import require_embeddings
from train.architecture import BackboneSizes, choose
from train.config import NUM_HEADS, HeadsConfig
from train.scales import state_sizes

SAME_NAMES = ["kind", "prefix_layers", "block", "expansion", "lm_head", "feature_layers", "vocabulary"]
HEADS_ASKED = {"num_heads": "num", "num_layers": "layers"} | {name: name for name in SAME_NAMES}
"""For each field of `MedusaConfig` that a recipe sets for any kind, its key in the section `heads`."""

START = 0.1
"""The size of the states that the matrix `fc` of new heads gives, at first copies of the last of the layers.

Small, because the heads add to these states what they learn (docs/log.md)."""


def new_heads(
    model: PreTrainedModel,
    asked: HeadsConfig,
    name: str,
    revision: str | None = None,
    vocabulary: Tensor | None = None,
    start: Checkpoint | None = None,
) -> MedusaHeads:
    """Make the heads of `asked` (the recipe's section `heads`) for the backbone `model` of this name and revision.

    The blocks of new heads start as the identity, so at first each head predicts what the backbone's LM head predicts.
    Heads that come with the model start as they are there, and trained heads to continue from as in `start`.
    Heads guess among the N tokens with the ids `vocabulary` [N], by default among all tokens. Raise RequestError if the
    backbone has no linear LM head."""
    backbone = Backbone(model)
    if not isinstance(backbone.head, nn.Linear):
        raise RequestError(f"the backbone's LM head is a {type(backbone.head).__name__}; heads need a plain Linear one")
    if start is not None:
        config = replace(start.config, **_origin(model, name, revision), tree=None)  # chosen for old weights
        with torch.device("meta"):
            heads = MedusaHeads.from_config(config)
        heads.load_state_dict(start.tensors, assign=True)
        return heads.to(backbone.head_weight.device, torch.float32)
    heads = MedusaHeads.from_config(new_config(asked, model, name, revision))
    require_embeddings(heads, backbone)
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
    origin = _origin(model, name, revision) | {"vocabulary": asked.vocabulary or None}
    kind = asked.kind or "medusa"
    native: MedusaConfig | None = class_of(kind).config_from(model.config, num_heads)
    if native is not None:
        return replace(native, **origin)
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
        **choose(sizes, asked)._asdict(),
        **asked.own,
    )


def _origin(model: PreTrainedModel, name: str, revision: str | None) -> Json:
    """The fields of a heads' configuration that say for which backbone they are trained."""
    if name != SHIPPED and Path(name).exists():  # absolute: the heads may be used from another folder
        name = str(Path(name).resolve())
    return {"base_model_name_or_path": name, "backbone": fingerprint(model, name, revision)}


def feature_layers(asked: HeadsConfig, backbone: Backbone) -> list[int] | None:
    """Return the layers that new heads read: the numbers in `asked`, or for `usual` those that suit the backbone.

    `None`: only the last hidden state."""
    asked_layers = asked.feature_layers
    return new_layers(backbone.num_layers) if isinstance(asked_layers, str) else asked_layers


def backbone_for(model: PreTrainedModel, layers: FeatureLayers) -> Backbone:
    """Wrap a backbone for training heads that read these layers (`MedusaConfig.feature_layers`).

    Its hidden states are those that the heads read, followed by the LM head's input, from which labels are made. For
    heads that read the last hidden state, both are the same."""
    read = Backbone(model, layers)
    return read if read.feature_layers is None else Backbone(model, (*read.feature_layers, read.num_layers))


def startable(
    start: str, asked: HeadsConfig, hidden_size: int, vocab_size: int, option: str = "heads.start"
) -> Checkpoint:
    """Load the trained heads `start`, from which the heads `asked` for are to continue; errors name the `option`.

    They may be those of another backbone, such as that of which this one is a fine-tune. Raise RequestError if there
    are no such heads, or if they differ from `asked` or from the backbone's sizes."""
    found = load(start)
    held = found.config
    kind = class_of(held.kind)
    if not kind.trains(held):
        original = f"{start} holds heads of kind {held.kind} with blocks of type {held.block}"
        raise RequestError(f"{option}: {original}, which can decode but not be trained; leave {option} out")
    wanted = {key: getattr(asked, name) for key, name in HEADS_ASKED.items()} | asked.own
    wanted |= {"hidden_size": hidden_size, "vocab_size": held.vocab_size and vocab_size}
    if isinstance(wanted["feature_layers"], str):  # any numbers will do
        wanted["feature_layers"] = held.feature_layers or USUAL_LAYERS
    for key, value in wanted.items():
        had = getattr(held, key, None)
        if value is not None and value != (had or 0):  # `None` and 0 mean all tokens
            way = f"choose other heads, or leave {option} out to train new ones"
            raise RequestError(f"{option}: {start} has {key} {had!r}, not {value!r}; {way}")
    return found


def started_from(asked: HeadsConfig, start: Checkpoint | None) -> Json | None:
    """Describe for a provenance the heads that new ones continue: their place, their backbone, and some weights."""
    if start is None:
        return None
    place = str(Path(str(asked.start)).resolve()) if Path(str(asked.start)).exists() else asked.start
    weights = weight_sample(start.tensors, start.tensors.__getitem__)
    return {"heads": place, "backbone": start.config.backbone, "weights": weights}


def require_same_heads(checkpoint: Path, wanted: MedusaConfig, model: PreTrainedModel) -> None:
    """Raise RequestError if the checkpoint from which a run is to resume has other heads, or those of another model."""
    stored = load(checkpoint)
    held = stored.config
    known = cast("Fingerprint", (stored.provenance or {}).get("backbone") or {})  # without the adapter of the run
    if differs(model, known):
        raise RequestError(
            f"--resume: {checkpoint} has heads for another backbone, {known.get('name')}; resume with that one, or "
            f"take heads.start={checkpoint} with another output_dir"
        )
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
        line += "; servers cannot load these heads: vLLM and SGLang load gated blocks of kind eagle, and kind dflash"
    return line
