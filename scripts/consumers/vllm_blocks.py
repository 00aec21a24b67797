"""Draft with a block drafter in vLLM's own classes, for by_vllm.py.

vLLM's engine refuses DSpark and DFlash 2 without Triton, whose packages run on no CPU ("Model Runner V2 requires
Triton"). So vLLM's code reads the folder, loads the weights, and computes features and keys of the text, the layers,
convolutions and edges. Attention is PyTorch's, because vLLM's needs the cache of an engine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from vllm.config import SpeculativeConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from walk import step_lengths

CANDIDATES = 16  # of each head, as in trees of that size here; `dspark_draft_topk` in vLLM


class Attention(torch.nn.Module):
    """Bidirectional attention of n tokens of a block over themselves and the first `seen` tokens of the text.

    `layer` is the layer's attention. The class stores keys and values of the text here, as in an engine's cache."""

    kv_cache = None

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.heads, self.seen = layer.num_heads, 0
        self.shape = -1, layer.num_kv_heads, layer.head_dim
        self.key = self.value = torch.empty(0)

    @property
    def impl(self) -> Attention:
        return self

    def do_kv_cache_update(self, layer: object, key: Tensor, value: Tensor, cache: object, slots: object) -> None:
        self.key, self.value = key, value  # [T, G, D]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [query.view(-1, self.heads, self.shape[-1])]
        parts += [torch.cat([self.key[: self.seen], key.view(self.shape)])]
        parts += [torch.cat([self.value[: self.seen], value.view(self.shape)])]
        found = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts), enable_gqa=True)
        return found.transpose(0, 1).flatten(1)


class Drafter:
    """A drafter in vLLM's classes, and the backbone in transformers that it drafts for."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.backbone = AutoModelForCausalLM.from_pretrained(job["backbone"], dtype=torch.float32)
        made_of = {"model": job["backbone"], "dtype": "float32", "enforce_eager": True, "max_model_len": 512}
        config: Any = EngineArgs(**made_of).create_engine_config()
        asked = {"method": job["method"], "model": job["export"], "num_speculative_tokens": job["guesses"]}
        target = {"target_model_config": config.model_config, "target_parallel_config": config.parallel_config}
        config.speculative_config = SpeculativeConfig(**asked, **target)  # an engine's config would be refused
        about = config.speculative_config.draft_model_config
        self.count, self.layers = job["guesses"], get_eagle3_aux_layers_from_config(config.speculative_config)
        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
            init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            self.model: Any = initialize_model(config, model_config=about)
            shared = {
                "embed_tokens.weight": self.backbone.get_input_embeddings().weight.detach(),
                "lm_head.weight": self.backbone.get_output_embeddings().weight.detach(),
            }
            stored = load_file(Path(job["export"]) / "model.safetensors")
            self.model.load_weights((shared | stored).items())
            process_weights_after_loading(self.model, about, torch.device("cpu"))
        assert not any(self.model.get_draft_attn_causal()), "only bidirectional blocks are drafted here"
        inner = self.model.model
        for layer in inner.layers:
            layer.self_attn.attn = Attention(layer.self_attn)
        inner._attn_layers = [layer.self_attn.attn for layer in inner.layers]
        self.is_shifted = job["method"] == "dspark" and about.hf_config.sample_from_anchor

    def read(self, ids: list[int]) -> None:
        """Compute keys and values of a text."""
        states = self.backbone(torch.tensor([ids]), output_hidden_states=True).hidden_states
        joined = self.model.combine_hidden_states(torch.cat([states[layer][0] for layer in self.layers], dim=-1))
        places = torch.arange(len(ids))
        self.model.precompute_and_store_context_kv(joined, places, places)

    def guessed(self, root: int, place: int) -> list[int]:
        """Guess the tokens after a root at a place of the text."""
        inner, size = self.model.model, self.count + (not self.is_shifted)
        for attention in inner._attn_layers:
            attention.seen = place
        block = torch.tensor([root] + [inner.mask_token_id] * (size - 1))
        x = self.model(block, torch.arange(place, place + size))[-self.count :]
        return self.by_markov(x, root) if hasattr(inner, "markov_head") else self.by_pairs(x, root)

    def by_markov(self, x: Tensor, root: int) -> list[int]:
        """Walk over DSpark's edges: the first guess is the best of all tokens, as here."""
        model, logits = self.model, self.model.compute_draft_logits(x)
        best, tokens = logits.topk(CANDIDATES), [root]
        for step in range(self.count):
            code = model.markov_embed(torch.tensor(tokens[-1:]))
            found = logits[:1] + model.markov_bias(code)
            if step:
                rest = torch.full_like(logits[:1], -torch.inf)
                part = slice(step, step + 1)
                found = model.apply_markov_bias_gathered(code, rest, best.values[part], best.indices[part])
            tokens.append(int(model.map_draft_to_target(found.argmax(-1))))
        return tokens[1:]

    def by_pairs(self, x: Tensor, root: int) -> list[int]:
        """Walk over DFlash 2's edges."""
        ids, values = self.model.compute_candidates(x)
        edges = self.model.model.candidate_selector(ids[None], values[None], x[None], torch.tensor([root]))[0]
        tokens, place = [], 0  # all rows of the first step are the root's
        for step in range(self.count):
            place = int(edges[step, place].argmax())
            tokens.append(int(ids[step, place]))
        return tokens


@torch.inference_mode()
def steps_of(job: dict[str, Any]) -> list[list[int]]:
    """Count the tokens of each step through the texts of a job of check_consumers.py."""
    drafter, steps = Drafter(job), []
    for row in job["prompts"]:
        ids, start = row["input_ids"] + row["new_ids"], len(row["input_ids"])
        drafter.read(ids)
        steps.append(step_lengths(ids, start, lambda place, ids=ids: drafter.guessed(ids[place], place)))
    return steps
