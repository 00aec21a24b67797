"""Tokenizers with the chat templates of current model families, and conversations, for tests and for docs/data.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<|end|>"]

_READ = yaml.safe_load(Path(__file__).with_name("chat_templates.yaml").read_text(encoding="utf-8"))


def _template(text: str) -> str:
    """Join the lines of a template in chat_templates.yaml, and put its fragments in."""
    return re.sub(r"@(\w+)@", lambda found: _template(_READ["fragments"][found[1]]), text.replace("\n", ""))


TEMPLATES: dict[str, str] = {name: _template(text) for name, text in _READ["templates"].items()}
SPECIAL_TOKENS: list[str] = _READ["special tokens"].split()
CONVERSATIONS: dict[str, dict[str, Any]] = _READ["conversations"]
"""Six conversations as records, which are read for each template."""
TOOLS: list[dict[str, Any]] = CONVERSATIONS["tool"]["tools"]
CALL: dict[str, Any] = CONVERSATIONS["tool"]["messages"][1]["tool_calls"][0]


def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and all special tokens, with the chat template of a family."""
    tokenizer = byte_tokenizer(TEMPLATES[family])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS}, replace_extra_special_tokens=False)
    return tokenizer


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and special tokens, so that no token crosses a boundary of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return wrapped(inner, template)


def wrapped(inner: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer
