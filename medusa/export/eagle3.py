"""EAGLE-3's layer for vLLM, SGLang, speculators and llama.cpp: heads of kind `eagle` with `block: gated`.

All of them read the tensors of `medusa.checkpoints.eagle3` and a description of a Llama with few layers. They differ in
the numbers of the layers that `fc` joins (`medusa.checkpoints.eagle_config`), and in the variants that they know."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from medusa.checkpoints.checkpoint import Checkpoint, Tensors
from medusa.checkpoints.eagle3 import to_eagle3
from medusa.checkpoints.eagle_config import IDS, SWITCHES
from medusa.checkpoints.stored import CONFIG, save_tensors
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.export import dflash
from medusa.export.base import Export, Written, quoted, read_lm_head, served_dtype
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
from medusa.heads import class_of
from medusa.heads.eagle_layer import GATED, layer_sizes
from medusa.options import dtype_name

VARIANTS = {  # the variants of a layer (`medusa.heads.eagle_layer.VARIANTS`) that each consumer reads
    "vllm": SWITCHES,
    "sglang": ("fc_norm", "norm_output"),
    "speculators": SWITCHES,
    "llama.cpp": ("norm_before_residual",),
}


@dataclass(frozen=True)
class Layer:
    """A layer that a consumer can load: the heads, the config of their backbone, and the layers that `fc` joins."""

    heads: Checkpoint
    backbone: PretrainedConfig
    features: list[int]  # empty if the layer reads the last hidden state

    @property
    def config(self) -> MedusaConfig:
        return self.heads.config

    def switches(self) -> Json:
        """The keys of `config.json` for the variants of the layer, and for a hidden size of its own."""
        sizes = layer_sizes(self.config)
        found: Json = {name: True for name in SWITCHES if name in sizes["variants"]}
        if sizes["hidden_size"] != self.config.hidden_size:
            found["target_hidden_size"] = self.config.hidden_size
        return found

    def tensors(self) -> Tensors:
        """The tensors of the layer, with the maps of a reduced vocabulary."""
        return to_eagle3(self.heads) | vocabulary_maps(self.heads, self.backbone.vocab_size)


def layer_for(export: Export, name: str) -> Layer:
    """Return the heads as a layer of EAGLE-3 for consumer `name`.

    Raise RequestError if they are no such layer, the consumer does not know one of its variants, or the heads belong to
    a backbone of other sizes."""
    heads, config = export.heads, export.heads.config
    if not config.servable:
        wanted = {"block": GATED, "lm_head": "shared", "prefix_layers": 0, "window": None}
        different = [key for key, value in wanted.items() if getattr(config, key) != value]
        settings = [f"heads.{key}={'null' if wanted[key] is None else wanted[key]}" for key in different]
        raise RequestError(
            f"{name} runs heads of kind eagle only as the layer of EAGLE-3, which these are not; train them with "
            + " ".join(settings)
        )
    if unknown := [variant for variant in layer_sizes(config)["variants"] if variant not in VARIANTS[name]]:
        others = [other for other in VARIANTS if set(layer_sizes(config)["variants"]) <= set(VARIANTS[other])]
        raise RequestError(f"{name} does not read layers with {unknown[0]}; {' or '.join(others) or 'no format'} does")
    return Layer(heads, *backbone_and_features(export))


def require_features(layer: Layer, name: str) -> None:
    """Raise RequestError if the layer reads the last hidden state; consumer `name` needs `fc`."""
    if not layer.features:
        needs = "the hidden states of three layers (fc), and these heads read the last one"
        raise RequestError(f"{name} needs {needs}; train them with heads.feature_layers=usual, or export to vllm")


def write_eagle3(export: Export, name: str, layer: Layer) -> None:
    """Write `layer` for vLLM, SGLang or llama.cpp (`name`), which read it as a Llama model with few layers."""
    config, tensors = layer.config, layer.tensors()
    if config.vocabulary is not None and config.lm_head == "shared":
        rows = read_lm_head(export.backbone, export.load)
        tensors["lm_head.weight"] = rows[layer.heads.tensors["vocabulary"]].to(layer.heads.dtype)
    if name == "sglang":
        later = re.compile(r"(layers\.[1-9]\d*)\.input_layernorm")
        tensors = {later.sub(r"\1.hidden_norm", tensor): value for tensor, value in tensors.items()}
    save_tensors(tensors, export.folder / MODEL_WEIGHTS)
    full = layer.backbone.vocab_size if config.lm_head == "one" else None
    about = describe_layers(layer_sizes(layer.config), layer.backbone) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.vocabulary or full,
        "norm_before_residual": False,
        "eagle_config": {"use_aux_hidden_state": False},
        "torch_dtype": dtype_name(layer.heads.dtype),
        "medusa_num_heads": config.num_heads,
        "base_model_name_or_path": config.base_model_name_or_path,
    }
    if layer.features:  # vLLM reads the first, and SGLang the second, which counts the outputs of layers
        about[IDS] = layer.features
        about["eagle_config"] = {"use_aux_hidden_state": True, IDS: [number - 1 for number in layer.features]}
    if config.lm_head == "one":
        about["medusa_lm_head"] = "one"
    write_json(export.folder / CONFIG, about | layer.switches())


def write_sglang(export: Export) -> Written:
    """Write heads of kind `eagle` or `dflash` for SGLang; raise RequestError for heads that SGLang does not load."""
    if class_of(export.heads.config.kind).form == "dflash":
        return dflash.write_z_lab(export)
    require_eagle(export, "sglang")
    write_eagle3(export, "sglang", layer_for(export, "sglang"))
    steps = export.heads.config.num_heads
    return Written(
        serve=f"python -m sglang.launch_server --model-path {export.served} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {quoted(absolute(export.place))} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk 4 --speculative-num-draft-tokens {4 * steps}",
        lost="no tree of your own: SGLang grows one from --speculative-eagle-topk and --speculative-num-draft-tokens",
        heads=export.heads,
    )


def write_speculators(export: Export) -> Written:
    """Write heads that read several layers, of kind `eagle` or `dflash`, in the format of the speculators library.

    Raise RequestError for other heads: the library gives every layer an `fc`, so it cannot hold heads without one. Its
    loader gives random values to embeddings that the file lacks, and with a `model_type` vLLM would not recognise the
    format."""
    if class_of(export.heads.config.kind).form == "dflash":
        return dflash.write_speculators(export)
    require_eagle(export, "speculators")
    layer = layer_for(export, "speculators")
    require_features(layer, "speculators")
    if layer_sizes(layer.config)["hidden_size"] != layer.config.hidden_size:
        wanted = "layers of the backbone's hidden size"
        raise RequestError(f"speculators needs {wanted}; export to vllm, sglang or llama.cpp")
    layer = replace(layer, heads=with_embeddings(with_lm_head(layer.heads, export), export))
    config = layer.config
    save_tensors(layer.tensors(), export.folder / MODEL_WEIGHTS)
    about: Json = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.vocabulary or layer.backbone.vocab_size,
        "norm_before_residual": False,
        "target_hidden_size": None,
        IDS: layer.features,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(layer.heads.dtype),
        "transformer_layer_config": describe_layers(layer_sizes(layer.config), layer.backbone),
        "speculators_config": speculators_config(export, "eagle3"),
    }
    write_json(export.folder / CONFIG, about | layer.switches())
    return Written(
        serve=f"vllm serve {quoted(absolute(export.place))} --dtype {served_dtype(export)}",
        lost="one chain of best guesses instead of a tree",
        heads=layer.heads,
    )


def write_llama_cpp(export: Export) -> Written:
    """Write heads of kind `eagle` as input of llama.cpp's own converter; raise RequestError for all other heads.

    The converter takes the layers that the config names, in llama.cpp as of llama-cpp-python 0.3.36."""
    require_eagle(export, "llama.cpp")
    layer = layer_for(export, "llama.cpp")
    require_features(layer, "llama.cpp")
    if len(layer.features) != 3:
        ways = "train them with heads.feature_layers=usual, or export to vllm"
        raise RequestError(f"llama.cpp reads three layers of the backbone, not {layer.features}; {ways}")
    if (count := layer_sizes(layer.config)["layers"]) != 1:
        raise RequestError(f"llama.cpp reads one decoder layer, and these heads have {count}; export to vllm or sglang")
    layer = replace(layer, heads=with_lm_head(layer.heads, export))
    write_eagle3(export, "llama.cpp", layer)
    converted = f"{absolute(export.place)}.gguf"
    return Written(
        serve=f"python convert_hf_to_gguf.py {quoted(absolute(export.place))} --target-model-dir "
        f"{quoted(export.backbone)} --outfile {quoted(converted)} && llama-server --model BACKBONE.gguf "
        f"--model-draft {quoted(converted)} --spec-type draft-eagle3",
        lost="one chain of best guesses instead of a tree",
        heads=layer.heads,
        notes=[
            "convert_hf_to_gguf.py is in llama.cpp's repository; BACKBONE.gguf is the backbone, converted by it too"
        ],
    )


def require_eagle(export: Export, name: str) -> None:
    """Raise RequestError if the heads are not of kind `eagle`; consumer `name` has no Medusa heads."""
    if class_of(export.heads.config.kind).form != "eagle":
        raise RequestError(
            f"{name} has no Medusa heads; train kind eagle with "
            f"heads.kind=eagle heads.block={GATED} heads.lm_head=shared, or export to vllm"
        )
