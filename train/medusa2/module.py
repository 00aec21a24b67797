"""The module that the Trainer trains in Medusa-2: the heads, and the adapter in the backbone.

lambda_0, the weight of the heads' loss, scales the heads' gradient where it enters the backbone, not the loss itself.
Both have the same effect on the backbone. Under AdamW a constant factor on the heads' loss does not affect the heads,
but a changing factor would slow their learning down while AdamW adjusts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa.heads.independent import MedusaHeads
from train.arguments import MedusaTrainingArguments
from train.loss.heads import HeadLosses
from train.loss.labels import IGNORE, NEXT, head_labels
from train.medusa2.adapter import adapter_disabled
from train.medusa2.lm_loss import lm_loss, tilt_towards
from train.module import HeadsOnBackbone


class HeadsAndAdapter(HeadsOnBackbone):
    """The module that Medusa-2 trains: its parameters are those of the heads and of the adapter in the backbone."""

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments, lm_loss: str) -> None:
        """Freeze the backbone `model` except its adapter, which `adapt` has added.

        The LM loss `lm_loss` is "kl" (divergence from the original backbone) or "text" (cross-entropy on the text).
        """
        super().__init__(heads, model, args)  # freezes the adapter, too
        model.enable_adapters()  # unfreezes the adapter
        self.adapted, self.lm_loss, self.joint = model, lm_loss, True
        self.lambda_0, self.teacher_tilt = 1.0, 0.0

    def train(self, mode: bool = True) -> HeadsAndAdapter:
        super().train(mode)
        self.adapted.train(mode and self.joint)
        return self

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Turn on activation checkpointing in the backbone; the Trainer calls this method if the recipe requests it."""
        self.adapted.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Turn on activation checkpointing in the backbone; older versions of transformers use this name."""
        self.adapted.gradient_checkpointing_enable(**kwargs)

    def forward(self, **batch: Tensor) -> HeadLosses:
        """Compute the losses of K heads, and after them the backbone's LM loss: each field has the shape [K + 1].

        The LM loss has no right guesses; without labels, as while only the heads learn, it is 0. If the batch contains
        hidden states, they are those of the original backbone, and are not computed again.
        """
        backbone, hidden = self.backbone, batch.pop("hidden", None)
        ids, positions = batch["input_ids"], batch["position_ids"]
        if hidden is None and (self.lm_loss == "kl" or not self.joint):
            with torch.no_grad(), adapter_disabled(self.adapted):
                hidden = backbone.hidden_states(ids, position_ids=positions, use_cache=False)
        lm, lm_labels = ids.new_zeros((), dtype=torch.float32), ids.new_zeros(())
        if self.joint:
            adapted = backbone.hidden_states(ids, position_ids=positions, use_cache=False)
            labels = head_labels(ids, batch["loss_mask"], batch["document_ids"], 1, first=NEXT)[0]
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
        heads = super().forward(**batch, hidden=hidden)
        last = HeadLosses(lm, lm.detach(), torch.zeros_like(lm_labels), lm_labels)
        return HeadLosses(*(torch.cat([values, value[None]]) for values, value in zip(heads, last, strict=True)))
