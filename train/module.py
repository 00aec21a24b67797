"""The module that the Trainer trains: its parameters are the heads, and the frozen backbone is not a submodule.

Shapes: B rows, T tokens, R positions at which heads have labels, K heads, H hidden size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa.argmax import argmax
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads import kinds_where
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs, following_ids
from medusa.vocabulary import lm_head_for, token_ids
from train.arguments import MedusaTrainingArguments
from train.data.packing import Batch
from train.heads import backbone_for
from train.loss.heads import HeadLosses, head_losses
from train.loss.targets import IGNORE, BackboneTeacher, backbone_choices, chunk_rows, taught_labels
from train.states import KeptStates, packed_states


class LabelledPositions(NamedTuple):
    """The inputs and targets of K heads at the R positions of a batch at which head 0 has a label."""

    inputs: HeadInputs
    labels: Tensor  # [K, R] token ids; `IGNORE` where a head has no label
    teacher: BackboneTeacher | None  # the backbone's distributions, if the heads learn these


class HeadsOnBackbone(nn.Module):
    """Heads with the frozen backbone whose hidden states they read. Parameters and state dict cover only the heads."""

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> None:
        """Freeze the backbone `model`; raise RequestError if it or the heads do not support what `args` asks for."""
        super().__init__()
        self.heads, self.args = heads, args
        self.scheduled_sampling = 0.0  # current probability, which the trainer raises over the run
        if args.scheduled_sampling and not heads.follows_path:
            unable = f"training.scheduled_sampling: heads of kind {heads.config.kind} see no guesses"
            raise RequestError(f"{unable}; leave it out, or take a kind that follows the path (docs/kinds.md)")
        if heads.usual_path_dropout is not None and heads.follows_path:
            heads.path_dropout = heads.usual_path_dropout if args.path_dropout is None else args.path_dropout
        elif args.path_dropout is not None:
            kinds = " or ".join(kinds_where(lambda kind: kind.usual_path_dropout is not None))
            found = f"{heads.config.kind}{' without edges' * (heads.usual_path_dropout is not None)}"
            raise RequestError(f"training.path_dropout is for heads.kind {kinds}, not {found}; leave it out")
        if args.dropout:
            heads.set_dropout(args.dropout)
        if getattr(model, "hf_device_map", None):  # split over devices: the Trainer must not move the heads
            self.hf_device_map = model.hf_device_map
        frozen = model.requires_grad_(False).eval()
        self.backbone = backbone_for(frozen, heads.config.feature_layers)  # not an nn.Module, so not a submodule
        self.read = KeptStates(self.backbone)
        if args.learns_distributions and not self.backbone.splits:
            why = "this backbone caps or scales its LM head's output, so its softmax is not the backbone's distribution"
            raise RequestError(f"training.objective {args.objective}: {why}; take argmax, which is the same either way")

    def forward(self, counts: Tensor | None = None, in_place: bool = False, **batch: Tensor) -> HeadLosses:
        """Compute the losses of all heads on a batch (`train.data.packing.Batch`), with or without labels.

        `counts` [K] is the number of labels of each head in the optimiser step; for `in_place` see `head_losses`."""
        return self.losses(self.labelled_positions(**batch), counts, in_place)

    def losses(self, found: LabelledPositions, counts: Tensor | None = None, in_place: bool = False) -> HeadLosses:
        """Compute the losses of all heads at the positions that `labelled_positions` has found."""
        settings = (self.args.weighting, found.teacher, self.args.loss_backend, counts, in_place)
        return head_losses(self.heads, found.inputs, found.labels, self.backbone.head, *settings)

    def with_labels(self, batch: Batch) -> Batch:
        """Add the labels of the text's tokens to a batch, unless it has them: `labels` [K, R] and `places` [R]."""
        if "labels" in batch:
            return batch
        text = (batch["input_ids"], batch["loss_mask"], batch["document_ids"])
        labels, places = taught_labels(*text, self.heads.config.num_heads)
        return batch | {"labels": labels, "places": places}

    def label_counts(self, batch: Batch) -> Tensor:
        """Count the labels of each of the K heads in a batch that has them [K]."""
        return (batch["labels"] != IGNORE).sum(1)

    def labelled_positions(self, **batch: Tensor) -> LabelledPositions:
        """Collect the inputs and labels of the heads at the positions of a batch at which head 0 has a label.

        A batch may have `hidden` [B, T, H or more], the backbone's hidden states (`train.heads.backbone_for`) for its B
        rows of T tokens; otherwise they are computed here."""
        backbone, args, batch = self.backbone, self.args, self.with_labels(batch)
        input_ids, position_ids, hidden = batch["input_ids"], batch["position_ids"], batch.get("hidden")
        labels, places = batch["labels"], batch["places"]
        # An evaluation compares guesses with tokens, also if the heads learn distributions.
        argmax = args.objective == "argmax" or (args.learns_distributions and not self.training)
        if hidden is None:
            hidden = self.states(input_ids, position_ids)
        hidden = hidden.to(backbone.dtype)  # carries gradients in Medusa-2
        last = hidden[..., -backbone.hidden_size :]  # the LM head's input
        if argmax:
            labels = backbone_choices(backbone, last.flatten(0, 1), labels, places)
        teacher = None
        if args.learns_distributions:
            settings = (args.teacher_temperature, args.hard_label_weight, self.heads.vocabulary, args.acceptance)
            teacher = BackboneTeacher(last.flatten(0, 1), places, backbone.head, *settings)
        shown = hidden[..., : self.heads.config.feature_size].to(self.heads.dtype)
        if self.training and args.hidden_noise:  # layer by layer
            shown = with_noise(shown.unflatten(-1, (-1, backbone.hidden_size)), args.hidden_noise).flatten(-2)
        inputs = self.heads.inputs(shown, input_ids, backbone.embed, position_ids, batch["document_ids"], places)
        if self.training and self.scheduled_sampling:
            ids = following_ids(input_ids, len(labels)).flatten(0, 1)[places]
            ids = with_own_guesses(self.heads, backbone, inputs, ids, self.scheduled_sampling)
            inputs = inputs._replace(following=self.heads.embed(ids, backbone.embed))
        return LabelledPositions(inputs, labels, teacher)

    def states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Compute the backbone's hidden states [B, T, H or more] for B rows of T tokens."""
        # Without autocast, so that the heads read hidden states in the backbone's dtype, as in decoding.
        with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
            if not self.training:
                return packed_states(self.backbone, input_ids, position_ids)
            return self.read(input_ids, position_ids)


def with_noise(hidden: Tensor, amplitude: float) -> Tensor:
    """Add noise, uniform between -a r and a r, to hidden states [..., H]; a is `amplitude`, r each state's RMS."""
    # EAGLE (arXiv 2401.15077) adds noise between -0.1 and 0.1, whatever the scale of the hidden states.
    scale = hidden.detach().float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype)
    return hidden + amplitude * scale * (2 * torch.rand_like(hidden) - 1)


@torch.no_grad()
def with_own_guesses(
    heads: MedusaHeads, backbone: Backbone, inputs: HeadInputs, ids: Tensor, probability: float
) -> Tensor:
    """Replace some tokens `ids` [R, K], inputs of K sequential heads at R positions, by guesses (scheduled sampling).

    With the given probability, head k reads the guess of head k - 1 instead of the text's token. The first of the K
    tokens is never replaced. All guesses come from one pass over the text's tokens (Duckworth et al. 2019), not step by
    step (Bengio et al. 2015)."""
    if ids.shape[1] == 1:
        return ids
    replaced = torch.rand(ids[:, 1:].shape, device=ids.device) < probability
    lm_head = lm_head_for(heads, backbone)
    rows = chunk_rows(ids.shape[1], backbone.vocab_size, inputs.hidden.device.type)
    features = heads.features(inputs, ids.shape[1] - 1)
    guesses = [token_ids(heads, argmax(heads.logits(part, lm_head))).T for part in features.split(rows, dim=1)]
    return torch.cat([ids[:, :1], torch.where(replaced, torch.cat(guesses).to(ids.device), ids[:, 1:])], dim=1)
