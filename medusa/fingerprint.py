"""Fingerprints of backbones: a few weights, by which a check recognises the backbone that heads were trained for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa.config import Fingerprint
from medusa.options import dtype_name
from medusa.quantization import ProbedWeight, is_plain, quantization_of, quantized_layers

SAMPLES = 64  # weights in a fingerprint
DIGIT = 1e-6  # the last digit of a weight in a fingerprint


def fingerprint(model: PreTrainedModel, name: str | None = None, revision: str | None = None) -> Fingerprint:
    """Return the fingerprint of a backbone: its name, revision, dtype and class, and up to 64 single weights.

    Hashes of parameter names choose which weights. In contrast to a hash of all bytes, the weights change only
    slightly with the dtype, but they differ between a model and its fine-tuned versions. Weights of quantised layers
    are those that the layers compute with, however they are stored."""
    parameters: dict[str, Tensor | ProbedWeight] = {
        key: p for key, p in model.named_parameters() if is_plain(p) and p.device.type != "meta"
    }
    dtype = model.dtype
    parameters |= {f"{key}.weight": ProbedWeight(layer, dtype) for key, layer in quantized_layers(model).items()}
    found: Fingerprint = {
        "name": name or model.config._name_or_path or None,
        "revision": revision,
        "dtype": dtype_name(dtype),
        "architecture": type(model).__name__,
        "weights": weight_sample(parameters, parameters.__getitem__),
    }
    quantization = quantization_of(model)
    return found if quantization is None else {**found, "quantization": quantization}


def known_weights(model: PreTrainedModel) -> list[float]:
    """Return the weights of the model's fingerprint; none if some are not loaded, as the others would be chosen."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return []
    return fingerprint(model)["weights"]


def weight_sample(names: Iterable[str], read: Callable[[str], Tensor | ProbedWeight]) -> list[float]:
    """Return up to 64 single weights of the parameters `names`; `read` returns the parameter with a name."""
    keys, values = sorted(names), []
    for index in range(min(SAMPLES, 8 * len(keys))):
        key = keys[index * len(keys) // SAMPLES if len(keys) > SAMPLES else index % len(keys)]
        digest = hashlib.sha256(f"{key}/{index}".encode()).digest()
        weight = read(key)
        flat = weight.detach().reshape(-1) if isinstance(weight, Tensor) else weight
        values.append(round(float(flat[int.from_bytes(digest[:8], "big") % flat.numel()]), 6))
    return values


def embedding_sample(weight: Tensor) -> list[float]:
    """Return 64 values of an embedding matrix [V, H] (V tokens, hidden size H), equally spaced in flattened form."""
    flat = weight.detach().reshape(-1)
    places = [index * (flat.numel() - 1) // (SAMPLES - 1) for index in range(SAMPLES)]
    return [round(float(value), 6) for value in flat[places]]


def differs(model: PreTrainedModel, known: Fingerprint) -> bool:
    """Whether `model` is not the backbone of `known`, or was quantised in another way while it was loaded.

    The result is false if `known` has neither weights nor embedding."""
    if known.get("weights"):
        if known.get("quantization") != quantization_of(model):
            return True
        return unlike(known["weights"], fingerprint(model)["weights"], quantized=bool(quantized_layers(model)))
    if known.get("embedding"):
        embedding = cast("Tensor", model.get_input_embeddings().weight)
        return unlike(known["embedding"], embedding_sample(embedding))
    return False


def unlike(expected: Sequence[float], found: Sequence[float], quantized: bool = False) -> bool:
    """Whether two samples of weights come from different models, and not only from different dtypes of one model.

    Each weight counts by its own size. A sample in few bits, such as of bfloat16, may be the rounded other one. Then no
    weight differs by more than half a unit of its last bit, and the differences are spread evenly up to there. A small
    change of the model, such as a merged LoRA, leaves most differences far below; rounding is taken for one in a
    thousand times. Quantised layers of one model can differ by a step of their scale on another device, so their sample
    counts as a whole."""
    if len(expected) != len(found):
        return True
    one, other = (torch.tensor(sample, dtype=torch.float64) for sample in (expected, found))
    change = (one - other).abs()
    if quantized:
        return bool(change.mean() > 0.005 * one.abs().mean())
    units = {_unit(one), _unit(other)}
    below = torch.ldexp(torch.ones_like(one), torch.frexp(torch.maximum(one.abs(), other.abs()))[1] - 1)  # powers of 2
    if (change > sum(units) / 2 * below + 2 * DIGIT).any():
        return True
    shares = (change / (max(units) / 2 * below))[change > 2 * DIGIT]  # of half a unit; their mean is that of 0 to 1
    return len(shares) > 0 and bool(shares.mean() < 0.5 - 0.9 / len(shares) ** 0.5)  # three standard deviations


def _unit(sample: Tensor) -> float:
    """The unit of the last bit of a number from 1 to 2 in the shortest dtype that holds a sample; 0 for long ones."""
    for dtype in (torch.bfloat16, torch.float16):
        if ((sample.to(dtype).double() - sample).abs() <= DIGIT).all():
            return torch.finfo(dtype).eps
    return 0.0
