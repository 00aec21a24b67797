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
from medusa.loading import DEMO, LOAD_DEFAULTS, LoadOptions, load_backbone, load_config, on_meta

FORMER_LM_HEADS = ("embed_out.weight",)
"""Older names of the LM head's weight, under which transformers still saves it for some models."""


@dataclass(frozen=True)
class Export:
    """What a function that writes an export format needs: heads, backbone, two folders, facts for the model card."""

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


@dataclass(frozen=True)
class Written:
    """The result of an export: how to serve it, what is lost, notes, and the heads that loading it must return."""

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
    return str(dtype or export.heads.dtype).removeprefix("torch.")


def require_square(config: MedusaConfig, name: str, kinds: str = "heads.kind=medusa") -> None:
    """Check that the heads are of kind `medusa` with square blocks (Medusa paper, section 2.1), as the format requires.

    Raise RequestError if the heads are of another kind, or have other blocks, prefix layers or a reduced vocabulary.
    The message contains the format's `name`. For another kind, it advises to train with the settings in `kinds`."""
    for is_wrong, found, way_out in (
        (config.kind != "medusa", f"kind {config.kind}", kinds),
        (config.prefix_layers, f"{config.prefix_layers} prefix layers", "heads.prefix_layers=0"),
        (config.vocabulary, f"a vocabulary of {config.vocabulary} tokens", "heads.vocabulary=0"),
        (config.block != "square", f"{config.block} blocks", "heads.block=square"),
    ):
        if is_wrong:
            raise RequestError(f"{name} cannot hold heads with {found}; train them with {way_out}")


def quoted(argument: str | Path) -> str:
    """Quote an argument of a shell command if needed."""
    return shlex.quote(str(argument))


def with_own_lm_heads(export: Export) -> Checkpoint:
    """Return heads that each have an LM head: their own, or a copy of the backbone's.

    Raise RequestError if the backbone's LM head has another shape than the heads need."""
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

    def find(model: PreTrainedModel) -> Tensor:
        return _without_bias(model.get_output_embeddings(), name)

    found = _read_alone(name, options, find, FORMER_LM_HEADS)
    return find(load_backbone(name, replace(options, device="cpu")).model).detach() if found is None else found


def read_embeddings(name: str, options: LoadOptions = LOAD_DEFAULTS) -> Tensor:
    """Read the embeddings [V, H] that a backbone computes for its V tokens. From a local folder, only they are read.

    If the embedding module computes more than a look-up, such as a scaling, the backbone is loaded and computes them.
    Raise RequestError if there is no such backbone."""

    def find(model: PreTrainedModel) -> Tensor | None:
        module = model.get_input_embeddings()
        return _weight(module) if type(module) is nn.Embedding else None

    if (found := _read_alone(name, options, find)) is not None:
        return found
    module = load_backbone(name, replace(options, device="cpu")).model.get_input_embeddings()
    with torch.no_grad():
        return module(torch.arange(len(_weight(module))))


def _read_alone(
    name: str, options: LoadOptions, find: Callable[[PreTrainedModel], Tensor | None], former: Sequence[str] = ()
) -> Tensor | None:
    """Read the parameter that `find` returns of a backbone, from the folder of a whole model, without the others.

    `former` are older names of it. Return `None` if there is no such folder, parameter or stored tensor."""
    folder = DEMO if name == "demo" else Path(name)
    if not is_whole_model(folder):
        return None
    config = load_config(name, options)
    model = on_meta(config, options)
    if (wanted := find(model)) is None:
        return None
    text = config.get_text_config(decoder=True)
    same = [wanted]
    if getattr(text, "tie_word_embeddings", False):
        both = (model.get_input_embeddings(), model.get_output_embeddings())
        same += [_weight(module) for module in both if module is not None]
    parameters = model.named_parameters(remove_duplicate=False)
    names = [key for key, value in parameters if any(value is one for one in same)]
    return stored_tensor(Stored.of_model(folder), model, (*names, *former), wanted)


def is_whole_model(folder: Path) -> bool:
    """Whether a folder holds a model itself, and not an adapter for one."""
    return folder.is_dir() and not (folder / "adapter_config.json").is_file()


def stored_tensor(stored: Stored, model: PreTrainedModel, names: Sequence[str], like: Tensor) -> Tensor | None:
    """Return the first stored tensor with one of the `names`, or such a name without the model's prefix.

    The tensor must have the shape of `like`. Return `None` if there is none."""
    without_prefix = [key.removeprefix(f"{model.base_model_prefix}.") for key in names]
    for key in (*names, *without_prefix):
        if key in stored and stored[key].shape == like.shape:
            return stored[key]
    return None


def _without_bias(head: nn.Module | None, name: str) -> Tensor:
    """Return the weight [V, H] of a model's LM head (V tokens, hidden size H); raise RequestError if it has a bias."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise RequestError(f"{name} has no LM head; name the backbone that the heads were trained for")
    if getattr(head, "bias", None) is not None:
        raise RequestError(f"the LM head of {name} has a bias, which LM heads of this format cannot have")
    return weight


def _weight(module: nn.Module) -> Tensor:
    """Return the weight [V, H] of a module that reads or writes tokens."""
    assert isinstance(module.weight, Tensor)
    return module.weight
