"""Published block drafters for tests: their layouts as each project writes them, and slow versions of their forwards.

`block` writes the layers down once more, without a cache and without shared code."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.helpers import HIDDEN, VOCAB

LAYERS, H, EPS, THETA, MASK, N = 5, HIDDEN, 1e-5, 500.0, 7, 40
A, G, D, WIDTH, RANK, GROUP = 4, 2, 8, 20, 6, 4
Tensors = dict[str, Tensor]


@dataclass
class Layout:
    """How one project stores a block drafter: its config.json, its tensors, and what its own forward does with them."""

    config: dict[str, Any]
    read: list[int]  # the backbone's layers, counted as transformers' `hidden_states`
    layers: int = 2
    tokens: int = 4  # of a block
    shifted: bool = False
    causal: bool = False
    window: int | None = None
    parts: frozenset[str] = frozenset()  # what the file has besides the layers
    scales: tuple[float, float, float] = (1.0, 1.0, 0.0)  # of embeddings and logits, and the logits' cap
    inner: dict[str, Any] = field(default_factory=dict)  # of `dflash_config`

    @property
    def first(self) -> int:
        """The first token of a block that guesses."""
        return 0 if self.shifted else 1

    def tensors(self, seed: int = 0) -> Tensors:
        """Random tensors under the project's names."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        out = {"fc.weight": random(H, len(self.read) * H)}
        out |= {name: 1 + random(H) for name in ("hidden_norm.weight", "norm.weight")}
        for index in range(self.layers):
            at = f"layers.{index}."
            for part, rows in (("q", A), ("k", G), ("v", G)):
                out[f"{at}self_attn.{part}_proj.weight"] = random(rows * D, H) * 2
            out |= {f"{at}self_attn.{part}_norm.weight": 1 + random(D) for part in "qk"}
            out[f"{at}self_attn.o_proj.weight"] = random(H, A * D)
            out |= {f"{at}mlp.{part}_proj.weight": random(WIDTH, H) for part in ("gate", "up")}
            out[f"{at}mlp.down_proj.weight"] = random(H, WIDTH)
            out |= {f"{at}{place}_layernorm.weight": 1 + random(H) for place in ("input", "post_attention")}
            for place in ("attention", "mlp") if "conv" in self.parts else ():
                out[f"{at}{place}_conv.base_kernel"] = random(2, 2, H) * 3
                out[f"{at}{place}_conv.kernel_projection.weight"] = random(4 * H // GROUP, H)
        rows = N if "vocabulary" in self.parts else VOCAB
        if "markov" in self.parts:
            out["markov_head.markov_w1.weight"] = random(VOCAB, RANK) * 3
            out["markov_head.markov_w2.weight"] = random(rows, RANK) * 3
            size = H if "states alone" in self.parts else H + RANK
            out["confidence_head.proj.weight"], out["confidence_head.proj.bias"] = random(1, size), random(1)
        if "pairwise" in self.parts:
            out |= {f"candidate_selector.{part}_codebook": random(VOCAB, RANK) for part in ("predecessor", "successor")}
            out["candidate_selector.hidden_projection.weight"] = random(RANK, H) * 3
        if "embed" in self.parts:
            out["embed_tokens.weight"] = random(VOCAB, H)
        if "lm_head" in self.parts:
            out["lm_head.weight"] = random(rows, H)
        if "vocabulary" in self.parts:
            ids = torch.randperm(VOCAB, generator=generator)[:N].sort().values
            out["d2t"] = ids - torch.arange(N)
            out["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        return out

    def write(self, folder: Path, tensors: Tensors) -> Path:
        folder.mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        content = self.config | ({"dflash_config": self.inner} if self.inner else {})
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return folder


QWEN = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": A,
    "num_key_value_heads": G,
    "head_dim": D,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}
SLIDING = {"layer_types": 2 * ["sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
Z_LAB = QWEN | {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS, "block_size": 4}
NAMED = {"target_layer_ids": [0, 3, 4], "mask_token_id": MASK}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 16}
DSPARK = QWEN | NAMED | {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "layer_types": 2 * ["full_attention"]}
DSPARK |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True, "num_anchors": 1}
DSPARK |= {"confidence_head_with_markov": True}
SPECULATORS = {
    "transformer_layer_config": QWEN,
    "block_size": 4,
    "mask_token_id": MASK,
    "aux_hidden_state_layer_ids": [1, 3],
    "draft_vocab_size": N,
    "speculators_config": {"verifier": {"name_or_path": "org/model"}},
}
LAYOUTS = {
    "z-lab": Layout(Z_LAB, [1, 4, 5], inner=NAMED),
    "z-lab, default layers": Layout(Z_LAB | {"mask_token_id": MASK}, [2, 3]),
    "z-lab, one layer": Layout(Z_LAB | {"mask_token_id": MASK, "num_hidden_layers": 1}, [3], layers=1),
    "z-lab, windows": Layout(Z_LAB | SLIDING, [1, 4, 5], causal=True, window=6, inner=NAMED),
    "z-lab, windows both ways": Layout(
        Z_LAB | SLIDING | {"is_causal": False, "sliding_window": 3}, [1, 4, 5], window=3, inner=NAMED
    ),
    "z-lab, scales": Layout(
        Z_LAB,
        [1, 4, 5],
        scales=(3.0, 0.5, 2.0),
        inner=NAMED | {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    ),
    "JetSpec": Layout(Z_LAB, [1, 4, 5], causal=True, inner=NAMED | {"causal_head": True}),
    "DSpark": Layout(DSPARK, [1, 4, 5], shifted=True, parts=frozenset({"markov", "embed", "lm_head"})),
    "DFlash 2": Layout(
        Z_LAB | SLIDING | {"architectures": ["DFlash2DraftModel"], "is_causal": False, "sliding_window": 9},
        [1, 4, 5],
        window=9,
        parts=frozenset({"conv", "pairwise"}),
        inner=NAMED | SELECTOR,
    ),
    "speculators, dflash": Layout(
        SPECULATORS | {"speculators_model_type": "dflash", "sample_from_anchor": False},
        [1, 3],
        parts=frozenset({"vocabulary", "lm_head"}),
    ),
    "speculators, dspark": Layout(
        SPECULATORS | {"speculators_model_type": "dspark", "sample_from_anchor": True, "markov_rank": RANK},
        [1, 3],
        shifted=True,
        parts=frozenset({"markov", "states alone", "vocabulary", "lm_head"}),
    ),
}
MODEL = {"num_hidden_layers": LAYERS}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None] * THETA ** -(torch.arange(0, D, 2) / D)
    turned = torch.complex(x[:, : D // 2], x[:, D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def convolved(x: Tensor, tensors: Tensors, name: str, of: Tensor, side: int) -> Tensor:
    """The convolution on one side of a sublayer, whose kernels come from its normed input `of`."""
    base = tensors.get(f"{name}.base_kernel")
    if base is None:
        return x
    kernel = (of @ tensors[f"{name}.kernel_projection.weight"].T).view(len(x), 2, 2, H // GROUP)
    out = []
    for token in range(len(x)):
        earlier = x[token - 1] if token else torch.zeros(H)
        taps = base[side] + kernel[token, side].repeat_interleave(GROUP, dim=-1)
        out.append(taps[0] * x[token] + taps[1] * earlier)
    return torch.stack(out)


def block(layout: Layout, tensors: Tensors, features: Tensor, embedded: Tensor) -> Tensor:
    """Features [p, F H] of a text and the embeddings [n, H] of the block after it -> what the LM head reads [n, H]."""
    c, x, start = norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"]), embedded, len(features)
    positions = torch.arange(start + len(x))
    for index in range(layout.layers):
        at = f"layers.{index}."
        of = norm(x, tensors[f"{at}input_layernorm.weight"])
        inner = convolved(of, tensors, f"{at}attention_conv", of, 0)
        q, k, v = (tensors[f"{at}self_attn.{part}_proj.weight"] for part in "qkv")
        query, both = inner @ q.T, torch.cat([c, inner])
        keys, values, heads = both @ k.T, both @ v.T, []
        for head in range(A):
            own = slice(head * D, head * D + D)
            group = slice(head // (A // G) * D, head // (A // G) * D + D)
            one = rotated(norm(query[:, own], tensors[f"{at}self_attn.q_norm.weight"]), positions[start:])
            all_keys = rotated(norm(keys[:, group], tensors[f"{at}self_attn.k_norm.weight"]), positions)
            apart = positions[start:, None] - positions
            hidden = (apart < 0) & layout.causal
            if layout.window is not None:
                hidden = hidden | (apart.abs() >= layout.window)
            scores = (one @ all_keys.T / D**0.5).masked_fill(hidden, -torch.inf)
            heads.append(scores.softmax(-1) @ values[:, group])
        mixed = torch.cat(heads, dim=-1) @ tensors[f"{at}self_attn.o_proj.weight"].T
        x = x + convolved(mixed, tensors, f"{at}attention_conv", of, 1)
        of = norm(x, tensors[f"{at}post_attention_layernorm.weight"])
        inner = convolved(of, tensors, f"{at}mlp_conv", of, 0)
        gate, up, down = (tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        mixed = (F.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
        x = x + convolved(mixed, tensors, f"{at}mlp_conv", of, 1)
    return norm(x, tensors["norm.weight"])


@functools.cache
def states_of(model: Any, text: tuple[int, ...]) -> tuple[Tensor, ...]:
    """A shared model's hidden states of a text, which many layouts read."""
    found: tuple[Tensor, ...] = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    return found


@torch.no_grad()
def unary(layout: Layout, tensors: Tensors, model: Any, text: list[int]) -> tuple[Tensor, Tensor]:
    """What guesses read, [K, H], and their logits without edges, after a text whose last token is the root."""
    states = states_of(model, tuple(text[:-1]))
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    embedded = table[[text[-1]] + [MASK] * (layout.tokens - 1)] * layout.scales[0]
    x = block(layout, tensors, torch.cat([states[layer][0] for layer in layout.read], dim=-1), embedded)[layout.first :]
    logits = x @ tensors.get("lm_head.weight", model.lm_head.weight).T * layout.scales[1]
    return x, torch.tanh(logits / layout.scales[2]) * layout.scales[2] if layout.scales[2] else logits


def edges(tensors: Tensors, x: Tensor, before: int) -> Tensor | float:
    """What the token before a guess, which reads x [H], adds to its logits."""
    if "markov_head.markov_w1.weight" in tensors:
        return tensors["markov_head.markov_w2.weight"] @ tensors["markov_head.markov_w1.weight"][before]
    if (codes := tensors.get("candidate_selector.predecessor_codebook")) is not None:
        project = tensors["candidate_selector.hidden_projection.weight"]
        return tensors["candidate_selector.successor_codebook"] @ (codes[before] * (project @ x))
    return 0.0


def confidence(tensors: Tensors, x: Tensor, before: int) -> float:
    """The probability that a guess, which reads x [H], is accepted after the token before it."""
    code, weight = tensors["markov_head.markov_w1.weight"][before], tensors["confidence_head.proj.weight"][0].tolist()
    read = x.tolist() + (code.tolist() if len(weight) > H else [])
    logit = sum(w * value for w, value in zip(weight, read, strict=True)) + float(tensors["confidence_head.proj.bias"])
    return 1 / (1 + math.exp(-logit))


def walk(layout: Layout, tensors: Tensors, model: Any, text: list[int]) -> list[int]:
    """The greedy guesses after a text: each is the best after the one before it."""
    (x, logits), before, out = unary(layout, tensors, model, text), text[-1], []
    for at, scores in zip(x, logits, strict=True):
        changed = scores + edges(tensors, at, before)
        if "pairwise" in layout.parts:  # only the best 16 without edges are candidates
            changed = changed.masked_fill(scores < scores.topk(16).values[-1], -torch.inf)
        before = int(changed.argmax())
        if "d2t" in tensors:
            before += int(tensors["d2t"][before])
        out.append(before)
    return out
