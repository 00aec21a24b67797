"""One autoregressive layer for all steps: EAGLE (arXiv 2401.15077), trained on its own features (EAGLE-3, HASS).

    z = [f ; e(token)]              f: the backbone's hidden state, and from the second step on the step's own output
    f' = f + attention(z)           over the pairs (f, token) of the text before, and those of the path so far
    f' = f' + blocks([f' ; e(token)])

Each step's output is the next one's f, and goes through the LM head. A pair's key depends on the pair alone, so the
text's accepted pairs are remembered without running the layer over them.

With `block: gated` it is the layer of EAGLE-3 (arXiv 2503.01840) to the letter, as servers run it on the last hidden
state: norms with weights, a Llama's gated MLP after attention that does not see the token, and a norm before the LM
head.

    f' = f + attention(norm z)    f' = f' + D (SiLU(G norm f') * U norm f')    the LM head reads norm f'
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import GATED, MedusaConfig
from medusa.errors import RequestError
from medusa.heads.context_kv import ContextKV
from medusa.heads.rope import apply_rope, rope_angles
from medusa.heads.sequential import SequentialHeads, Stack, State, normalised

HEAD_SIZE = 64
EPS = 1e-6


class GatedStack(nn.Module):
    """A Llama's MLP and the norm before it: x + D (SiLU(G n) * U n) with n = norm(x), and D = 0 at the start."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.inner_size
        self.norm = nn.RMSNorm(size, EPS)
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down.weight)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        del z  # the token is known from attention alone
        inner = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(inner)) * self.up(inner)))


class EagleHeads(SequentialHeads):
    """The state is the output vector [..., H], and of each pair of the path its key and value [..., 2 H]."""

    follows_path = uses_context = True

    def make_blocks(self) -> None:
        size = self.config.hidden_size
        if size % 2:
            raise RequestError(f"heads of kind eagle need an even hidden size, not {size}; take recurrent")
        self.count = max(size // HEAD_SIZE, 1)
        while size % (2 * self.count):
            self.count -= 1
        self.size = size // self.count
        self.pair = nn.Linear(2 * size, 3 * size, bias=False)  # to its query, key and value
        self.out = nn.Linear(size, size, bias=False)
        nn.init.zeros_(self.out.weight)
        self.dropout = nn.Dropout(0.0)
        self.gated = self.config.block == GATED
        self.stack = GatedStack(self.config) if self.gated else Stack(self.config, 2 * size)
        if self.gated:
            self.feature_norm, self.token_norm, self.norm = (nn.RMSNorm(size, EPS) for _ in range(3))

    def sides(self, feature: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """What attention sees of a pair."""
        if self.gated:
            return self.feature_norm(feature), self.token_norm(token)
        return normalised(feature), normalised(token)

    def project_kv(self, hidden: Tensor, token: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.cat(self.sides(hidden, token), dim=-1)
        both = F.linear(pair, self.pair.weight[self.config.hidden_size :]).unflatten(-1, (2, self.count, -1))
        keys, values = both.transpose(1, 3).unbind(2)  # [B, A, T, D]
        cos, sin = rope_angles(position_ids, self.size, keys.dtype)
        return apply_rope(keys, (cos[:, None], sin[:, None])), values

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        feature, *path = state
        seen_feature, token = self.sides(feature, token)
        mixed = self.pair(torch.cat([seen_feature, token], dim=-1)).unflatten(-1, (3, self.count, -1))
        if context_kv is None:
            cos, sin = rope_angles(torch.full((), head, device=mixed.device), self.size, mixed.dtype)
        else:
            cos, sin = (part[..., None, None, :] for part in context_kv.turn(head))
        query, key = apply_rope(mixed[..., :2, :, :], (cos, sin)).unbind(-3)
        path.append(torch.cat([key, mixed[..., 2, :, :]], dim=-1).flatten(-2))
        keys, values = torch.stack(path, dim=-2).unflatten(-1, (self.count, -1)).chunk(2, dim=-1)  # [..., k + 1, A, D]
        scores = (query[..., None, :, :] * keys).sum(-1).transpose(-1, -2)  # [..., A, k + 1]
        if context_kv is None:
            seen, weights = torch.zeros_like(query), (scores * self.size**-0.5).softmax(-1)
        else:
            seen, weights = context_kv.look(query, scores)
        seen = seen + (weights.transpose(-1, -2)[..., None] * values).sum(-3)
        feature = feature + self.dropout(self.out(seen.flatten(-2)))
        feature = self.stack(feature, torch.cat([feature, token], dim=-1))
        return self.norm(feature) if self.gated else feature, (feature, *path)
