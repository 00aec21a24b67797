"""The backbone of Medusa-2: its LoRA adapter, the LM loss that keeps it close to the original, and its perplexity.

    loss = L_LM + lambda_0(t) * sum over heads of lambda_k * L_k, with lambda_k = head_decay^k in the paper

L_LM is the divergence from the original backbone, which is the same weights with the adapter off (the paper's
self-distillation, section 2.3.2), or the cross-entropy on the text.

With `adapter.teacher_tilt` (ours) the teacher p is tilted towards q, the first head's earlier prediction of that token:

    target(x at t + 1)  =  p(x | ids up to t) q(x | ids up to t - 1)^teacher_tilt / normaliser

This is the distribution with the least KL(target || p) - teacher_tilt E[log q]. Among tokens that are nearly as good,
the backbone learns to take the predicted one, which raises its perplexity little.

Shapes: M positions with a next token, H hidden size, V vocabulary, B rows, T tokens, C positions in a chunk.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import replacing_folder
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from train.data.datasets import Batch, PackedDataset
from train.features.files import Features
from train.loss.chunks import chunk_rows
from train.loss.targets import IGNORE, NEXT, head_labels
from train.recipe import AdapterConfig

ADAPTER, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"
QUALITY_ROWS = 64  # whose perplexity is measured
Tilt = Callable[[slice], Tensor]
"""Gives, for a slice of the M positions, the addition to the teacher's log-probabilities [C, V]."""


def adapt(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Add a new adapter to a frozen `model`, in place. Before training, the adapter does not change the model's output.

    Raises:
        RequestError: the model has an adapter already or no such layers, or its logits are not its LM head's output.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise RequestError("the backbone is an adapter's folder already; train on a merged one (adapter.merge)")
    if not Backbone(model).splits:
        raise RequestError(f"{type(model).__name__} scales or caps its logits; it can be trained on, but not adapted")
    modules: str | list[str] = config.modules
    if config.lm_head:
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        modules = sorted((linear if modules == "all-linear" else set(modules)) | {head})
    sizes: dict[str, Any] = {"r": config.rank, "lora_alpha": config.alpha, "lora_dropout": config.dropout}
    try:
        model.add_adapter(LoraConfig(task_type="CAUSAL_LM", target_modules=modules, **sizes))
    except ValueError as error:
        raise RequestError(f"adapter.modules: {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def untouched(model: PreTrainedModel) -> Iterator[None]:
    """Turn adapter and dropout off within this context, which restores the model from before `adapt`."""
    training = model.training
    model.eval()
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
        model.train(training)


def without_adapter(layer: nn.Module) -> nn.Module:
    """The original layer of a layer that `adapt` may have wrapped."""
    base = getattr(layer, "base_layer", layer)
    assert isinstance(base, nn.Module)
    return base


def lm_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor, teacher: Tensor | None, teacher_tilt: Tilt | None = None
) -> Tensor:
    """Mean over M positions of KL(original || adapted), or of the cross-entropy on the text, in nats.

    At most one chunk of logits is in memory; the backward computes logits again.

    Args:
        head: the LM head, adapted or not.
        hidden: [M, H] hidden states of the adapted backbone.
        labels: [M] next tokens, for the cross-entropy.
        teacher: [M, H] hidden states of the original backbone, for the divergence.
    """
    plain_head = without_adapter(head)

    def chunk(hidden_rows: Tensor, rows: slice) -> Tensor:
        log_q = head(hidden_rows).float().log_softmax(-1)
        if teacher is None:
            return F.nll_loss(log_q, labels[rows], reduction="sum")
        with torch.no_grad():
            log_p = plain_head(teacher[rows]).float().log_softmax(-1)
            if teacher_tilt is not None:
                log_p = (log_p + teacher_tilt(rows)).log_softmax(-1)
        return F.kl_div(log_q, log_p, log_target=True, reduction="sum")

    loss = hidden.new_zeros((), dtype=torch.float32) + 0 * hidden.sum()  # in the graph even without any label
    weight = plain_head.weight
    assert isinstance(weight, Tensor)
    step = chunk_rows(1, weight.shape[0], hidden.device.type)
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        loss = loss + checkpoint(chunk, hidden[rows], rows, use_reentrant=False)
    return loss / max(len(hidden), 1)


@torch.no_grad()
def tilt_towards(
    heads: MedusaHeads, backbone: Backbone, exponent: float, hidden: Tensor, batch: Batch, taught: Tensor
) -> Tilt:
    """Make a tilt towards the first head's prediction; 0 at the first position of a document, which has none.

    Args:
        exponent: `teacher_tilt`.
        hidden: [B, T, H] hidden states of the adapted backbone.
        taught: [B, T] True at the M positions.
    """
    lm_head, documents = without_adapter(backbone.head), batch["document_ids"]
    before = (batch["position_ids"][:, :-1], documents[:, :-1])
    inputs = heads.inputs(hidden[:, :-1], batch["input_ids"], backbone.embed, *before, num_heads=1)
    training = heads.training
    heads.eval()  # no dropout, as in decoding
    features = F.pad(heads.features(inputs, 1)[0], (0, 0, 1, 0))[taught]
    heads.train(training)
    if heads.lm_heads is None:
        features = features.to(next(lm_head.parameters()).dtype)
    known = F.pad(documents[:, 1:] == documents[:, :-1], (1, 0))[taught]
    exponents = exponent * known.float()[:, None]

    def gain(rows: slice) -> Tensor:
        return exponents[rows] * heads.logits(features[None, rows], lm_head)[0].float().log_softmax(-1)

    return gain


def risen(config: AdapterConfig, progress: float) -> float | None:
    """Share of lambda_0 and teacher_tilt that applies at `progress` (0 to 1); `None` while the heads learn alone."""
    if progress < config.heads_first:
        return None
    progress = (progress - config.heads_first) / (1 - config.heads_first)
    return {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}[config.schedule]


def heads_weight(config: AdapterConfig, progress: float) -> float:
    """lambda_0 at `progress` (0 to 1); 1 while the heads learn alone, since their loss is the only one then."""
    share = risen(config, progress)
    return 1.0 if share is None else config.lambda_0 * share


class Quality(NamedTuple):
    """Perplexities of the original and the adapted backbone on the same rows."""

    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.before:.3f} before, {self.after:.3f} after ({self.after / self.before - 1:+.2%})"


def quality(backbone: Backbone, rows: PackedDataset | Features) -> Quality:
    """Measure the perplexity of an adapted backbone with the adapter off and on."""
    backbone.model.eval()
    with untouched(backbone.model):
        before = perplexity(backbone, rows)
    return Quality(before, perplexity(backbone, rows))


@torch.no_grad()
def perplexity(backbone: Backbone, rows: PackedDataset | Features, batch_size: int = 4) -> float:
    """exp of the mean cross-entropy of the taught tokens in the first `QUALITY_ROWS` rows."""
    total, count = 0.0, 0
    for start in range(0, min(len(rows), QUALITY_ROWS), batch_size):
        picked = [rows[index] for index in range(start, min(start + batch_size, len(rows), QUALITY_ROWS))]
        batch = {name: tensor.to(backbone.device) for name, tensor in default_collate(picked).items()}
        hidden = backbone.hidden_states(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        labels = head_labels(batch["input_ids"], batch["loss_mask"], batch["document_ids"], 1, first=NEXT)[0]
        taught = labels != IGNORE
        mean = lm_loss(backbone.head, hidden[taught], labels[taught], None)
        total, count = total + float(mean) * int(taught.sum()), count + int(taught.sum())
    return math.exp(total / max(count, 1))


def write_merged(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, heads: MedusaHeads, output: Path
) -> Path:
    """Merge the adapter in `output` into a fresh `base`, and write the result with the heads to output/merged.

    The heads are the same, with the fingerprint of the merged model as their backbone's.
    """
    merged = PeftModel.from_pretrained(base, str(output / ADAPTER)).merge_and_unload()
    with replacing_folder(output / "merged") as folder:
        merged.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        known, heads.config.backbone = heads.config.backbone, fingerprint(merged, str(output / "merged"))
        heads.save_pretrained(folder / "heads")
        heads.config.backbone = known
    return output / "merged"
