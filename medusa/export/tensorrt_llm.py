"""The format of TensorRT-LLM's engine flow: `config.json`, `medusa_lm_head.safetensors` and `medusa_choices.json`."""

from __future__ import annotations

from medusa.export.base import CHOICES, Export, Written, quoted, require_square, write_choices, write_published
from medusa.export.lm_head import with_own_lm_heads

LOST = "greedy decoding only; one tree, given when the engine is built; Llama and Qwen backbones only"
"""The features of this package that TensorRT-LLM does not have."""


def write(export: Export) -> Written:
    """Write `config.json`, `medusa_lm_head.safetensors` and the tree `medusa_choices.json` for TensorRT-LLM.

    Every written head has an LM head. The tree is needed twice: to build the engine and to run it.

    Raises:
        RequestError: the heads are of another kind, or have other blocks, prefix layers or a reduced vocabulary.
    """
    require_square(export.heads.config, "tensorrt-llm")
    heads = with_own_lm_heads(export)
    write_published(export, heads)
    choices = write_choices(export, heads.config)
    place = quoted(export.place)
    return Written(
        serve=f"python examples/medusa/convert_checkpoint.py --model_dir {quoted(export.backbone)} "
        f"--medusa_model_dir {place} --output_dir checkpoint --dtype float16 "
        f"--fixed_num_medusa_heads {heads.config.num_heads} --max_medusa_token_len {len(choices)} && "
        f"trtllm-build --checkpoint_dir checkpoint --output_dir engine --speculative_decoding_mode medusa && "
        f"python examples/run.py --engine_dir engine --tokenizer_dir {quoted(export.backbone)} "
        f'--medusa_choices "$(cat {quoted(export.place / CHOICES)})" --temperature 0.0 --max_output_len 256 '
        '--input_text "Once upon a time"',
        lost=LOST,
        heads=heads,
    )
