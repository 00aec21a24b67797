"""Quantised backbones: how transformers loads them, and the weights that their layers compute with."""

from __future__ import annotations

import logging
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from medusa.options import DTYPE_NAMES

INT4: torch.dtype = vars(torch)["int4"]  # which the type stubs of torch lack
FLOATS = tuple(getattr(torch, name) for name in DTYPE_NAMES)
GROUP = 32  # weights that share a scale in int4; it divides the widths of nearly all models
PROBE = 256.0  # the input of a probe: a power of two, which is exact, and so large that a bias changes little


def quantization_config(kind: str, device: str) -> BitsAndBytesConfig | TorchAoConfig:
    """Return the settings of transformers that load a backbone as `kind`, one of `QUANTIZATIONS`, on a device type."""
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind == "4bit":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        )
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    from torchao.quantization.quant_primitives import MappingType

    # By default these settings also change settings of inductor and allow TF32, in the whole process.
    if kind == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    if device == "cuda":
        packed = Int4WeightOnlyConfig(GROUP, set_inductor_config=False, int4_packing_format="tile_packed_to_4d")
        return TorchAoConfig(packed)
    # Values of 4 bits, each in a byte. The kernel for packed values on a CPU takes 13 times as long in float32.
    return TorchAoConfig(IntxWeightOnlyConfig(INT4, PerGroup(GROUP), MappingType.ASYMMETRIC))


def layer_without_groups(model: PreTrainedModel) -> str | None:
    """Describe a layer of `model` that int4 cannot quantise, because its inputs do not divide into groups."""
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head and layer.in_features % GROUP:
            return f"{name} has {layer.in_features} inputs, which is no multiple of {GROUP}"
    return None


def quantization_of(model: PreTrainedModel) -> str | None:
    """Return how a model was quantised while it was loaded, usually one of `QUANTIZATIONS`.

    The result is `None` if it was not quantised, or if its checkpoint holds quantised weights."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.pre_quantized:
        return None
    settings = quantizer.quantization_config
    if isinstance(settings, BitsAndBytesConfig):
        return "8bit" if settings.load_in_8bit else "4bit"
    kind = type(getattr(settings, "quant_type", None)).__name__
    known = {"Int8WeightOnlyConfig": "int8", "Int4WeightOnlyConfig": "int4", "IntxWeightOnlyConfig": "int4"}
    return known.get(kind, str(getattr(settings.quant_method, "value", settings.quant_method)))


def is_plain(weight: object) -> bool:
    """Whether a parameter is stored as the numbers that its layer multiplies with: a tensor of at least 16-bit floats.

    Quantised weights are integers, floats of 8 bits, or tensors of a class of their own."""
    return isinstance(weight, Tensor) and type(weight.data) is Tensor and weight.dtype in FLOATS


def linear_sizes(layer: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer of any class; `None` for other modules."""
    inputs, outputs = (getattr(layer, name, None) for name in ("in_features", "out_features"))
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a model that store quantised weights, by name.

    Kinds of quantisation differ in the names and shapes of what they store, but their layers know their sizes."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if linear_sizes(layer) and not any(layer.children()) and not is_plain(getattr(layer, "weight", None))
    }


def warn_of_plain_weights(model: PreTrainedModel, kind: str) -> None:
    """Log a warning if most weights of a quantised model are none of its linear layers', and so stay as they were.

    transformers keeps all experts of a layer in one tensor, which torchao and bitsandbytes leave alone."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    held = {id(parameter) for table in tables if table is not None for parameter in table.parameters()}
    layers = quantized_layers(model).values()
    packed = sum(sizes[0] * sizes[1] for layer in layers if (sizes := linear_sizes(layer)))
    names = {name: value for name, value in model.named_parameters() if is_plain(value) and id(value) not in held}
    if (plain := sum(value.numel() for value in names.values())) > packed:
        largest = max(names, key=lambda name: names[name].numel())
        told = "%s quantises only %.0f %% of the weights, without embeddings and LM head; the others, such as %s, stay"
        logging.getLogger("medusa").warning(told, kind, 100 * packed / (packed + plain), largest)


class ProbedWeight:
    """The flattened weight [out x in] of a quantised linear layer, read from the layer's outputs."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Read the weight of `layer`, one of `quantized_layers`, whose inputs have the given dtype."""
        sizes = linear_sizes(layer)
        assert sizes is not None
        self.layer, self.dtype, (self.inputs, self.outputs) = layer, dtype, sizes

    def numel(self) -> int:
        """Return the number of weights."""
        return self.inputs * self.outputs

    @torch.no_grad()
    def __getitem__(self, place: int) -> float:
        """Return a weight, by its place in the flattened weight."""
        row, column = divmod(place, self.inputs)
        device = next(chain(self.layer.parameters(), self.layer.buffers())).device
        probe = torch.zeros(1, self.inputs, dtype=self.dtype, device=device)
        probe[0, column] = PROBE
        bias = getattr(self.layer, "bias", None)
        return (float(self.layer(probe)[0, row]) - (0.0 if bias is None else float(bias[row]))) / PROBE
