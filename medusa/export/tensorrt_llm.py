"""TensorRT-LLM's engine flow: `config.json` and `medusa_lm_head.safetensors`, with the published names.

Every head needs an LM head of its own, every block a bias. The tree is given when the engine is built and when it runs;
it is written as `medusa_choices.json`: all nodes but the root, 63 at most.
"""

from __future__ import annotations

from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, WEIGHTS, save_tensors
from medusa.config import MedusaConfig
from medusa.export.base import Export, Written, published_config, quoted, require_square
from medusa.export.lm_head import with_own_lm_heads
from medusa.files import write_json
from medusa.tree import Tree
from medusa.tree_files import named_trees

NAME, CHOICES, MAX_CHOICES = "tensorrt-llm", "medusa_choices.json", 63
FALLBACK = "mc_sim_7b_63"
LOST = "greedy decoding only; one tree, given when the engine is built; Llama and Qwen backbones only"


def write(export: Export) -> Written:
    require_square(export.heads.config, NAME)
    heads = with_own_lm_heads(export)
    save_tensors(to_published(heads), export.folder / WEIGHTS)
    write_json(export.folder / CONFIG, published_config(heads.config))
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


def write_choices(export: Export, config: MedusaConfig) -> list[list[int]]:
    """Write the tree saved with the heads, else a published one, cut to the heads and to the engine's limit."""
    tree = Tree.from_paths(config.tree or named_trees()[FALLBACK]).clip(config.num_heads)
    # By depth, so that the first nodes of a tree that is too large are a tree as well.
    paths = sorted((list(path) for path in tree.rank_paths if path), key=lambda path: (len(path), path))[:MAX_CHOICES]
    write_json(export.folder / CHOICES, paths)
    return paths
