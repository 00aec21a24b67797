"""Train a tiny model from scratch together with its layer for multi-token prediction (MTP), as DeepSeek-V3 was trained.

    python scripts/make_mtp_model.py --data train.txt --tokenizer stories260K --output mtp --family deepseek_v3

The layer predicts the token after the next one, and its loss counts 0.3 times (arXiv 2412.19437, section 2.2). The
training loop is plain PyTorch, and the layer runs by transformers' `MtpModel.forward_layer`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count as numbers
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from backbone_training import cut_rows, encode
from medusa.arguments import parse
from medusa.errors import RequestError
from medusa.files import require_absent
from medusa.loading import load_tokenizer
from medusa.options import REQUIRED, Options, count, option
from script_tools import read_documents, run_script, script_parser
from tiny_models import save_with_mtp

SHARE = 0.3  # weight of the MTP layer's loss
LEARNING_RATE, WARM_UP, ROW = 4e-3, 30, 128  # of AdamW, its warm-up in steps, and the tokens of a row
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "num_mtp_layers": 1,
    # The layers of the model have an MLP, and the MTP layer has experts.
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "deepseek_v3": LATENT | {"num_key_value_heads": 8},
    "glm4_moe": {"num_key_value_heads": 4, "head_dim": 8, "use_qk_norm": True},
}


class MtpModelOptions(Options):
    """Options of make_mtp_model.py."""

    data: str = option(REQUIRED, "train on a file, a folder or a Hub dataset id", metavar="TEXT")
    tokenizer: str = option(REQUIRED, "use the tokenizer of this model", metavar="FOLDER")
    output: Path = option(REQUIRED, "write the model into this folder", metavar="FOLDER", type=Path)
    family: str = option("deepseek_v3", "type of the model", choices=FAMILIES)
    minutes: float = option(4.0, "train for N minutes of CPU time", "above 0", lambda value: value > 0, "N")
    batch_size: int = count(16, f"rows of {ROW} tokens in a batch")


def losses(model: PreTrainedModel, layers: MtpModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean losses of the model and of its MTP layer, in nats a token, on rows of tokens `ids` [B, T]."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    positions = torch.arange(1, ids.shape[1], device=ids.device).expand(len(ids), -1)
    cache = MtpCache(config=model.config.get_mtp_config())
    ahead = layers.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=ids[:, 1:])
    head = model.get_output_embeddings()
    return (
        F.cross_entropy(head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()),
        F.cross_entropy(head(ahead[:, :-1]).flatten(0, 1), ids[:, 2:].flatten()),
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(MtpModelOptions, script_parser(__doc__), argv)
    require_absent(options.output / "model.safetensors", overwrite=False)
    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer is None:
        raise RequestError(f"{options.tokenizer} has no tokenizer; give the folder of a model that has one")
    rows = cut_rows(encode(tokenizer, read_documents(options.data)), ROW).datasets["input_ids"].long()
    torch.manual_seed(0)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = SIZES | FAMILIES[options.family] | special | {"vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.family, **sizes))
    layers = MtpModel(model, 1)
    for matrix in (parameter for parameter in layers.layers.parameters() if parameter.ndim > 1):
        torch.nn.init.normal_(matrix, std=0.02)  # transformers leaves the experts as they are
    parameters = [*model.parameters(), *layers.layers.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    begin = time.process_time()
    for step in numbers():
        done = (time.process_time() - begin) / (60 * options.minutes)
        if done >= 1:
            break
        rate = LEARNING_RATE * min(1, (step + 1) / WARM_UP) * min(1, 2 * (1 - done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        own, ahead = losses(model, layers, rows[torch.randint(len(rows), (options.batch_size,))])
        optimizer.zero_grad()
        (own + SHARE * ahead).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {own.item():.3f} nats a token, MTP layer {ahead.item():.3f}", flush=True)
    save_with_mtp(model, layers.layers, options.output)
    tokenizer.save_pretrained(options.output)
    print(f"{step} steps; {sum(p.numel() for p in parameters):,} parameters in {options.output}")


if __name__ == "__main__":
    run_script(main)
