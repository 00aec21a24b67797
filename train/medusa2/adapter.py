"""Functions that add a LoRA adapter to Medusa-2's backbone, turn the adapter off, and merge it into the backbone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from medusa.backbone import Backbone
from medusa.errors import RequestError, choose_one_of
from medusa.files import replacing_folder
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded, load_backbone
from medusa.options import LoadOptions, dtype_name
from train.config import AdapterConfig, TrainConfig

LINEAR = (nn.Linear, Conv1D)
ADAPTER, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"


def adapt(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Add a new LoRA adapter to the backbone `model`, in place. Before training, it does not change the model's output.

    Raise RequestError if the model has an adapter, lacks layers in `config.modules`, or scales or caps its logits."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise RequestError("the backbone is an adapter's folder already; train on a merged one (adapter.merge)")
    if not Backbone(model).splits:
        raise RequestError(f"{type(model).__name__} scales or caps its logits; it can be trained on, but not adapted")
    add_lora(model, config)


def add_lora(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Add a LoRA adapter to the text decoder of `model`, in place; weights may be on the device "meta", without memory.

    Raise RequestError if the model lacks layers in `config.modules`."""
    modules: str | list[str] = config.modules
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LINEAR)}
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    read = {*model.get_decoder().modules(), model.get_output_embeddings()}
    linear = {name.rsplit(".", 1)[-1] for name, module in layers.items() if module in read}
    if config.lm_head:
        modules = sorted((linear if modules == "all-linear" else set(modules)) | {head})
    sizes: dict[str, Any] = {"r": config.rank, "lora_alpha": config.alpha, "lora_dropout": config.dropout}
    if others := [name for name, module in layers.items() if module not in read]:  # of images or sound
        sizes["exclude_modules"] = others
    try:
        model.add_adapter(LoraConfig(task_type="CAUSAL_LM", target_modules=modules, **sizes))
    except ValueError:
        asked = config.modules if isinstance(config.modules, str) else ", ".join(config.modules)
        advice = choose_one_of(asked, ["all-linear", *sorted(linear - {"lm_head"})])  # which has a key of its own
        raise RequestError(f"adapter.modules is {asked!r}, which is no layer to adapt; {advice}") from None


@contextlib.contextmanager
def adapter_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Context in which `model` computes without its adapter and in eval mode, as before `adapt`."""
    training = model.training
    model.eval()
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
        model.train(training)


def without_adapter(layer: nn.Module) -> nn.Module:
    """The original layer inside a layer that `adapt` has wrapped; any other layer itself."""
    base = getattr(layer, "base_layer", layer)
    assert isinstance(base, nn.Module)
    return base


def write_merged(config: TrainConfig, loaded: Loaded, heads: MedusaHeads) -> Path:
    """Merge the saved adapter into the backbone, write backbone and heads to output_dir/merged, and return the path."""
    output, dtype = Path(config.output_dir), dtype_name(loaded.model.dtype)
    options = LoadOptions(dtype, "cpu", revision=config.revision, trust_remote_code=config.trust_remote_code)
    base = load_backbone(config.backbone, options).model
    assert config.adapter is not None
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    if config.adapter.lm_head and isinstance(head, nn.Linear) and head.weight is embeddings.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())  # or the embeddings would change with it
        for part in {id(one): one for one in (base.config, base.config.get_text_config(decoder=True))}.values():
            part.tie_word_embeddings = False
    merged = PeftModel.from_pretrained(base, str(output / ADAPTER)).merge_and_unload()
    with replacing_folder(output / "merged") as folder:
        merged.save_pretrained(folder)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder)
        place, original = str(output / "merged"), heads.config
        heads.config = replace(original, base_model_name_or_path=place, backbone=fingerprint(merged, place))
        heads.save_pretrained(folder / "heads")
        heads.config = original
    return output / "merged"
