"""The Trainer of Medusa-2 and the module that it trains: heads together with a LoRA adapter in the backbone.

lambda_0, the weight of the heads' loss, scales the heads' gradient where it enters the backbone, not the loss itself.
Scaling the loss would have the same effect on the backbone. Under AdamW a constant factor on the heads' loss does not
affect the heads, but a changing factor would slow their learning down while AdamW adjusts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa.files import replacing_folder
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from train.arguments import MedusaTrainingArguments
from train.config import AdapterConfig
from train.data.packing import Batch
from train.loss.heads import HeadLosses
from train.loss.targets import IGNORE, NEXT, head_labels
from train.medusa2.adapter import ADAPTER, ADAPTER_WEIGHTS, adapter_disabled
from train.medusa2.lm_loss import lm_loss, tilt_towards
from train.module import HeadsOnBackbone
from train.states import keeps_documents_apart, packed_states
from train.trainer import MedusaTrainer


class HeadsAndAdapter(HeadsOnBackbone):
    """The module that Medusa-2 trains: its parameters are those of the heads and of the adapter in the backbone."""

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments, lm_loss: str) -> None:
        """Freeze the backbone `model` except its adapter; `lm_loss` is "kl" or "text" (see `AdapterConfig.lm_loss`)."""
        super().__init__(heads, model, args)  # freezes the adapter, too
        keeps_documents_apart(self.backbone)  # tested now, because dropout of a training adapter would disturb the test
        model.enable_adapters()  # unfreezes the adapter
        self.adapted, self.lm_loss, self.joint = model, lm_loss, True
        self.lambda_0, self.teacher_tilt = 1.0, 0.0

    def train(self, mode: bool = True) -> HeadsAndAdapter:
        super().train(mode)
        self.adapted.train(mode and self.joint)
        return self

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Turn on activation checkpointing in the backbone, for the Trainer."""
        self.adapted.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """The same, under the name of older versions of transformers."""
        self.adapted.gradient_checkpointing_enable(**kwargs)

    def with_labels(self, batch: Batch) -> Batch:
        """Add the labels of heads to a batch, and `next_labels` [B, T], those of the LM loss, unless it has them."""
        if "next_labels" in batch:
            return batch
        text = (batch["input_ids"], batch["loss_mask"], batch["document_ids"])
        return super().with_labels(batch) | {"next_labels": head_labels(*text, 1, first=NEXT)[0]}

    def label_counts(self, batch: Batch) -> Tensor:
        """Count the labels of each of the K heads, and then those of the LM loss [K + 1]."""
        return torch.cat([super().label_counts(batch), (batch["next_labels"] != IGNORE).sum().reshape(1)])

    def forward(self, counts: Tensor | None = None, in_place: bool = False, **batch: Tensor) -> HeadLosses:
        """Compute the losses of K heads, and after them the backbone's LM loss: figures have the shape [K + 1].

        `counts` [K + 1] is the number of labels of each in the optimiser step; for `in_place` see `head_losses`.
        The LM loss is 0 without labels, and in the run's first part (adapter.heads_first), when only the heads learn.
        Its `correct` is always 0. Hidden states in the batch are the original backbone's; they are not recomputed."""
        backbone, batch = self.backbone, self.with_labels(batch)
        hidden, labels = batch.pop("hidden", None), batch["next_labels"]
        ids, positions = batch["input_ids"], batch["position_ids"]
        if hidden is None and (self.lm_loss == "kl" or not self.joint):
            with torch.no_grad(), adapter_disabled(self.adapted):
                hidden = packed_states(backbone, ids, positions)
        lm, lm_labels = ids.new_zeros((), dtype=torch.float32), ids.new_zeros(())
        if self.joint:
            adapted = packed_states(backbone, ids, positions)
            labelled = labels != IGNORE
            teacher = tilt = None
            if hidden is not None and self.lm_loss == "kl":
                teacher = hidden[labelled].to(adapted.dtype)
                if self.teacher_tilt:
                    tilt = tilt_towards(self.heads, backbone, self.teacher_tilt, adapted, batch, labelled)
            lm = lm_loss(backbone.head, adapted[labelled], labels[labelled], teacher, tilt)
            lm_labels = labelled.sum()
            still = adapted.detach()
            hidden = still + self.lambda_0 * (adapted - still)  # the same values, with lambda_0 times the gradient
        assert hidden is not None
        heads = super().forward(None if counts is None else counts[:-1], in_place, **batch, hidden=hidden)
        share = 1 if counts is None else lm_labels / counts[-1].clamp_min(1)
        figures = (lm.detach(), torch.zeros_like(lm_labels), lm_labels)
        of_heads = (heads.loss, heads.correct, heads.total)
        with_lm = (torch.cat([values, value[None]]) for values, value in zip(of_heads, figures, strict=True))
        return HeadLosses(heads.objective + lm * share, *with_lm)


HEADS_FASTER = 4  # learning rate of the heads, divided by that of the adapter (paper, section 3)


class Medusa2Trainer(MedusaTrainer):
    """Trains heads and the backbone's LoRA adapter together (Medusa-2). Checkpoints hold the adapter in a subfolder."""

    trained: HeadsAndAdapter

    def __init__(
        self, model: PreTrainedModel, heads: MedusaHeads, args: MedusaTrainingArguments, adapter: AdapterConfig
    ) -> None:
        """Make a trainer of `heads` and of the LoRA adapter in `model`, as `adapter` describes it."""
        self.adapter = adapter
        if adapter.heads_first > 0:
            args.ddp_find_unused_parameters = True  # the adapter's parameters are unused while only the heads learn
        super().__init__(model, heads, args)

    def assemble(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> HeadsAndAdapter:
        return HeadsAndAdapter(heads, model, args, self.adapter.lm_loss)

    def begin_step(self, progress: float) -> None:
        super().begin_step(progress)
        share = schedule_factor(self.adapter, progress)
        self.trained.joint = share is not None
        self.trained.lambda_0 = lambda_0_at(self.adapter, progress)
        self.trained.teacher_tilt = (self.adapter.teacher_tilt or 0.0) * (share or 0.0)

    def figures(self, sums: Tensor, prefix: str) -> dict[str, float]:
        """Metrics for the log, with the mean LM loss in nats and lambda_0; `sums` [3, K + 1] end with the LM loss."""
        loss, _, labels = sums[:, -1].tolist()
        lm = {f"{prefix}lm_loss": round(loss / max(labels, 1), 6)}
        return super().figures(sums[:, :-1], prefix) | lm | {"lambda_0": lambda_0_at(self.adapter, self.progress())}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the Trainer's optimiser, in which the adapter has its own learning rate."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        of_heads = {id(parameter) for parameter in self.heads.parameters()}
        rate = self.adapter.learning_rate or self.args.learning_rate / HEADS_FASTER
        for group in list(optimizer.param_groups):
            rest = [parameter for parameter in group["params"] if id(parameter) not in of_heads]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in of_heads]
            if rest:
                optimizer.add_param_group({**group, "params": rest, "lr": rate})
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        self.require_finite()
        if self.args.should_save:
            model, original = self.backbone.model, self.heads.config.backbone
            with replacing_folder(Path(output_dir or str(self.args.output_dir)) / ADAPTER) as folder:
                model.save_pretrained(folder)
            self.heads.config.backbone = fingerprint(model, original.get("name"), original.get("revision"))
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        weights = load_file(Path(resume_from_checkpoint) / ADAPTER / ADAPTER_WEIGHTS)
        set_peft_model_state_dict(self.backbone.model, weights)


def schedule_factor(config: AdapterConfig, progress: float) -> float | None:
    """Factor (0 to 1) on lambda_0 and teacher_tilt at a share `progress` of the run; `None` while only heads learn."""
    if progress < config.heads_first:
        return None
    progress = (progress - config.heads_first) / (1 - config.heads_first)
    return {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}[config.schedule]


def lambda_0_at(config: AdapterConfig, progress: float) -> float:
    """The weight lambda_0 of the heads' loss when a share `progress` of the run is done; 1 while only heads learn."""
    share = schedule_factor(config, progress)
    return 1.0 if share is None else config.lambda_0 * share
