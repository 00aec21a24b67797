"""Tiny GGUF files, written by the package of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers import VOCAB

if TYPE_CHECKING:
    import numpy as np

MERGES = ["a b", "ab c"]
TOKENS = [*"abcdefghij", "ab", "abc", *(f"<{number}>" for number in range(12, VOCAB))]


def write_gguf(file: Path, model: Any) -> dict[str, np.ndarray]:
    """Write a tiny Qwen2 with some weights in 8 bits, as llama.cpp does; return the weights that the file holds."""
    import gguf  # which only these tests need

    config, writer, held = model.config, gguf.GGUFWriter(file, "qwen2"), {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(5)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values, kind = weight.numpy(), gguf.GGMLQuantizationType.F32
        if ".q_proj.weight" in name or "embed" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(values, kind)
        held[name] = gguf.quants.dequantize(packed, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
