"""Check our exports with the programs that read them, each in a separate environment without this package.

    python scripts/check_exports.py write --heads HEADS --backbone BACKBONE --output exported
    python scripts/check_exports.py vllm exported          in an environment with vllm 0.32, no GPU needed
    python scripts/check_exports.py medusa-llm exported    with medusa-llm (FasterDecoding's, also called medusa)
    python scripts/check_exports.py vllm-eagle3 exported   with vllm, for heads of kind eagle with block gated

`write` exports the heads in every format that supports them, and stores their logits for eight hidden states. The other
commands load the export with the named program and compare its logits. docs/formats.md has the results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EXPECTED = "expected.safetensors"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # for sums in another order; wrong weights differ by about 1


def write(args: argparse.Namespace) -> None:
    """Export the heads in every format that supports them, and store their logits."""
    from medusa.__main__ import main
    from medusa.export.base import read_lm_head
    from medusa.heads.independent import MedusaHeads
    from medusa.heads.inputs import HeadInputs

    heads, lm_head = MedusaHeads.from_pretrained(args.heads), read_lm_head(args.backbone)
    formats = ("vllm", "sglang") if heads.config.kind == "eagle" else ("original-v1", "tgi", "vllm")
    for name in formats:
        command = ["export", "--heads", args.heads, "--backbone", args.backbone, "--to", name, "--quiet", "--overwrite"]
        if status := main([*command, "--output", str(args.output / name)]):
            sys.exit(status)
    hidden = torch.randn(8, heads.config.hidden_size, generator=torch.Generator().manual_seed(0))
    stored = {"hidden": hidden}
    if heads.config.kind != "eagle":
        with torch.no_grad():
            stored["logits"] = heads.float()(HeadInputs(hidden), lambda x: x @ lm_head.float().T).contiguous()
    save_file(stored, args.output / EXPECTED)


def vllm(folder: Path) -> tuple[Tensor, str]:
    """Load the export with vLLM's configuration, model class and loader; return the logits and vLLM's version."""
    import vllm
    from vllm.model_executor.models.medusa import Medusa
    from vllm.transformers_utils.configs.medusa import MedusaConfig

    config = MedusaConfig.from_pretrained(folder / "vllm")
    with vllm_process():
        model = Medusa(vllm_config=vllm_config(config))
        fill_with_nan(model)
        loaded = model.load_weights(load_file(folder / "vllm/model.safetensors").items())
        assert loaded == set(dict(model.named_parameters())), "not every parameter was loaded"
        with torch.no_grad():
            # vLLM's logits processor needs GPU kernels; on one rank it computes this product.
            blocks = model(load_file(folder / EXPECTED)["hidden"])
            logits = [block @ head.weight.T for block, head in zip(blocks, model.lm_heads, strict=True)]
    return torch.stack(logits)[..., : config.vocab_size], f"vllm {vllm.__version__}"


def vllm_eagle3(folder: Path) -> tuple[Tensor | None, str]:
    """Load the export with vLLM's EAGLE-3 class, whose tensors must equal ours; return no logits, and its version."""
    import vllm
    from transformers import AutoConfig
    from vllm.model_executor.models import llama, llama_eagle3

    config = AutoConfig.from_pretrained(folder / "vllm")
    tensors = load_file(folder / "vllm/model.safetensors")
    with vllm_process() as current:
        asked = copy(current)
        asked.speculative_config = vllm_config(config).speculative_config
        asked.speculative_config.parallel_drafting = False
        sizes = {"get_total_num_hidden_layers": lambda: 1, "get_vocab_size": lambda: config.vocab_size}
        asked.model_config = SimpleNamespace(dtype=torch.float32, hf_config=config, is_deepseek_mla=False, **sizes)
        llama.Attention = lambda *args, **kwargs: torch.nn.Identity()  # needs GPU kernels and has no weights
        llama_eagle3.get_draft_quant_config = lambda config: None  # nothing is quantised
        model = llama_eagle3.Eagle3LlamaForCausalLM(vllm_config=asked)
        fill_with_nan(model)
        model.load_weights(tensors.items())
    layer = "model.layers.0."
    expected = {
        f"{layer}self_attn.qkv_proj.weight": [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"],
        f"{layer}mlp.gate_up_proj.weight": ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"],
    }
    for name, parameter in model.named_parameters():
        if parameter.isnan().all():
            assert "embed_tokens" in name or "lm_head" in name, f"{name} was not loaded"  # shared with the target
            continue
        exported = torch.cat([tensors[part] for part in expected.get(name, [name.removeprefix("model.")])])
        assert torch.equal(parameter.data, exported), name
    return None, f"vllm {vllm.__version__}"


def fill_with_nan(model: torch.nn.Module) -> None:
    """Fill all parameters with NaN, so that a parameter which the loader misses is found."""
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))


def vllm_config(config: Any) -> SimpleNamespace:
    """Make the part of a vLLM configuration that vLLM's draft models read."""
    return SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config)))


@contextmanager
def vllm_process() -> Iterator[Any]:
    """Context manager that sets up vLLM's process group, of one process, and yields the configuration in force."""
    from vllm import distributed
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        distributed.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        distributed.initialize_model_parallel(1)
        try:
            yield config
        finally:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()


def medusa_llm(folder: Path) -> tuple[Tensor, str]:
    """Load the export with FasterDecoding's released class; return the logits and both versions."""
    from importlib.metadata import version

    from medusa.model import medusa_model

    # The class also loads the tokenizer, which its old tokenizers library cannot read and this check does not need.
    medusa_model.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: None)
    model = medusa_model.MedusaModel.from_pretrained(str(folder / "original-v1"))
    hidden = load_file(folder / EXPECTED)["hidden"]
    with torch.no_grad():
        logits = torch.stack([head(hidden) for head in model.medusa_head])
    return logits, f"medusa-llm {version('medusa-llm')}, transformers {version('transformers')}"


CONSUMERS = {"vllm": vllm, "vllm-eagle3": vllm_eagle3, "medusa-llm": medusa_llm}


def check(name: str, folder: Path) -> str:
    """Check that the logits of the program `name` equal those that `write` stored; return a line about the result."""
    logits, version = CONSUMERS[name](folder)
    if logits is None:
        return f"{version}: every tensor was loaded"
    expected = load_file(folder / EXPECTED)["logits"]
    torch.testing.assert_close(logits.float(), expected, **TOLERANCE)
    return f"{version}: {len(logits)} heads, largest difference {(logits - expected).abs().max():.1e}"


def main(argv: Sequence[str] | None = None) -> None:
    # Without `usage`, argparse reports a wrong request in one line, as our other scripts do.
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("write", usage=argparse.SUPPRESS)
    for name in ("--heads", "--backbone"):
        first.add_argument(name, required=True)
    first.add_argument("--output", required=True, type=Path)
    for name in CONSUMERS:
        commands.add_parser(name, usage=argparse.SUPPRESS).add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if args.command == "write":
        args.output.mkdir(parents=True, exist_ok=True)
        write(args)
    elif not args.folder.is_dir():
        parser.error(f"no such folder: {args.folder}")
    else:
        print(check(args.command, args.folder))


if __name__ == "__main__":
    main()
