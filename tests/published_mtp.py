"""MTP layers under the names of Qwen's and MiMo's checkpoints, and the published formula, without transformers' MTP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.helpers import COMMON, tiny_model
from tests.native_models import add_tensors
from tiny_models import MULTIMODAL

PARTS = {  # the norms of the token's embedding and of the feature, the matrix, and the last norm
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "mimo": tuple(f"model.mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
}
MIMO: dict[str, Any] = {
    **{"head_dim": 8, "v_head_dim": 4, "sliding_window": 4, "attention_value_scale": 0.7},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


class PublishedLayer:
    """A random MTP layer of a model: a stock decoder layer between four more tensors."""

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        self.config, self.rotary = copy.deepcopy(decoder.config), decoder.rotary_emb
        self.is_mimo = self.config.model_type == "mimo_v2_flash"
        self.kind = "sliding_attention" if self.is_mimo else "full_attention"
        self.config.layer_types, self.config.mlp_layer_types = [self.kind], ["dense"]
        self.block = type(decoder.layers[0])(self.config, 0).eval()
        size = self.config.hidden_size
        shapes = ((size,), (size,), (size, 2 * size), (size,))
        self.parts = [torch.nn.init.normal_(torch.empty(shape), std=0.3) for shape in shapes]
        for parameter in self.block.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def tensors(self, fused: bool = False) -> dict[str, Tensor]:
        """The tensors by their published names. Unless they are `fused`, experts are stored one by one."""
        names = PARTS["mimo" if self.is_mimo else "qwen"]
        found = {f"{name}.weight": part for name, part in zip(names, self.parts, strict=True)}
        for key, tensor in self.block.state_dict().items():
            name = f"model.mtp.layers.0.{key}" if self.is_mimo else f"mtp.layers.0.{key}"
            name = name.replace("sinks", "attention_sink_bias")
            if self.is_mimo:
                name = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
            if ".experts." not in name or fused:
                found[name] = tensor
                continue
            for number, expert in enumerate(tensor):
                place = name.rpartition(".")[0] + f".{number}"
                if name.endswith("gate_up_proj"):
                    gate, up = expert.clone().chunk(2)
                    found |= {f"{place}.gate_proj.weight": gate.clone(), f"{place}.up_proj.weight": up.clone()}
                else:
                    found[f"{place}.down_proj.weight"] = expert.clone()
        return found

    def features(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The layer's output [1, T, H] for features and embeddings [1, T, H] of the tokens after them."""
        token, feature, matrix, last = self.parts
        x = torch.cat([self._norm(embedded, token), self._norm(hidden, feature)], dim=-1) @ matrix.T
        positions = torch.arange(1, x.shape[1] + 1)[None]
        back = positions[0, :, None] - positions[0]
        seen = (back >= 0) & (back < self.config.sliding_window) if self.is_mimo else back >= 0
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        by_kind = {"layer_type": self.kind} if self.is_mimo else {}
        axes = (3, 1, -1) if hasattr(self.rotary, "mrope_section") else (1, -1)  # transformers 5.17 needs all three
        angles = self.rotary(x, position_ids=positions.expand(axes), **by_kind)
        return self._norm(self.block(x, position_embeddings=angles, attention_mask=mask), last)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of Qwen, whose weights are centred at 0, or of MiMo."""
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled * (weight if self.is_mimo else 1 + weight)


def save_published(family: str, folder: Path, fused: bool = False, sharded: bool = False) -> PublishedLayer:
    """Save a tiny random model with its MTP layer by the published names; a multimodal one as a whole."""
    torch.manual_seed(0)
    if family == "mimo_v2_flash":
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | MIMO)).eval()
    elif family in MULTIMODAL:
        given, counted = MULTIMODAL[family], {"mtp_num_hidden_layers": 1}
        config = AutoConfig.for_model(family, **given | {"text_config": COMMON | given["text_config"] | counted})
        model = AutoModelForImageTextToText.from_config(config).eval()
    else:
        model = tiny_model(family, mtp_num_hidden_layers=1)
    layer = PublishedLayer(model)
    model.save_pretrained(folder)
    add_tensors(folder, layer.tensors(fused), sharded)
    return layer
