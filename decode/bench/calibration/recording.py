"""Texts that the backbone wrote, with the rank of every token among the guesses of the heads.

Shapes: P positions of a text, K heads, V vocabulary, G temperatures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.bench.calibration.texts import Text
from decode.drafters.dynamic_tree import TOP, DynamicTree
from medusa.backbone import Backbone
from medusa.heads.guesses import MISSED, accepted, ranks_of
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.tree import Layout
from medusa.vocabulary import lm_head_for, places_of, token_ids

TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)
"""The temperatures that a head can get."""
AT_ONCE = 64  # positions whose logits are held


@dataclass
class Recording:
    """What the heads guessed in recorded texts.

    Each list has an entry for each text, with a line for every position where a root may stand.
    """

    ranks: list[Tensor]
    """[P, K] the rank of the right token among the guesses of head k, made at the hidden state before the root. MISSED
    if the token is not among the TOP best guesses, or if the text has ended."""
    best: list[Tensor] = field(default_factory=list)
    """[P, K, TOP] the logits of the best guesses of each head."""
    log_z: list[Tensor] = field(default_factory=list)
    """[P, K, G] the logarithm of the sum of all exponentials, at each of TEMPERATURES."""
    right: list[Tensor] = field(default_factory=list)
    """[P, K] the logit of the right token; NaN if the text has ended, or if the heads lack the token."""

    @property
    def tokens(self) -> int:
        """Positions of all texts."""
        return sum(len(ranks) for ranks in self.ranks)

    @property
    def has_steps(self) -> bool:
        """Whether some text is longer than the reach of the heads, so that steps can be replayed on it."""
        return any(len(ranks) > ranks.shape[1] for ranks in self.ranks)

    def part(self, texts: Sequence[int]) -> Recording:
        """The recording of some of the texts, given by index."""
        columns = (self.ranks, self.best, self.log_z, self.right)
        return Recording(*([column[text] for text in texts] if column else [] for column in columns))

    def fit_temperatures(self) -> tuple[float, ...]:
        """The temperature for each head that gives the right tokens the most probability (Guo et al. 2017)."""
        right, log_z = torch.cat(self.right), torch.cat(self.log_z)  # [P, K], [P, K, G]
        loss = (log_z - right[:, :, None] / torch.tensor(TEMPERATURES)).nanmean(0)  # [K, G]
        return tuple(TEMPERATURES[index] for index in loss.argmin(-1).tolist())

    def accepted(self, tree: Layout, text: int) -> Tensor:
        """How many drafted tokens a step from each position of a text would accept [P]."""
        if not isinstance(tree, DynamicTree):
            return accepted(tree.candidates, self.ranks[text])
        chosen = [TEMPERATURES.index(t) for t in tree.temperatures[: tree.max_depth]]
        scale, heads = torch.tensor(tree.temperatures)[: tree.max_depth], range(tree.max_depth)
        log_z = self.log_z[text][:, heads, chosen][:, :, None]
        guesses = self.best[text][:, : tree.max_depth, : tree.candidates.max_rank + 1]
        taken, _ = tree.choose(tree.path_log_probs(guesses / scale[:, None] - log_z))
        return accepted(tree.candidates, self.ranks[text], taken)


@torch.no_grad()
def record(backbone: Backbone, heads: MedusaHeads, texts: Iterable[Text]) -> Recording:
    """Record texts, one forward each."""
    recording = Recording([])
    for prompt, new in texts:
        ids = torch.tensor([[*prompt, *new]], device=backbone.device)
        states = backbone.hidden_states(ids[:, :-1], use_cache=False)
        before = torch.arange(len(prompt) - 1, states.shape[1], device=states.device)  # the place before each new token
        _record(recording, heads, backbone, heads.inputs(states, ids, backbone.embed, place=before), list(new))
    return recording


def _record(recording: Recording, heads: MedusaHeads, backbone: Backbone, inputs: HeadInputs, new: list[int]) -> None:
    """Record the guesses made at P positions, those before each of the P tokens `new`.

    Head k guesses the token k + 1 places after the root.
    """
    num_heads, ahead = heads.config.num_heads, torch.tensor(new, device=inputs.hidden.device)
    targets = torch.stack([ahead.roll(-k) for k in range(1, num_heads + 1)])  # [K, P]; wrapped tokens are masked below
    features, parts, lm_head = heads.features(inputs), [], lm_head_for(heads, backbone)
    # K x P x V logits are never held
    for part, target in zip(features.split(AT_ONCE, dim=1), targets.split(AT_ONCE, dim=1), strict=True):
        logits = heads.logits(part, lm_head).float()
        top = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
        ranks = ranks_of(target, token_ids(heads, top.indices))
        log_z = torch.stack([(logits / t).logsumexp(-1) for t in TEMPERATURES], dim=-1)
        place = target.to(logits.device)
        if heads.vocabulary is not None:
            place = places_of(heads.vocabulary, place, backbone.vocab_size)
        right = logits.gather(2, place.clamp_min(0)[:, :, None])[:, :, 0].masked_fill(place < 0, torch.nan)
        parts.append([found.transpose(0, 1).cpu() for found in (ranks, top.values, log_z, right)])
    ranks, best, log_z, right = (torch.cat(column) for column in zip(*parts, strict=True))
    for head in range(num_heads):
        unknown = slice(max(len(new) - head - 1, 0), None)
        ranks[unknown, head], right[unknown, head] = MISSED, torch.nan
    recording.ranks.append(ranks)
    recording.best.append(best)
    recording.log_z.append(log_z)
    recording.right.append(right)
