"""Train a small Llama from scratch: a backbone for tests and demonstrations, or a draft model for such a backbone.

    python scripts/make_backbone.py --data train.txt --eval eval.txt --output backbone --minutes 100
    python scripts/make_backbone.py --preset draft --data train.txt --eval eval.txt --tokenizer backbone \\
        --teacher backbone --no-save-tokenizer --output draft --minutes 30 \\
        --row-length 512 --batch-size 4 --adamw-lr 0.01 --warmup-steps 100
    python scripts/make_backbone.py --evaluate-only backbone --eval eval.txt
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, set_seed

from backbone_training import BackboneTrainer, Recipe, Rows, Score, Teacher, encode, evaluate
from decode.bench.machine import has_fast_bfloat16
from medusa.commands.options import RuntimeOptions
from medusa.errors import RequestError
from medusa.files import read_json, write_json, write_text
from medusa.loading import LoadOptions, load_backbone, load_tokenizer
from medusa.records.sources import DOCUMENT_SEPARATOR
from script_tools import markdown_table, positive, read_documents, run_script, script_parser

BYTES = 256  # every byte needs a token in a byte-level vocabulary
SETTINGS = "training.json"  # in the output folder until the training run is finished
SHAPES = {
    "backbone": {"hidden_size": 256, "layers": 6, "heads": 8, "kv_heads": 4, "intermediate_size": 704},
    # Two layers, because each drafted token costs a pass through all layers.
    "draft": {"hidden_size": 80, "layers": 2, "heads": 5, "kv_heads": 5, "intermediate_size": 224},
}
VOCAB_SIZE, CONTEXT = 4096, 512  # of both presets
CARD = Path(__file__).with_name("backbone_card.md")


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all options. An option of the preset is None unless it is given."""
    parser = script_parser(__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--data", help="a file, a folder or a Hub dataset id (roneneldan/TinyStories)")
    data.add_argument("--document-separator", default=DOCUMENT_SEPARATOR, metavar="LINE", help="default: %(default)s")
    data.add_argument("--split", default="train", help="split of a Hub dataset (default: %(default)s)")
    data.add_argument("--max-documents", type=positive, metavar="N", help="read the first N documents only")
    data.add_argument("--eval", metavar="FILE", help="text to evaluate on")
    data.add_argument("--tokenizer", metavar="FOLDER", help="use this tokenizer instead of training one")

    model = parser.add_argument_group("model: a preset, and sizes that differ from it")
    model.add_argument("--preset", choices=SHAPES, default="backbone", help="default: %(default)s")
    for name in SHAPES["backbone"]:
        default = ", ".join(f"{preset} {shape[name]}" for preset, shape in SHAPES.items())
        model.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=f"default: {default}")
    model.add_argument("--vocab-size", type=positive, metavar="N", help=f"default: {VOCAB_SIZE}, or the tokenizer's")
    model.add_argument("--context", type=positive, default=CONTEXT, metavar="N", help="default: %(default)s")

    recipe = parser.add_argument_group("training")
    length = recipe.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, help="train for this many steps")
    length.add_argument("--minutes", type=float, help="train for this long; the schedule follows the clock")
    for name, field in Recipe.__dataclass_fields__.items():
        flag, kind = f"--{name.replace('_', '-')}", float if isinstance(field.default, float) else int
        recipe.add_argument(flag, type=kind, default=field.default, metavar="N", help="default: %(default)s")
    recipe.add_argument("--teacher", metavar="FOLDER", help="also train on this model's distribution (same vocabulary)")
    bf16_help = "bfloat16 autocast (default: if the device is fast at it)"
    recipe.add_argument("--bf16", action=argparse.BooleanOptionalAction, help=bf16_help)
    recipe.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    recipe.add_argument("--threads", type=positive, help="CPU threads (default: PyTorch's choice)")

    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FOLDER", help="write the model here")
    output.add_argument("--overwrite", action="store_true", help="replace the content of the output folder")
    output.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output folder")
    output.add_argument("--checkpoint-every", type=positive, default=100, metavar="STEPS", help="default: %(default)s")
    save_tokenizer = {"action": argparse.BooleanOptionalAction, "default": True, "help": "write the tokenizer too"}
    output.add_argument("--save-tokenizer", **save_tokenizer)
    output.add_argument("--data-name", help="for the model card (default: the name of --data)")
    output.add_argument("--data-licence", default="CDLA-Sharing-1.0", help="for the model card (default: %(default)s)")
    output.add_argument("--evaluate-only", metavar="FOLDER", help="only print the figures of this model on --eval")
    return parser


def require(allowed: object, message: str) -> None:
    """Raise a RequestError with this message unless `allowed` is true."""
    if not allowed:
        raise RequestError(message)


def check_training(args: argparse.Namespace) -> None:
    """Fill in the sizes of the preset; raise RequestError for options that cannot work together."""
    for name, default in SHAPES[args.preset].items():
        setattr(args, name, getattr(args, name) or default)
    require(args.data and args.output, "a training needs --data and --output")
    require(args.steps or args.minutes is not None, "--steps or --minutes is needed: how long to train")
    for name in ("minutes", "batch_size", "muon_lr", "adamw_lr", "teacher_top"):
        value = getattr(args, name)
        require(value is None or value > 0, f"--{name.replace('_', '-')} is {value}; it must be above 0")
    require(0 <= args.teacher_weight <= 1, f"--teacher-weight is {args.teacher_weight}; take a value from 0 to 1")
    own_tokens = args.preset == "backbone" and not args.teacher and args.save_tokenizer
    needing = "--preset draft, --teacher and --no-save-tokenizer"
    require(args.tokenizer or own_tokens, f"{needing} need --tokenizer FOLDER: the backbone's")
    size, heads = args.hidden_size, args.heads
    even = not size % heads and not size // heads % 2
    require(even, f"--hidden-size {size} over --heads {heads} must give an even size for each head")
    require(not heads % args.kv_heads, f"--heads {heads} must be a multiple of --kv-heads {args.kv_heads}")
    vocab_size = args.vocab_size or VOCAB_SIZE
    require(vocab_size > BYTES, f"--vocab-size is {vocab_size}; it must be at least {BYTES + 1}: every byte, and BOS")
    fits = 2 <= args.row_length <= args.context
    require(fits, f"--row-length is {args.row_length}; it must lie between 2 and --context {args.context}")
    begun = (args.output / SETTINGS).is_file()
    require(begun or not args.resume, f"nothing to resume: {args.output} holds no {SETTINGS}")
    free = not args.output.exists() or args.overwrite or args.resume or not any(args.output.iterdir())
    require(free, f"{args.output} is not empty; add --overwrite, or --resume to continue a training")


def open_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder; raise RequestError unless it has a BOS token."""
    tokenizer = load_tokenizer(folder) if Path(folder).is_dir() else None
    if tokenizer is None or tokenizer.bos_token_id is None:
        raise RequestError(f"{folder} must be a folder with a tokenizer that has a BOS token")
    return tokenizer


def open_model(folder: str, load: LoadOptions, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the model of a local folder; raise RequestError if the tokenizer has more tokens than the model."""
    require(Path(folder).is_dir(), f"no such folder: {folder}")
    model = load_backbone(folder, load).model
    tokens, known = len(tokenizer), model.config.vocab_size
    require(tokens <= known, f"the tokenizer has {tokens} tokens, and {folder} a vocabulary of {known}")
    return model


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Make a Llama in float32 with random weights and tied embeddings."""
    set_seed(args.seed)
    sizes = {"num_hidden_layers": args.layers, "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads}
    sizes |= {"hidden_size": args.hidden_size, "intermediate_size": args.intermediate_size}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": args.context}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return LlamaForCausalLM(LlamaConfig(**sizes, **special, tie_word_embeddings=True))


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """Make the Trainer's arguments from the command line."""
    arguments = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps or 2**31,  # or the time budget ends the training
        per_device_train_batch_size=args.batch_size,
        bf16=args.bf16,
        use_cpu=args.device == "cpu",
        seed=args.seed,
        save_steps=args.checkpoint_every,
        save_total_limit=1,
        logging_steps=min(100, args.steps or 100),
        dataloader_drop_last=True,
        dataloader_pin_memory=args.device != "cpu",
        remove_unused_columns=False,
        restore_callback_states_from_checkpoint=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # DataParallel would copy the model but not the teacher
    return arguments


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that determine the result of a training run, by name."""
    names = [*SHAPES[args.preset], "context", "vocab_size", *Recipe.__dataclass_fields__]
    return {"data": args.data_name or Path(args.data).name} | {name: getattr(args, name) for name in names}


def find_checkpoint(args: argparse.Namespace) -> str | None:
    """Return the checkpoint to resume; for a new run, prepare the output folder and return None.

    Raises:
        RequestError: the run to resume was started with other settings."""
    settings, place = settings_of(args), args.output / SETTINGS
    if args.resume:
        begun = read_json(place)
        changed = ", ".join(name for name in settings if settings[name] != begun.get(name))
        require(not changed, f"{args.output} holds a training run with other settings: {changed}")
        return get_last_checkpoint(str(args.output))
    remove_checkpoints(args.output)
    write_json(place, settings)
    return None


def remove_checkpoints(folder: Path) -> None:
    """Delete the Trainer's checkpoints in `folder`."""
    for checkpoint in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(checkpoint)


def train(args: argparse.Namespace) -> None:
    """Read the data, train a model, and write it with its card."""
    if args.eval:
        read_documents(args.eval, args.document_separator)  # refused before the training if it cannot be read
    documents = read_documents(args.data, args.document_separator, args.max_documents, args.split)
    random.Random(args.seed).shuffle(documents)
    if args.tokenizer:
        tokenizer = open_tokenizer(args.tokenizer)
    else:  # byte-level BPE like the shipped tokenizer, whose only special token, id 0, is BOS, EOS and PAD
        size = args.vocab_size or VOCAB_SIZE
        tokenizer = load_tokenizer("demo").train_new_from_iterator(documents, size, show_progress=False)
        tokenizer.model_max_length = args.context
    tokens = len(tokenizer)
    require(args.vocab_size in (None, tokens), f"--vocab-size is {args.vocab_size}; the tokenizer has {tokens} tokens")
    rows = Rows(encode(tokenizer, documents), args.row_length)
    too_few = f"the text fills {len(rows)} rows of {args.row_length} tokens, and a step takes {args.batch_size}"
    require(len(rows) >= args.batch_size, f"{too_few}; give a smaller --batch-size or --row-length")
    model = build_model(args, tokenizer)
    teacher = None
    if args.teacher:
        load = LoadOptions("bfloat16" if args.bf16 else "float32", args.device)
        teacher = Teacher(open_model(args.teacher, load, tokenizer), rows, args.teacher_top)
    recipe = Recipe(**{name: getattr(args, name) for name in Recipe.__dataclass_fields__})
    trainer = BackboneTrainer(model, rows, recipe, training_arguments(args), args.minutes, teacher)
    trainer.train(resume_from_checkpoint=find_checkpoint(args))
    data = f"{settings_of(args)['data']}: {len(documents):,} documents"
    write_model(args, model, tokenizer, {"data": data, "steps": trainer.state.global_step})


def write_model(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: dict[str, object]
) -> None:
    """Write the model in bfloat16, and a card with its settings, its score and the figures of the run in `data`."""
    model.to(torch.bfloat16).save_pretrained(args.output)
    if args.save_tokenizer:
        tokenizer.save_pretrained(args.output)
    facts = settings_of(args) | {"vocab_size": len(tokenizer), "licence of the data": args.data_licence}
    facts |= data | {"bf16 autocast": args.bf16}
    facts |= {name: Path(path).resolve().name for name in ("teacher", "tokenizer") if (path := getattr(args, name))}
    if args.eval:
        score = score_of(args, str(args.output), tokenizer)
        facts[f"on {Path(args.eval).name}"] = f"{score}; whole documents, with BOS at the start of each"
        print(score)
    card = {"licence": args.data_licence.lower(), "title": args.output.resolve().name}
    table = markdown_table(["", ""], ((name.replace("_", " "), value) for name, value in facts.items()))
    content = CARD.read_text(encoding="utf-8").format(parameters=model.num_parameters(), table=table, **card)
    write_text(args.output / "README.md", content)
    remove_checkpoints(args.output)
    (args.output / SETTINGS).unlink()


def score_of(args: argparse.Namespace, folder: str, tokenizer: PreTrainedTokenizerBase) -> Score:
    """Evaluate the model in `folder` on the text of `--eval`, in float32, since bfloat16 differs between devices."""
    load = LoadOptions("float32", args.device)
    teacher = open_model(args.teacher, load, tokenizer) if args.teacher else None
    documents = read_documents(args.eval, args.document_separator)
    return evaluate(open_model(folder, load, tokenizer), tokenizer, documents, teacher)


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    LoadOptions(device=args.device)  # raises RequestError for a device that this machine lacks
    if args.bf16 is None:
        args.bf16 = has_fast_bfloat16() if args.device == "cpu" else torch.cuda.is_bf16_supported()
    RuntimeOptions(threads=args.threads, seed=args.seed).prepare()
    if not args.evaluate_only:
        check_training(args)
        train(args)
        return
    require(args.eval, "--evaluate-only needs --eval FILE")
    print(score_of(args, args.evaluate_only, open_tokenizer(args.tokenizer or args.evaluate_only)))


if __name__ == "__main__":
    run_script(main)
