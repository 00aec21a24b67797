"""Tiny random models, trees and drafters that the tests share, and slow, obvious versions to compare with."""

from __future__ import annotations

import random
import string
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from decode.clock import Clock
from decode.draft import Draft, Frontier
from decode.front import unpadded
from decode.loop import Session, Step
from decode.request import prepare, resolve_acceptance
from decode.verify import Verifier
from medusa import MedusaConfig, MedusaHeads, Tree
from medusa.backbone import Backbone

VOCAB = 61
LETTERS = (string.ascii_letters + string.digits)[:VOCAB]
HIDDEN = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Wide weights: at the usual 0.02 a random model says one token for ever, and no test could tell wrong from right.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ALTERNATING = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"layer_types": ALTERNATING, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0},
    "gemma3_text": {"layer_types": ALTERNATING, "sliding_window": 4, "head_dim": 8},
    "gemma2": {
        "layer_types": ALTERNATING,
        "sliding_window": 4,
        "head_dim": 8,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 5.0,
    },
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 5,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "moe_layers": [],
        "no_rope_layers": [1, 0],
    },
    "gpt2": {"n_positions": 128},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
    "gpt_neox": {},
    "cohere": {"logit_scale": 0.5},
    "deepseek_v3": {
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
    },
}


def tiny_model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of `family`, small enough for thousands of forwards."""
    settings = COMMON | FAMILIES.get(family, {}) | overrides
    if family in ("gpt2", "deepseek_v3"):
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if family == "gpt2":
        settings["n_positions"] = settings.pop("max_position_embeddings")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=dtype).eval()
    return model


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
REFUSED: dict[str, dict[str, Any]] = {
    # Models that cannot hold a tree: recurrent or convolutional layers, ALiBi, an own window, encoder-decoder.
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "intermediate_size": 48,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2},
    "falcon": SMALL | {"alibi": True},
    "lfm2": SMALL | {"intermediate_size": 48, "layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": SMALL | {"lru_width": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    "qwen3_next": SMALL
    | {
        "intermediate_size": 48,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0},
}


def refused_model(family: str) -> Any:
    settings = REFUSED[family] | {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    maker = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    return maker.from_config(AutoConfig.for_model(family, **settings)).eval()


def random_ids(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def random_heads(model: PreTrainedModel, num_heads: int = 3, seed: int = 0, **settings: Any) -> MedusaHeads:
    """Untrained heads with guesses of their own: a head that is the identity would repeat the backbone's."""
    backbone = Backbone(model)
    torch.manual_seed(seed)
    config = MedusaConfig(
        hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size, num_heads=num_heads, **settings
    )
    heads = MedusaHeads(config)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.to(backbone.dtype).eval()


def random_tree(nodes: int, seed: int = 0, max_rank: int = 5, max_depth: int = 5) -> Tree:
    """`nodes` nodes besides the root, each hung under a random one; ranks have gaps, as calibrated trees do."""
    rng = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= nodes:
        path = (*rng.choice(paths), rng.randint(0, max_rank))
        if path not in paths and len(path) <= max_depth:
            paths.append(path)
    rng.shuffle(paths)
    return Tree.from_paths([path for path in paths if path])


def left_padded(prompts: list[list[int]], pad: int = 0) -> dict[str, Tensor]:
    """Prompts of different length as transformers wants them: padded on the left, with a mask."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


def plain(model: PreTrainedModel, prompt: list[int], **kwargs: Any) -> list[int]:
    """What `model.generate` writes after one prompt: the text that must not change."""
    kwargs.setdefault("do_sample", False)
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)[0, len(prompt) :].tolist()  # type: ignore[operator]


class ScriptedDrafter:
    """Knows the text to come and is right about as many tokens as its script says, hidden at random places of the tree.

    `script(step)` is the number of tokens to be right about. All other nodes are wrong: they differ from the text
    wherever their parent agrees with it, and siblings differ from each other, so a step's length is known beforehand.
    """

    def __init__(self, tree: Tree, texts: list[list[int]], script: Any, vocab: int = VOCAB, seed: int = 0) -> None:
        self.tree, self.texts, self.script, self.vocab = tree, texts, script, vocab
        self.rng = random.Random(seed)
        self.steps = 0
        self.sequences: Any = None
        self.parent, self.depth = tree.parent.tolist(), tree.depth.tolist()

    def propose(self, frontier: Frontier) -> Draft:
        live = [row for row, reason in enumerate(self.sequences.finish_reason) if reason is None]
        written = [self.sequences.new_ids[row] for row in live]
        assert frontier.root.tolist() == [ids[-1] for ids in written], "the root is the last token written"
        right = self.script(self.steps)
        self.steps += 1
        rows = [self._row(ids[-1], self.texts[row][len(ids) :], right) for row, ids in zip(live, written, strict=True)]
        return Draft(torch.tensor(rows), self.tree)

    def _row(self, root: int, text: list[int], right: int) -> list[int]:
        deep_enough = [node for node, depth in enumerate(self.depth) if depth >= right]
        line = [n for n in self.tree.paths[self.rng.choice(deep_enough)].tolist() if n >= 0][: right + 1]
        tokens = [root]
        for node in range(1, len(self.parent)):
            parent, depth = self.parent[node], self.depth[node]
            truth = text[depth - 1] if depth <= len(text) else None
            if node in line and truth is not None:
                tokens.append(truth)
                continue
            taken = {tokens[other] for other in range(1, node) if self.parent[other] == parent}
            tokens.append(self.rng.choice([t for t in range(self.vocab) if t not in taken and t != truth]))
        return tokens


def decode_with(
    model: PreTrainedModel, drafter: ScriptedDrafter, input_ids: Any, acceptance: str | None = None, **kwargs: Any
) -> tuple[Session, list[Step]]:
    """Run the loop with a drafter of the test's own; returns the finished session and its steps."""
    input_ids = torch.as_tensor(input_ids)
    requests = prepare(model, unpadded(input_ids, kwargs.pop("attention_mask", None)), **kwargs)
    session = Session(model, requests, slack=drafter.tree.num_nodes)
    drafter.sequences = session.sequences
    verifier = Verifier(session.backbone, session.cache, drafter.tree)
    acceptor = resolve_acceptance(acceptance, requests[0].do_sample)
    return session, list(session.run(drafter, verifier, acceptor, Clock()))


@torch.no_grad()
def path_logits(model: PreTrainedModel, prefix: list[int], ids: list[int], tree: Tree) -> Tensor:
    """Logits [N, V] after every node, by one forward per path without cache or mask: the slow and obvious version."""
    rows = []
    for line in tree.paths.tolist():
        text = prefix + [ids[node] for node in line if node >= 0]
        rows.append(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1])
    return torch.stack(rows)
