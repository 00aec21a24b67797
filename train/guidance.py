"""What heads are shown in training only: noise on the hidden states, and their own guesses instead of the text."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import lm_head_for, token_ids
from train.loss.chunks import chunk_rows


def with_noise(hidden: Tensor, amplitude: float) -> Tensor:
    """hidden [..., H] plus uniform noise from -a r to a r in every component [..., H].

    a is `amplitude` and r the root mean square of the state. (EAGLE, arXiv 2401.15077, adds U(-0.1, 0.1) to all states,
    whatever their scale.)
    """
    scale = hidden.detach().float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype)
    return hidden + amplitude * scale * (2 * torch.rand_like(hidden) - 1)


@torch.no_grad()
def with_own_guesses(
    heads: MedusaHeads, backbone: Backbone, inputs: HeadInputs, ids: Tensor, probability: float
) -> Tensor:
    """The tokens that heads follow, some of them replaced by the heads' own guesses [R, K]: scheduled sampling.

    With this probability head k is shown the guess of head k - 1, made in one pass over the text's own tokens (Bengio
    et al. 2015; in parallel, Duckworth et al. 2019). The root, the first token that heads follow, is never a guess.

    Args:
        inputs: of the heads at R positions, with the text's tokens.
        ids: [R, K] the text's tokens that the heads follow there.
    """
    if ids.shape[1] == 1:
        return ids
    replaced = torch.rand(ids[:, 1:].shape, device=ids.device) < probability
    lm_head = lm_head_for(heads, backbone)
    rows = chunk_rows(ids.shape[1], backbone.vocab_size, inputs.hidden.device.type)
    features = heads.features(inputs, ids.shape[1] - 1)
    guesses = [token_ids(heads, heads.logits(part, lm_head).argmax(-1)).T for part in features.split(rows, dim=1)]
    return torch.cat([ids[:, :1], torch.where(replaced, torch.cat(guesses).to(ids.device), ids[:, 1:])], dim=1)
