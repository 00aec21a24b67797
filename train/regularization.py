"""Changes to the heads' inputs in training, so that the heads become robust: noise and scheduled sampling.

Shapes: R positions at which heads have labels, K heads, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import lm_head_for, token_ids
from train.loss.chunks import chunk_rows


def with_noise(hidden: Tensor, amplitude: float) -> Tensor:
    """Add uniform noise to hidden states [..., H] of size H.

    The noise in every component lies between -a r and a r, where a is `amplitude` and r the root mean square of the
    hidden state. (EAGLE, arXiv 2401.15077, adds noise between -0.1 and 0.1, whatever the scale of the hidden states.)
    """
    scale = hidden.detach().float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype)
    return hidden + amplitude * scale * (2 * torch.rand_like(hidden) - 1)


@torch.no_grad()
def with_own_guesses(
    heads: MedusaHeads, backbone: Backbone, inputs: HeadInputs, ids: Tensor, probability: float
) -> Tensor:
    """Scheduled sampling: replace some tokens of the path that a head reads by the guesses of earlier heads.

    With the given probability, head k reads the guess of head k - 1 instead of the text's token. All guesses come from
    one pass over the text's tokens (Bengio et al. 2015; in parallel, Duckworth et al. 2019).

    Args:
        inputs: inputs of K heads at R positions, with the text's tokens as the path.
        ids: [R, K] the text's tokens on the path. The first token, the root, is never replaced.
        probability: probability that a token is replaced.

    Returns:
        The token ids [R, K] to use as the path.
    """
    if ids.shape[1] == 1:
        return ids
    replaced = torch.rand(ids[:, 1:].shape, device=ids.device) < probability
    lm_head = lm_head_for(heads, backbone)
    rows = chunk_rows(ids.shape[1], backbone.vocab_size, inputs.hidden.device.type)
    features = heads.features(inputs, ids.shape[1] - 1)
    guesses = [token_ids(heads, heads.logits(part, lm_head).argmax(-1)).T for part in features.split(rows, dim=1)]
    return torch.cat([ids[:, :1], torch.where(replaced, torch.cat(guesses).to(ids.device), ids[:, 1:])], dim=1)
