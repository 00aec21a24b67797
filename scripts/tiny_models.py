"""Tiny models of many architectures, heads with random weights, and a tokenizer; for two scripts and the tests."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast

from medusa import MedusaConfig, MedusaHeads
from medusa.backbone import Backbone
from medusa.loading import auto_class

TABLE = yaml.safe_load(Path(__file__).with_name("architectures.yaml").read_text(encoding="utf-8"))
COMMON: dict[str, Any] = TABLE["common"]


def _there(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows whose model types the installed transformers has."""
    return {name: row for name, row in rows.items() if name.split(",")[0] in CONFIG_MAPPING}


SUPPORTED: dict[str, dict[str, Any]] = TABLE["supported"]
RECURRENT: dict[str, dict[str, Any]] = _there(TABLE["recurrent"])  # supported, too
MULTIMODAL: dict[str, dict[str, Any]] = _there(TABLE["multimodal"])  # supported, too, for text
REFUSED: dict[str, dict[str, Any]] = _there(TABLE["refused"])
VOCAB: int = COMMON["vocab_size"]
LETTERS = (string.ascii_letters + string.digits)[:VOCAB]


def tiny_model(
    name: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    **overrides: Any,
) -> Any:
    """Make a random model of an architecture; `name` is one of architectures.yaml, `overrides` change it."""
    if name in MULTIMODAL:
        settings = MULTIMODAL[name]
        settings = settings | {"text_config": COMMON | settings.get("text_config", {}) | overrides}
    else:
        settings = COMMON | (SUPPORTED | RECURRENT | REFUSED)[name] | overrides
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.split(",")[0], **settings)
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else auto_class(config)
    model = maker.from_config(config, dtype=dtype, attn_implementation=attn_implementation).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default implementation does not take float64
    return model


def random_heads(model: PreTrainedModel, num_heads: int, std: float, **settings: Any) -> MedusaHeads:
    """Make heads for a model; their weights are normal with mean 0 and standard deviation `std`."""
    backbone = Backbone(model)
    heads = MedusaHeads.from_config(MedusaConfig(backbone.hidden_size, backbone.vocab_size, num_heads, **settings))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return heads.to(backbone.device, backbone.dtype).eval()


def letter_tokenizer(bos: int | None = None, eos: int | None = None, **more: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose token i is the i-th of `LETTERS`, except BOS and EOS: texts can be read off ids."""
    names = dict(enumerate(LETTERS))
    if bos is not None and eos is not None:
        names |= {bos: "<s>", eos: "</s>"}
        more |= {"bos_token": "<s>", "eos_token": "</s>"}
    inner = Tokenizer(models.WordLevel({name: token for token, name in names.items()}, unk_token=LETTERS[0]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **more)
