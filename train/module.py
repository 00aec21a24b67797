"""The module that the Trainer trains: heads as parameters, and the frozen backbone outside the module tree.

Shapes: B rows, T tokens, R positions that are taught, K heads, H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs, following_ids
from medusa.vocabulary import lm_head_for, token_ids
from train.arguments import MedusaTrainingArguments
from train.loss.chunks import chunk_rows
from train.loss.heads import HeadLosses, head_losses
from train.loss.labels import IGNORE, head_labels
from train.loss.teacher import BackboneTeacher, backbone_choices


class Taught(NamedTuple):
    """The R positions of a batch at which heads are taught."""

    inputs: HeadInputs
    labels: Tensor
    """[K, R] tokens; IGNORE if a head has no label."""
    teacher: BackboneTeacher | None
    """The backbone's distributions at these positions, for the objective distill."""


class HeadsOnBackbone(nn.Module):
    """Heads with the backbone that they read. Parameters, state dict and optimiser hold the heads alone."""

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> None:
        """Freeze `model` and set the heads' dropout.

        Raises:
            RequestError: an argument that these heads or this backbone cannot be trained with.
        """
        super().__init__()
        self.heads, self.args, self.weighting = heads, args, args.weighting
        self.scheduled_sampling = 0.0  # the probability in force, which the trainer raises over the run
        if args.scheduled_sampling and not heads.follows_path:
            raise RequestError(
                f"training.scheduled_sampling: heads of kind {heads.config.kind} see no guesses; leave it out, or take "
                "a kind that follows the path (docs/heads.md)"
            )
        if args.dropout:
            heads.set_dropout(args.dropout)
        if getattr(model, "hf_device_map", None):  # spread over devices: the Trainer then moves no heads
            self.hf_device_map = model.hf_device_map
        self.backbone = Backbone(model.requires_grad_(False).eval())  # no nn.Module, so no submodule
        if args.objective == "distill" and not self.backbone.splits:
            raise RequestError(
                "training.objective distill: this backbone caps or scales its LM head's output, so that its softmax is "
                "not the backbone's distribution; take argmax, which is the same either way"
            )

    def forward(self, **batch: Tensor) -> HeadLosses:
        """Losses of the heads on a batch (`train.data.packing.Batch`)."""
        inputs, labels, teacher = self.taught(**batch)
        settings = (self.weighting, teacher, self.args.loss_backend)
        return head_losses(self.heads, inputs, labels, self.backbone.head, *settings)

    def taught(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        loss_mask: Tensor,
        hidden: Tensor | None = None,
    ) -> Taught:
        """Positions at which heads are taught in a batch, with the heads' inputs and labels.

        Ids, positions, documents and mask are all [B, T]. `hidden` [B, T, H] are the backbone's hidden states, if they
        are known already.
        """
        backbone, args, num_heads = self.backbone, self.args, self.heads.config.num_heads
        # An evaluation compares the heads' guesses with tokens, under the objective distill too.
        argmax = args.objective == "argmax" or (args.objective == "distill" and not self.training)
        if hidden is None:
            hidden = self.states(input_ids, position_ids)
        hidden = hidden.to(backbone.dtype)  # may carry gradients
        with torch.no_grad():
            tokens = backbone_choices(backbone, hidden, input_ids) if argmax else input_ids
        labels = head_labels(tokens, loss_mask, document_ids, num_heads).flatten(1)
        # No decoding step starts where head 0 has no label: the next token but one is not the backbone's there.
        places = (labels[0] != IGNORE).nonzero()[:, 0]
        teacher = None
        if args.objective == "distill":
            settings = (args.teacher_temperature, args.hard_label_weight, self.heads.vocabulary)
            teacher = BackboneTeacher(hidden.flatten(0, 1), places, backbone.head, *settings)
        shown = hidden.to(self.heads.dtype)
        if self.training and args.hidden_noise:
            shown = with_noise(shown, args.hidden_noise)
        inputs = self.heads.inputs(shown, input_ids, backbone.embed, position_ids, document_ids, places)
        if self.training and self.scheduled_sampling:
            ids = following_ids(input_ids, num_heads).flatten(0, 1)[places]
            ids = with_own_guesses(self.heads, backbone, inputs, ids, self.scheduled_sampling)
            with torch.no_grad():
                inputs = inputs._replace(following=backbone.embed(ids).to(inputs.hidden))
        return Taught(inputs, labels[:, places], teacher)

    def states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The backbone's hidden states [B, T, H] of ids and positions [B, T].

        They keep the backbone's dtype under mixed precision too, because decoding shows the heads no other states.
        """
        with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
            return self.backbone.hidden_states(input_ids, position_ids=position_ids, use_cache=False)


def with_noise(hidden: Tensor, amplitude: float) -> Tensor:
    """hidden [..., H] plus uniform noise from -a r to a r in every component [..., H].

    a is `amplitude` and r the root mean square of the state. (EAGLE, arXiv 2401.15077, adds U(-0.1, 0.1) to states of
    any scale.)
    """
    scale = hidden.detach().float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype)
    return hidden + amplitude * scale * (2 * torch.rand_like(hidden) - 1)


@torch.no_grad()
def with_own_guesses(
    heads: MedusaHeads, backbone: Backbone, inputs: HeadInputs, ids: Tensor, probability: float
) -> Tensor:
    """The tokens that heads follow [R, K], some replaced by the heads' own guesses: scheduled sampling.

    With this probability head k is shown the guess of head k - 1, made in one pass over the text's own tokens (Bengio
    et al. 2015; in parallel, Duckworth et al. 2019). The root, the first token that heads follow, is never a guess.

    Args:
        inputs: of the heads at R positions, with the text's tokens.
        ids: [R, K] the text's tokens that the heads follow at these positions.
    """
    if ids.shape[1] == 1:
        return ids
    replaced = torch.rand(ids[:, 1:].shape, device=ids.device) < probability
    lm_head = lm_head_for(heads, backbone)
    rows = chunk_rows(ids.shape[1], backbone.vocab_size, inputs.hidden.device.type)
    features = heads.features(inputs, ids.shape[1] - 1)
    guesses = [token_ids(heads, heads.logits(part, lm_head).argmax(-1)).T for part in features.split(rows, dim=1)]
    return torch.cat([ids[:, :1], torch.where(replaced, torch.cat(guesses).to(ids.device), ids[:, 1:])], dim=1)
