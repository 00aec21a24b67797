"""Which models can hold a tree? Tried on a tiny random model of every architecture, or on a model of yours.

python scripts/check_architectures.py                               # the tables of docs/architectures.md
python scripts/check_architectures.py --write docs/architectures.md --json architectures.json
python scripts/check_architectures.py --only llama "phi3, longrope"
python scripts/check_architectures.py --backbone org/model          # the self-test on a model of yours

Exit status 1 where a model did otherwise than it should.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from decode import steps
from decode.tree_check import TreeCheck, check_tree_forward
from medusa import MedusaConfig, MedusaHeads, RequestError, Tree
from medusa.backbone import Backbone, require_tree_support
from medusa.files import write_json, write_text
from medusa.loading import DTYPES, LoadOptions, load_backbone

VOCAB, HIDDEN, WINDOW = 61, 32, 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Wide weights: at the usual 0.02 a random model says one token for ever, and no test could tell wrong from right.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
WINDOWED: dict[str, Any] = {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
}
DEEPSEEK = LATENT | {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16}
GEMMA_3N = WINDOWED | {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "head_dim": 8}
GEMMA_3N |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [6.0] * 4,
    "original_max_position_embeddings": 32,
}

# "model type, variant": what differs from COMMON. Windows are shorter than the prompts, so that they matter.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
    "mistral": {"sliding_window": None},
    "mistral, window": {"sliding_window": WINDOW},
    "ministral3": {"head_dim": 8},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen2, window": WINDOWED | {"use_sliding_window": True, "max_window_layers": 0},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": None},
    "phi3, window": {"sliding_window": WINDOW},
    "phi3, longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "sliding_window": None},
    "phimoe, longrope": EXPERTS
    | {"rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.2}, "sliding_window": None},
    "gemma": {"head_dim": 8},
    "gemma2": WINDOWED | {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": WINDOWED | {"head_dim": 8},
    "gemma3n_text": GEMMA_3N
    | {
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": GEMMA_3N | {"global_head_dim": 8},
    "gpt2": {"num_key_value_heads": 4},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8},
    "gpt_bigcode": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN, "init_std": 0.3},
    "falcon, rope": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "olmo2": {},
    "olmo3": WINDOWED,
    "granite": {"logits_scaling": 8.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2, window": {"sliding_window": WINDOW},
    "cohere": {"logit_scale": 0.5},
    "cohere2": WINDOWED | {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "nemotron": {},
    "exaone4": WINDOWED,
    "llama4_text": {
        "layer_types": [CHUNKED, FULL],
        "attention_chunk_size": 5,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "moe_layers": [],
        "no_rope_layers": [1, 0],
    },
    "gpt_oss": WINDOWED | EXPERTS | {"head_dim": 8},
    "deepseek_v3": DEEPSEEK,
    "minicpm3": LATENT | {"q_lora_rank": 16},
}
REFUSED: dict[str, dict[str, Any]] = {
    "falcon, alibi": {"alibi": True},
    "bloom": {},
    "mpt": {"expansion_ratio": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "mamba": {"state_size": 4},
    "qwen3_next": EXPERTS
    | LINEAR
    | {"head_dim": 8, "layer_types": ["linear_attention", FULL], "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", FULL]},
    "recurrent_gemma": {"lru_width": HIDDEN, "num_hidden_layers": 3},
    "granitemoehybrid": EXPERTS
    | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
    | {"mamba_n_groups": 1, "shared_intermediate_size": 16, "mamba_chunk_size": 8},
    "deepseek_v32": DEEPSEEK | {"q_lora_rank": 16, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8},
    "t5": {"d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": 1, "decoder_start_token_id": 0},
}


def tiny_model(
    name: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    **overrides: Any,
) -> Any:
    """A random model of the architecture `name`, small enough for thousands of forwards."""
    settings = COMMON | (ARCHITECTURES | REFUSED)[name] | overrides
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.split(",")[0], **settings)
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = maker.from_config(config, dtype=dtype, attn_implementation=attn_implementation).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default one knows no float64
    return model


@dataclass
class Row:
    """What was found about one architecture."""

    name: str
    model: str = ""
    checks: dict[str, dict[str, TreeCheck]] = field(default_factory=dict)
    """The self-test by attention implementation and dtype; only those that the model offers."""
    same: bool | None = None
    """Whether greedy text is that of `model.generate`, alone and in a ragged batch; `None` for refused models."""
    tau: float | None = None
    """Tokens a step of that text: above 1, or nothing was tested."""
    refusal: str | None = None
    """Why the model is refused by its structure."""

    @property
    def attention(self) -> list[str]:
        return list(self.checks)

    @property
    def caught(self) -> str:
        """What the self-test alone says of a refused model."""
        check = next((check for by_dtype in self.checks.values() for check in by_dtype.values()), None)
        return "not run" if check is None else check.reason or "nothing"

    @property
    def as_expected(self) -> bool:
        if self.name in REFUSED:
            return self.refusal is not None and self.caught != "nothing"
        checks = [check for by_dtype in self.checks.values() for check in by_dtype.values()]
        return bool(checks) and all(check.ok for check in checks) and bool(self.same) and (self.tau or 0) > 1


# Wide, because random heads guess badly: the next of 61 tokens is among 40 guesses two times in three.
TREE = Tree.top_k([40, 4])
PROMPTS, NEW = (9, 4, 6), 30  # tokens: three rows of a ragged batch; all end far beyond the window
CHECKED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_supported(name: str) -> Row:
    """The self-test for every attention and dtype, and greedy text against `model.generate` in float32."""
    row = Row(name)
    for attention in ("sdpa", "eager"):
        for dtype_name, dtype in CHECKED.items():
            model = offered(name, dtype=dtype, attn_implementation=attention)
            if model is None:
                break
            require_tree_support(model)
            row.checks.setdefault(attention, {})[dtype_name] = check_tree_forward(model)
    model = tiny_model(name)  # with the attention that transformers chooses
    row.model = type(model).__name__
    assert model.config._attn_implementation == row.attention[0], "sdpa where it is offered, eager elsewhere"
    row.same, row.tau = compare_texts(model)
    return row


def check_refused(name: str) -> Row:
    """The reason that users see, and whether the self-test would have found out by itself."""
    model = offered(name, attn_implementation="sdpa") or tiny_model(name)
    row = Row(name, type(model).__name__)
    try:
        require_tree_support(model)
    except RequestError as error:
        row.refusal = str(error).split(": ", 1)[1]
    if not model.config.is_encoder_decoder:  # which has no plain forward to compare with
        row.checks[model.config._attn_implementation] = {"float32": check_tree_forward(model)}
    return row


def offered(name: str, **settings: Any) -> PreTrainedModel | None:
    try:
        return tiny_model(name, **settings)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return None


def compare_texts(model: PreTrainedModel) -> tuple[bool, float]:
    """Whether random heads give the text of `model.generate`, for prompts alone and together; and tokens a step."""
    backbone, random = Backbone(model), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig(backbone.hidden_size, backbone.vocab_size, num_heads=TREE.max_depth)).eval()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    prompts = [torch.randint(VOCAB, (1, length), generator=random) for length in PROMPTS]
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    plain = [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in prompts]  # type: ignore[operator]
    runs = [list(steps(model, heads, ids, tree=TREE, **options)) for ids in prompts]
    same = all(written(run, 0) == text for run, text in zip(runs, plain, strict=True))
    if backbone.rope_boundary is None:  # longrope turns all rows of a batch alike: there, batches are refused
        together = list(steps(model, heads, tree=TREE, **left_padded(prompts), **options))
        same &= all(written(together, row) == text for row, text in enumerate(plain))
    return same, len(PROMPTS) * NEW / sum(map(len, runs))


def written(run: list[Any], row: int) -> list[int]:
    return [token for step in run for token in step.ids.get(row, [])]


def left_padded(prompts: list[Tensor]) -> dict[str, Any]:
    width = max(PROMPTS)
    pads = [width - ids.shape[1] for ids in prompts]
    ids = torch.cat([torch.nn.functional.pad(ids, (pad, 0)) for ids, pad in zip(prompts, pads, strict=True)])
    return {"input_ids": ids, "attention_mask": (torch.arange(width) >= torch.tensor(pads)[:, None]).long()}


def check_all(names: list[str], console: Console) -> list[Row]:
    rows = []
    for name in track(names, "checking", console=console, transient=True):
        rows.append(check_refused(name) if name in REFUSED else check_supported(name))
    return rows


# Tables: the same cells for the terminal and for the page

SUPPORTED_COLUMNS = ["model", "class", "attention", *CHECKED, "control", "greedy text", "tau"]
CLASS = 1  # column
REFUSED_COLUMNS = ["model", "class", "refused because", "the self-test alone"]


def supported_cells(row: Row) -> list[str]:
    by_dtype = [[checks[dtype] for checks in row.checks.values()] for dtype in CHECKED]
    errors = [" / ".join(("" if check.ok else "FAILS ") + short(check.error) for check in some) for some in by_dtype]
    control = min(check.control for some in by_dtype for check in some)
    text = "same" if row.same else "DIFFERS"
    return [row.name, row.model, " / ".join(row.attention), *errors, f"{control:.2f}", text, f"{row.tau:.2f}"]


def refused_cells(row: Row) -> list[str]:
    return [row.name, row.model, row.refusal or "NOT REFUSED", re.split(": | [(]", row.caught)[0]]


def short(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")


def markdown(rows: list[Row]) -> str:
    """Both tables, and what they were made with."""

    def table(columns: list[str], cells: list[list[str]]) -> list[str]:
        lines = [columns, ["---"] * len(columns), *cells]
        return ["| " + " | ".join(line) + " |" for line in lines]

    supported = table(SUPPORTED_COLUMNS, [supported_cells(row) for row in rows if row.name not in REFUSED])
    refused = table(REFUSED_COLUMNS, [refused_cells(row) for row in rows if row.name in REFUSED])
    return "\n".join([f"Run with {versions()}.", "", "### Supported", "", *supported, "", "### Refused", "", *refused])


def versions() -> str:
    return f"transformers {transformers.__version__} and torch {torch.__version__} on a CPU"


BEGIN, END = "<!-- tables: begin (scripts/check_architectures.py --write) -->", "<!-- tables: end -->"


def write_page(path: Path, rows: list[Row]) -> None:
    """Put the tables between the page's markers; the rest of the page is written by hand."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise RequestError(f"{path} lacks the lines {BEGIN!r} and {END!r} between which the tables go")
    write_text(path, f"{before}{BEGIN}\n\n{markdown(rows)}\n\n{END}{after}")


def show(console: Console, title: str, columns: list[str], cells: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        if index != CLASS:  # for the page; a terminal is narrow
            table.add_column(column, no_wrap=index == 0)
    for line in cells:
        table.add_row(*line[:CLASS], *line[CLASS + 1 :])
    if cells:
        console.print(table)


def check_backbone(args: argparse.Namespace, console: Console) -> bool:
    """The self-test on the user's own model."""
    options = LoadOptions(args.dtype, args.device, args.attention, args.revision, args.trust_remote_code)
    model = load_backbone(args.backbone, options).model
    require_tree_support(model)
    check = check_tree_forward(model)
    how = f"{str(model.dtype).removeprefix('torch.')}, {model.config._attn_implementation}"
    console.print(f"{type(model).__name__} ({how}): {'can' if check.ok else 'cannot'} hold a tree")
    console.print(f"error {check.error:.1e}, at most {check.limit:.1e}; control {check.control:.2f}")
    if check.reason:
        console.print(check.reason, markup=False, soft_wrap=True)
    if args.json:
        write_json(args.json, asdict(check))
    return check.ok


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these rows alone")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this Markdown file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same, machine-readable")
    parser.add_argument("--backbone", metavar="MODEL", help="check this model instead: demo, a folder or a Hub id")
    parser.add_argument("--dtype", choices=DTYPES, help="of --backbone (default: float32 on a CPU)")
    parser.add_argument("--device", help="for --backbone (default: a GPU where there is one)")
    parser.add_argument("--attention", choices=["sdpa", "eager"], help="of --backbone (default: sdpa where offered)")
    parser.add_argument("--revision", help="of --backbone, a branch or a commit")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with --backbone")
    args = parser.parse_args(argv)
    console, errors = Console(), Console(stderr=True)
    transformers.logging.set_verbosity_error()
    names = [*ARCHITECTURES, *REFUSED]
    try:
        if args.backbone:
            return 0 if check_backbone(args, console) else 1
        unknown = sorted(set(args.only or []) - set(names))
        if unknown:
            raise RequestError(f"--only {unknown[0]!r} is no row; choose from {', '.join(names)}")
        if args.only and args.write:
            raise RequestError("--write needs all rows; leave --only out")
        rows = check_all(args.only or names, errors)
        if args.write:
            write_page(args.write, rows)
    except RequestError as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    show(console, "supported", SUPPORTED_COLUMNS, [supported_cells(row) for row in rows if row.name not in REFUSED])
    show(console, "refused", REFUSED_COLUMNS, [refused_cells(row) for row in rows if row.name in REFUSED])
    if args.json:
        write_json(args.json, {"versions": versions(), "rows": [asdict(row) for row in rows]})
    wrong = [row.name for row in rows if not row.as_expected]
    if wrong:
        errors.print(f"not as expected: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
