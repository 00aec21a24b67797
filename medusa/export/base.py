"""Code that export formats share: types of input and output, a check of the heads, two matrices of the backbone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.stored import Stored
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.export.card import Facts
from medusa.heads import class_of
from medusa.loading import DEMO, LOAD_DEFAULTS, LoadOptions, load_backbone, load_config, on_meta
from medusa.options import dtype_name
from medusa.quantization import is_plain, linear_sizes

FORMER_LM_HEADS = ("embed_out.weight",)
"""Older names of the LM head's weight, under which transformers still saves it for some models."""


@dataclass(frozen=True)
class Export:
    """What a function that writes an export format needs."""

    heads: Checkpoint
    """The heads, converted to the dtype to write."""
    backbone: str
    """The name or folder of the backbone, for the written config and for serving commands."""
    folder: Path
    """An empty temporary folder for the files. It is renamed to `place` after a successful export."""
    place: Path
    """The final folder, for serving commands."""
    load: LoadOptions
    """The options for loading the backbone's config and LM head."""
    facts: Facts
    """Facts for the model card that are not part of the checkpoint, such as the licence."""

    @property
    def served(self) -> str:
        """The backbone as an argument of a server, with the revision for which the heads were trained."""
        revision = self.load.revision
        return quoted(self.backbone) + (f" --revision {quoted(revision)}" if revision else "")


@dataclass(frozen=True)
class Written:
    """The result of an export."""

    serve: str
    """The shell command or Python code that decodes with the written heads."""
    lost: str
    """One sentence on the features of this package that the other program does not have."""
    heads: Checkpoint
    """The heads that the loader must return for the written folder; the export command checks this."""
    notes: list[str] = field(default_factory=list)
    """Further hints for the user, one sentence each."""


def served_dtype(export: Export) -> str:
    """The dtype in which a server should run the backbone: that of the backbone's config, otherwise that of the heads.

    Without it, vLLM runs float32 checkpoints in 16 bits, and its texts differ from those here."""
    try:
        dtype = load_config(export.backbone, export.load).get_text_config(decoder=True).dtype
    except RequestError:  # the backbone may be on the machine of the server only
        dtype = None
    return dtype_name(dtype or export.heads.dtype)


def require_square(config: MedusaConfig, name: str, instead: str = "") -> None:
    """Raise RequestError unless the heads are plain Medusa heads with square blocks (Medusa paper, section 2.1).

    The message contains the format's `name`. It advises to train with other settings, by default with the nearest that
    the format takes, else with those in `instead`."""
    for is_wrong, found, way_out in (
        (class_of(config.kind).form != "medusa", f"kind {config.kind}", "heads.kind=medusa"),
        (config.prefix_layers, f"{config.prefix_layers} prefix layers", "heads.prefix_layers=0"),
        (config.vocabulary, f"a vocabulary of {config.vocabulary} tokens", "heads.vocabulary=0"),
        (config.block != "square", f"{config.block} blocks", "heads.block=square"),
    ):
        if is_wrong:
            raise RequestError(f"{name} cannot hold heads with {found}; train them with {instead or way_out}")


def quoted(argument: str | Path) -> str:
    """Quote an argument of a shell command."""
    return shlex.quote(str(argument))


def with_own_lm_heads(export: Export) -> Checkpoint:
    """Return heads that each have an LM head: their own, or a copy of the backbone's, which must have their shape."""
    heads, config = export.heads, export.heads.config
    if config.lm_head == "own":
        return heads
    weight = read_lm_head(export.backbone, export.load)
    if weight.shape[1] != config.hidden_size or config.vocab_size not in (None, len(weight)):
        raise RequestError(
            f"these heads are for {config.vocab_size or 'any number of'} tokens and hidden size {config.hidden_size}, "
            f"the LM head of {export.backbone} for {len(weight)} and {weight.shape[1]}; name the right backbone"
        )
    copies = weight.T.to(heads.dtype).expand(config.num_heads, -1, -1).contiguous()
    own = replace(config, lm_head="own", vocab_size=len(weight))
    return replace(heads, config=own, tensors=heads.tensors | {"lm_heads": copies})


def read_lm_head(name: str, options: LoadOptions = LOAD_DEFAULTS) -> Tensor:
    """Read a backbone's LM head [V, H] (V tokens, hidden size H). From a local folder, only the LM head is read.

    Raise RequestError if there is no such backbone, or its LM head has a bias, which no export format can store."""

    def find(model: PreTrainedModel) -> nn.Module | None:
        _without_bias(model.get_output_embeddings(), name)
        return model.get_output_embeddings()

    if (found := _read_alone(name, options, find, FORMER_LM_HEADS)) is not None:
        return found
    loaded = load_backbone(name, replace(options, device="cpu")).model
    head = loaded.get_output_embeddings()
    weight = _without_bias(head, name).detach()
    if is_plain(weight) and not hasattr(head, "base_layer"):
        return weight
    # The stored weight is quantised, or that of the layer below an adapter of peft.
    sizes, dtype = linear_sizes(head), weight.dtype if is_plain(weight) else loaded.dtype
    if sizes is None:
        raise RequestError(f"the LM head of {name} is no linear layer; this format needs its weight")
    with torch.no_grad():
        return head(torch.eye(sizes[0], dtype=dtype)).T.contiguous()


def read_embeddings(name: str, options: LoadOptions = LOAD_DEFAULTS) -> Tensor:
    """Read the embeddings [V, H] that a backbone computes for its V tokens. From a local folder, only they are read.

    If the embedding module computes more than a look-up, such as a scaling, the backbone is loaded and computes them.
    Raise RequestError if there is no such backbone."""

    def find(model: PreTrainedModel) -> nn.Module | None:
        module = model.get_input_embeddings()
        return module if type(module) is nn.Embedding else None

    if (found := _read_alone(name, options, find)) is not None:
        return found
    module = load_backbone(name, replace(options, device="cpu")).model.get_input_embeddings()
    with torch.no_grad():
        return module(torch.arange(len(_weight(module))))


def _read_alone(
    name: str, options: LoadOptions, find: Callable[[PreTrainedModel], nn.Module | None], former: Sequence[str] = ()
) -> Tensor | None:
    """Read the weight of the module that `find` returns of a backbone, from the folder of a whole model, alone.

    The result is the weight that transformers gives the module: its own tensor, stored under its name or one of its
    `former` names, else that of a parameter tied to it. Return `None` if there is no such folder, module or tensor."""
    folder = DEMO if name == "demo" else Path(name)
    if not is_whole_model(folder):
        return None
    model = on_meta(load_config(name, options), options)
    if (module := find(model)) is None:
        return None
    weight, stored = _weight(module), Stored.of_model(folder)
    own = next(f"{key}.weight" for key, part in model.named_modules() if part is module)
    tied = [key for key, value in model.named_parameters(remove_duplicate=False) if value is weight]
    return next(
        (found for key in (own, *former, *tied) if (found := stored_tensor(stored, model, key, weight)) is not None),
        None,
    )


def stored_weights(stored: Stored, model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return the stored tensors of all parameters of `model`, by the names that they have after loading.

    Like transformers, tie parameters only if their tensors are equal, or one of them is stored. Return `None` if a
    parameter is not stored under its name."""
    groups: dict[int, list[str]] = {}  # of names that share a parameter
    like = dict(model.named_parameters(remove_duplicate=False))
    for key, value in like.items():
        groups.setdefault(id(value), []).append(key)
    found: dict[str, Tensor] = {}
    for first, *others in groups.values():
        of = {
            key: tensor
            for key in (first, *others)
            if (tensor := stored_tensor(stored, model, key, like[key])) is not None
        }
        if not of:
            return None
        found[first] = of.get(first, next(iter(of.values())))
        found |= {key: of[key] for key in others if key in of and not torch.equal(of[key], found[first])}
    return found


def is_whole_model(folder: Path) -> bool:
    """Whether a folder holds a model itself, and not an adapter for one."""
    return folder.is_dir() and not (folder / "adapter_config.json").is_file()


def stored_tensor(stored: Stored, model: PreTrainedModel, name: str, like: Tensor) -> Tensor | None:
    """Return the stored tensor with the `name` of a parameter, or with this name without the model's prefix.

    The tensor must have the shape of `like`, and hold floats that need no scale. Return `None` if there is none."""
    for key in (name, name.removeprefix(f"{model.base_model_prefix}.")):
        if key in stored and stored[key].shape == like.shape and is_plain(stored[key]):
            return stored[key]
    return None


def _without_bias(head: nn.Module | None, name: str) -> Tensor:
    """Return the weight [V, H] of an LM head; raise RequestError if it has a bias."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise RequestError(f"{name} has no LM head; name the backbone that the heads were trained for")
    if getattr(head, "bias", None) is not None:
        raise RequestError(f"the LM head of {name} has a bias, which LM heads of this format cannot have")
    return weight


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight
