"""Medusa-2: heads and backbone learn together (paper, section 2.2.2), the backbone through a LoRA adapter.

    loss = L_LM + lambda_0(t) * sum over heads of lambda_k * L_k, with lambda_k = head_decay^k in the paper

L_LM keeps the backbone what it is: the divergence from the untouched backbone (the paper's self-distillation, 2.3.2),
which is the same weights with the adapter off, or the cross-entropy on the text. The heads may learn alone first.

With `adapter.teacher_tilt` (ours) the teacher p itself gives way to what the first head expected a token before, q:

    target(x at t + 1)  =  p(x | ids up to t) q(x | ids up to t - 1)^teacher_tilt / normaliser

which is the distribution of least KL(target || p) - teacher_tilt E[log q]: of tokens that are nearly as good, the
backbone learns to take the one that was expected. This costs little of its perplexity.

lambda_0 is applied where the heads' gradient enters the backbone, not to the heads' loss: for the backbone that is the
same, and to the heads a factor says nothing under AdamW, but one that changes would slow them down while it adjusts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import replacing_folder
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from train.config import AdapterConfig
from train.data import PackedDataset
from train.features import Features
from train.labels import IGNORE, NEXT, head_labels
from train.loss import chunk_rows
from train.trainer import HeadsOnBackbone, MedusaTrainer, MedusaTrainingArguments

ADAPTER, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"
HEADS_FASTER = 4  # times the adapter's learning rate (paper, 3)
QUALITY_ROWS = 64


def adapt(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Put a fresh adapter into a frozen `model`, in place; it changes nothing until it is trained.

    Raises:
        RequestError: there is one already, no such layers, or a model whose logits are not its LM head's output.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise RequestError("the backbone is an adapter's folder already; train on one that is merged (adapter.merge)")
    if not Backbone(model).splits:
        raise RequestError(f"{type(model).__name__} scales or caps its logits; it can be trained on, but not adapted")
    modules: str | list[str] = config.modules
    if config.lm_head:
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        modules = sorted((linear if modules == "all-linear" else set(modules)) | {head})
    try:
        model.add_adapter(
            LoraConfig(
                task_type="CAUSAL_LM",
                r=config.rank,
                lora_alpha=config.alpha,
                lora_dropout=config.dropout,
                target_modules=modules,
            )
        )
    except ValueError as error:
        raise RequestError(f"adapter.modules: {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def untouched(model: PreTrainedModel) -> Iterator[None]:
    """The backbone as it was: adapter and dropout off."""
    training = model.training
    model.eval()
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
        model.train(training)


class JointLosses(NamedTuple):
    """`HeadLosses`, and the LM loss with its number of labels."""

    objective: Tensor
    loss: Tensor
    correct: Tensor
    total: Tensor
    lm: Tensor
    """Mean over the labels, in nats; carries gradients. 0 while the heads learn alone."""
    lm_total: Tensor


class HeadsAndAdapter(HeadsOnBackbone):
    """What the Trainer trains: heads, and the adapter in the backbone."""

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments, lm_loss: str) -> None:
        super().__init__(heads, model, args)  # freezes all
        model.enable_adapters()  # and the adapter learns again
        self.adapted, self.lm_loss, self.joint = model, lm_loss, True
        self.lambda_0, self.teacher_tilt = 1.0, 0.0

    def train(self, mode: bool = True) -> HeadsAndAdapter:
        super().train(mode)
        self.adapted.train(mode and self.joint)
        return self

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """What the Trainer calls for `training.activation_checkpointing`."""
        self.adapted.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """The same, by the name that older versions of transformers know."""
        self.adapted.gradient_checkpointing_enable(**kwargs)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        loss_mask: Tensor,
        hidden: Tensor | None = None,
    ) -> Any:
        """As `HeadsOnBackbone.forward`, but -> `JointLosses`; `hidden` is what the untouched backbone says."""
        batch = (input_ids, position_ids, document_ids, loss_mask)
        backbone = self._outside[0]
        if hidden is None and (self.lm_loss == "kl" or not self.joint):
            with torch.no_grad(), untouched(self.adapted):
                hidden = backbone.hidden_states(input_ids, position_ids=position_ids, use_cache=False)
        if not self.joint:
            nothing = input_ids.new_zeros((), dtype=torch.float32)
            return JointLosses(*super().forward(*batch, hidden), nothing, nothing)
        adapted = backbone.hidden_states(input_ids, position_ids=position_ids, use_cache=False)
        labels = head_labels(input_ids, loss_mask, document_ids, 1, first=NEXT)[0]
        taught = labels != IGNORE
        teacher = None if hidden is None or self.lm_loss == "text" else hidden[taught].to(adapted.dtype)
        teacher_tilt = self.tilt(adapted, *batch[:3], taught) if teacher is not None and self.teacher_tilt else None
        lm = lm_loss(backbone.head, adapted[taught], labels[taught], teacher, teacher_tilt)
        still = adapted.detach()
        for_heads = still + self.lambda_0 * (adapted - still)  # equal, with a share of the gradient
        return JointLosses(*super().forward(*batch, for_heads), lm, taught.sum())

    @torch.no_grad()
    def tilt(
        self, hidden: Tensor, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor, taught: Tensor
    ) -> Callable[[slice], Tensor]:
        """hidden [B, T, H] -> what the teacher's log-probabilities gain, [C, V] for a slice of the taught positions.

        Nothing is gained where a document begins: nobody has looked ahead.
        """
        heads, backbone = self.heads, self._outside[0]
        lm_head = without_adapter(backbone.head)
        positions, documents = position_ids[:, :-1], document_ids[:, :-1]
        inputs = heads.inputs(hidden[:, :-1], input_ids, backbone.embed, positions, documents, num_heads=1)
        training = heads.training
        heads.eval()  # what they expect in decoding: no dropout
        features = F.pad(heads.features(inputs, 1)[0], (0, 0, 1, 0))[taught]
        heads.train(training)
        if heads.lm_heads is None:
            features = features.to(lm_head.weight.dtype)
        known = F.pad(document_ids[:, 1:] == document_ids[:, :-1], (1, 0))[taught]
        exponent = self.teacher_tilt * known.float()[:, None]

        def gain(rows: slice) -> Tensor:
            return exponent[rows] * heads.logits(features[None, rows], lm_head)[0].float().log_softmax(-1)

        return gain


def without_adapter(layer: nn.Module) -> Any:
    """A layer as it was before `adapt`."""
    return getattr(layer, "base_layer", layer)


def lm_loss(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    teacher_tilt: Callable[[slice], Tensor] | None = None,
) -> Tensor:
    """hidden [M, H] -> mean over M of KL(untouched || adapted), or of the cross-entropy with `labels` [M], in nats.

    `teacher` [M, H] are the untouched backbone's hidden states; `teacher_tilt` is what their log-probabilities gain.
    No more than a chunk of logits is held: the backward makes them again.
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

    loss = hidden.new_zeros((), dtype=torch.float32) + 0 * hidden.sum()  # in the graph also where there is no label
    step = chunk_rows(1, plain_head.weight.shape[0], hidden.device.type)
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        loss = loss + checkpoint(chunk, hidden[rows], rows, use_reentrant=False)
    return loss / max(len(hidden), 1)


def risen(config: AdapterConfig, progress: float) -> float | None:
    """How much of lambda_0 and teacher_tilt is in force at that share of the run; `None` while the heads learn
    alone."""
    if progress < config.heads_first:
        return None
    progress = (progress - config.heads_first) / (1 - config.heads_first)
    return {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}[config.schedule]


def heads_weight(config: AdapterConfig, progress: float) -> float:
    """lambda_0 at that share of the run; while the heads learn alone their loss is all there is."""
    share = risen(config, progress)
    return 1.0 if share is None else config.lambda_0 * share


class Medusa2Trainer(MedusaTrainer):
    """Trains heads and an adapter; a checkpoint is a folder of heads with the adapter's folder in it."""

    def __init__(
        self,
        model: PreTrainedModel,
        heads: MedusaHeads,
        args: MedusaTrainingArguments,
        adapter: AdapterConfig,
        **kwargs: Any,
    ) -> None:
        """`model` has been through `adapt`."""
        self.adapter = adapter
        if adapter.heads_first > 0:
            args.ddp_find_unused_parameters = True  # the adapter, while the heads learn alone
        self._lm_seen: list[Tensor] = []
        super().__init__(model, heads, args, **kwargs)

    def assemble(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> HeadsOnBackbone:
        return HeadsAndAdapter(heads, model, args, self.adapter.lm_loss)

    def is_ours(self, parameter: str) -> bool:
        return super().is_ours(parameter) or "lora_" in parameter

    def get_batch_samples(self, *args: Any) -> tuple[list[Any], Tensor | int | None]:
        assert isinstance(self.trained, HeadsAndAdapter)
        self.trained.joint = self.progress() >= self.adapter.heads_first
        self.trained.lambda_0 = heads_weight(self.adapter, self.progress())
        self.trained.teacher_tilt = (self.adapter.teacher_tilt or 0.0) * (risen(self.adapter, self.progress()) or 0.0)
        return super().get_batch_samples(*args)

    def label_counts(self, batch: dict[str, Tensor]) -> Tensor:
        """[K + 1]: the heads', and the LM loss's."""
        next_labels = head_labels(batch["input_ids"], batch["loss_mask"], batch["document_ids"], 1, first=NEXT)
        return torch.cat([super().label_counts(batch), (next_labels != IGNORE).sum().reshape(1)])

    def total_loss(self, losses: Any, of_step: Tensor | None) -> Tensor:
        heads = super().total_loss(losses, None if of_step is None else of_step[:-1])
        lm = losses.lm * self.share(losses.lm_total, None if of_step is None else of_step[-1])
        if self.trained.training:
            self._lm_seen.append(torch.stack([losses.lm.detach() * losses.lm_total, losses.lm_total]).double().cpu())
        return lm + heads

    def seconds_per_step(self, *args: Any) -> float:
        seconds = super().seconds_per_step(*args)
        self._lm_seen.clear()
        return seconds

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the LM loss (nats), over all labels since the last line."""
        if self._lm_seen and "loss" in logs:
            seen = torch.stack(self._lm_seen).sum(0).to(self.args.device)
            self._lm_seen.clear()
            loss, labels = self.accelerator.reduce(seen, "sum").tolist()
            logs |= {
                "lm_loss": round(loss / max(labels, 1), 6),
                "lambda_0": heads_weight(self.adapter, self.progress()),
            }
        super().log(logs, start_time)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The Trainer's, with each of its groups parted: the adapter learns more slowly."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if not fresh:
            return optimizer
        of_heads = {id(parameter) for parameter in self.heads.parameters()}
        rate = self.adapter.learning_rate or self.args.learning_rate / HEADS_FASTER
        for group in list(optimizer.param_groups):
            rest = [parameter for parameter in group["params"] if id(parameter) not in of_heads]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in of_heads]
            if rest:
                optimizer.add_param_group({**group, "params": rest, "lr": rate})
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            model, known = self.backbone.model, self.heads.config.backbone
            with replacing_folder(Path(output_dir or str(self.args.output_dir)) / ADAPTER) as folder:
                model.save_pretrained(folder)
            self.heads.config.backbone = fingerprint(model, known.get("name"), known.get("revision"))
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        weights = load_file(Path(resume_from_checkpoint) / ADAPTER / ADAPTER_WEIGHTS)
        set_peft_model_state_dict(self.backbone.model, weights)


@torch.no_grad()
def perplexity(backbone: Backbone, rows: PackedDataset | Features, batch_size: int = 4) -> float:
    """exp of the mean cross-entropy of the taught tokens in the first `QUALITY_ROWS` rows."""
    total, count = 0.0, 0
    for start in range(0, min(len(rows), QUALITY_ROWS), batch_size):
        picked = [rows[index] for index in range(start, min(start + batch_size, len(rows), QUALITY_ROWS))]
        batch = {name: torch.stack([row[name] for row in picked]).to(backbone.device) for name in picked[0]}
        hidden = backbone.hidden_states(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        labels = head_labels(batch["input_ids"], batch["loss_mask"], batch["document_ids"], 1, first=NEXT)[0]
        taught = labels != IGNORE
        mean = lm_loss(backbone.head, hidden[taught], labels[taught], None)
        total, count = total + float(mean) * int(taught.sum()), count + int(taught.sum())
    return math.exp(total / max(count, 1))


def quality(trainer: Medusa2Trainer, rows: PackedDataset | Features) -> dict[str, float]:
    """Perplexity of the untouched and of the adapted backbone on the same rows."""
    model = trainer.backbone.model
    model.eval()
    with untouched(model):
        before = perplexity(trainer.backbone, rows)
    after = perplexity(trainer.backbone, rows)
    return {"perplexity_before": before, "perplexity_after": after}


def write_merged(base: PreTrainedModel, tokenizer: Any, heads: MedusaHeads, output: Path) -> Path:
    """The adapter in `output` merged into a fresh `base`, as a folder of its own, with the heads inside.

    The heads are the same ones; they name the merged backbone as theirs.
    """
    from peft import PeftModel

    merged = PeftModel.from_pretrained(base, str(output / ADAPTER)).merge_and_unload()
    with replacing_folder(output / "merged") as folder:
        merged.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        known, heads.config.backbone = heads.config.backbone, fingerprint(merged, str(output / "merged"))
        heads.save_pretrained(folder / "heads")
        heads.config.backbone = known
    return output / "merged"
