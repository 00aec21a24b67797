"""The module and the Trainer of Medusa-2, for the loss in `train.medusa2.backbone`. The heads may learn alone first.

lambda_0 scales the heads' gradient where it enters the backbone, not the heads' loss. Both have the same effect on the
backbone. Under AdamW a constant factor does not affect the heads, but a changing factor on their loss would slow them
down while AdamW adjusts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa.files import replacing_folder
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from train.arguments import MedusaTrainingArguments
from train.data.datasets import Batch
from train.loss.heads import HeadLosses
from train.loss.targets import IGNORE, NEXT, head_labels
from train.medusa2.backbone import ADAPTER, ADAPTER_WEIGHTS, heads_weight, lm_loss, risen, tilt_towards, untouched
from train.module import HeadsOnBackbone
from train.recipe import AdapterConfig
from train.trainer import MedusaTrainer

HEADS_FASTER = 4  # times the adapter's learning rate (paper, section 3)


class JointLosses(NamedTuple):
    """The heads' losses with the LM loss and its number of labels."""

    heads: HeadLosses
    lm: Tensor
    """Mean over the labels, in nats; carries gradients. 0 while the heads learn alone."""
    lm_total: Tensor


class HeadsAndAdapter(HeadsOnBackbone):
    """The module that Medusa-2 trains: heads, and the adapter in the backbone."""

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments, lm_loss: str) -> None:
        """`model` is a result of `adapt`; `lm_loss` is kl or text."""
        super().__init__(heads, model, args)  # freezes everything
        model.enable_adapters()  # the adapter learns again
        self.adapted, self.lm_loss, self.joint = model, lm_loss, True
        self.lambda_0, self.teacher_tilt = 1.0, 0.0

    def train(self, mode: bool = True) -> HeadsAndAdapter:
        super().train(mode)
        self.adapted.train(mode and self.joint)
        return self

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Turn on activation checkpointing; the Trainer calls it for `training.activation_checkpointing`."""
        self.adapted.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Turn on activation checkpointing, by its name in older versions of transformers."""
        self.adapted.gradient_checkpointing_enable(**kwargs)

    def forward(self, **batch: Tensor) -> JointLosses:  # type: ignore[override]
        """Losses of heads and backbone on a batch, whose `hidden`, if any, are the original backbone's states."""
        backbone, hidden = self.backbone, batch.pop("hidden", None)
        ids, positions = batch["input_ids"], batch["position_ids"]
        if hidden is None and (self.lm_loss == "kl" or not self.joint):
            with torch.no_grad(), untouched(self.adapted):
                hidden = backbone.hidden_states(ids, position_ids=positions, use_cache=False)
        if not self.joint:
            assert hidden is not None
            nothing = ids.new_zeros((), dtype=torch.float32)
            return JointLosses(super().forward(**batch, hidden=hidden), nothing, nothing)
        adapted = backbone.hidden_states(ids, position_ids=positions, use_cache=False)
        labels = head_labels(ids, batch["loss_mask"], batch["document_ids"], 1, first=NEXT)[0]
        taught = labels != IGNORE
        teacher = tilt = None
        if hidden is not None and self.lm_loss == "kl":
            teacher = hidden[taught].to(adapted.dtype)
            if self.teacher_tilt:
                tilt = tilt_towards(self.heads, backbone, self.teacher_tilt, adapted, batch, taught)
        lm = lm_loss(backbone.head, adapted[taught], labels[taught], teacher, tilt)
        still = adapted.detach()
        for_heads = still + self.lambda_0 * (adapted - still)  # equal, with a share of the gradient
        return JointLosses(super().forward(**batch, hidden=for_heads), lm, taught.sum())


class Medusa2Trainer(MedusaTrainer):
    """Trains heads and an adapter. A checkpoint is a folder of heads with the adapter's folder in it."""

    trained: HeadsAndAdapter

    def __init__(
        self, model: PreTrainedModel, heads: MedusaHeads, args: MedusaTrainingArguments, adapter: AdapterConfig
    ) -> None:
        """`model` is a result of `adapt`."""
        self.adapter = adapter
        if adapter.heads_first > 0:
            args.ddp_find_unused_parameters = True  # the adapter's, while the heads learn alone
        super().__init__(model, heads, args)

    def assemble(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> HeadsAndAdapter:
        return HeadsAndAdapter(heads, model, args, self.adapter.lm_loss)

    def begin_step(self, progress: float) -> None:
        super().begin_step(progress)
        share = risen(self.adapter, progress)
        self.trained.joint = share is not None
        self.trained.lambda_0 = heads_weight(self.adapter, progress)
        self.trained.teacher_tilt = (self.adapter.teacher_tilt or 0.0) * (share or 0.0)

    def label_counts(self, batch: Batch) -> Tensor:
        """The number of labels of each head and of the LM loss in a batch [K + 1]."""
        next_labels = head_labels(batch["input_ids"], batch["loss_mask"], batch["document_ids"], 1, first=NEXT)
        return torch.cat([super().label_counts(batch), (next_labels != IGNORE).sum().reshape(1)])

    def sums(self, losses: JointLosses) -> Tensor:  # type: ignore[override]
        """The sums of each head and of the LM loss [3, K + 1]; the LM loss has no guesses."""
        lm = torch.stack([losses.lm.detach() * losses.lm_total, torch.zeros_like(losses.lm), losses.lm_total])
        return torch.cat([super().sums(losses.heads), lm[:, None]], dim=1)

    def total_loss(self, losses: JointLosses, of_step: Tensor | None) -> Tensor:  # type: ignore[override]
        heads = super().total_loss(losses.heads, None if of_step is None else of_step[:-1])
        return losses.lm * self.share(losses.lm_total, None if of_step is None else of_step[-1]) + heads

    def figures(self, sums: Tensor, prefix: str) -> dict[str, float]:
        """Figures of the heads, with the mean LM loss in nats and the lambda_0 of the next step."""
        loss, _, labels = sums[:, -1].tolist()
        lm = {f"{prefix}lm_loss": round(loss / max(labels, 1), 6)}
        return super().figures(sums[:, :-1], prefix) | lm | {"lambda_0": heads_weight(self.adapter, self.progress())}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the Trainer's optimiser and split each of its groups, so that the adapter learns more slowly."""
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

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
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
