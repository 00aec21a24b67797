"""Train a small Llama from scratch: a backbone for tests and demonstrations, or a draft model for such a backbone.

    python scripts/make_backbone.py --data train.txt --eval eval.txt --output backbone --minutes 100
    python scripts/make_backbone.py --preset draft --data train.txt --eval eval.txt --tokenizer backbone \\
        --teacher backbone --no-save-tokenizer --output draft --minutes 30 \\
        --row-length 512 --batch-size 4 --adamw-lr 0.01 --warmup-steps 100
    python scripts/make_backbone.py --evaluate-only backbone --eval eval.txt
"""

from __future__ import annotations

import hashlib
import random
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from backbone_training import BackboneTrainer, Recipe, Score, Teacher, cut_rows, encode, evaluate
from medusa.arguments import parse
from medusa.commands.options import RuntimeOptions
from medusa.cpu import has_fast_bfloat16
from medusa.errors import RequestError
from medusa.files import read_json, write_json, write_text
from medusa.loading import load_backbone, load_tokenizer
from medusa.options import LoadOptions, Options, count, group, option
from medusa.records.sources import DOCUMENT_SEPARATOR
from script_tools import markdown_table, read_documents, run_script, script_parser
from train.checkpoints import remove_checkpoints, whole_checkpoints

SETTINGS = "training.json"  # in the output folder until the training run is finished
SHAPES = {
    "backbone": {"hidden_size": 256, "layers": 6, "heads": 8, "kv_heads": 4, "intermediate_size": 704},
    # Two layers, because each drafted token costs a pass through all layers.
    "draft": {"hidden_size": 80, "layers": 2, "heads": 5, "kv_heads": 5, "intermediate_size": 224},
}
CONFIG_NAMES = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
VOCAB_SIZE = 4096  # of both presets
CARD = Path(__file__).with_name("backbone_card.md")


class BackboneOptions(Options):
    """Options of make_backbone.py. The options that a preset sets are None unless they are given."""

    data: str | None = option(None, "train on a file, a folder or a Hub dataset id (roneneldan/TinyStories)")
    document_separator: str = option(DOCUMENT_SEPARATOR, "line between two documents", metavar="LINE")
    split: str = option("train", "split of a Hub dataset")
    max_documents: int | None = count(None, "read the first N documents only")
    eval: str | None = option(None, "text to evaluate on", metavar="FILE")
    tokenizer: str | None = option(None, "use this tokenizer instead of training one", metavar="FOLDER")
    preset: str = option("backbone", "sizes of the model, unless they are given", choices=SHAPES)
    hidden_size: int | None = count(None, "default: backbone 256, draft 80")
    layers: int | None = count(None, "default: backbone 6, draft 2")
    heads: int | None = count(None, "default: backbone 8, draft 5")
    kv_heads: int | None = count(None, "default: backbone 4, draft 5")
    intermediate_size: int | None = count(None, "default: backbone 704, draft 224")
    vocab_size: int | None = count(None, f"default: {VOCAB_SIZE}, or the tokenizer's")
    context: int = count(512, "longest text of the model, in tokens")
    steps: int | None = count(None, "train for this many steps")
    minutes: float | None = option(
        None, "train for this long; the schedule follows the clock", "above 0", lambda value: value > 0, type=float
    )
    recipe: Recipe = group(Recipe, "training")
    teacher: str | None = option(None, "also train on this model's distribution (same vocabulary)", metavar="FOLDER")
    bf16: bool | None = option(None, "bfloat16 autocast (default: if the device is fast)", action=BooleanOptionalAction)
    load: LoadOptions = group(LoadOptions, "loading", only=("device",))
    runtime: RuntimeOptions = group(RuntimeOptions, "runtime")
    output: Path | None = option(None, "write the model here", metavar="FOLDER", type=Path)
    overwrite: bool = option(False, "replace the content of the output folder")
    resume: bool = option(False, "continue from the checkpoint in the output folder")
    checkpoint_every: int = count(100, "steps from one checkpoint to the next", "STEPS")
    save_tokenizer: bool = option(True, "write the tokenizer too", action=BooleanOptionalAction)
    data_name: str | None = option(None, "for the model card (default: the name of --data)")
    data_licence: str = option("CDLA-Sharing-1.0", "for the model card")
    evaluate_only: str | None = option(None, "only print the figures of this model on --eval", metavar="FOLDER")

    @property
    def device(self) -> str:
        return self.load.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def autocast(self) -> bool:
        """Whether to train with bfloat16 autocast."""
        is_fast = has_fast_bfloat16 if self.device == "cpu" else torch.cuda.is_bf16_supported
        return is_fast() if self.bf16 is None else self.bf16

    @property
    def shape(self) -> dict[str, int]:
        """The sizes of the preset, or those that the user gave instead."""
        return {name: getattr(self, name) or default for name, default in SHAPES[self.preset].items()}

    @property
    def decisive(self) -> dict[str, object]:
        """The settings that determine the result of a training run, by name."""
        settings = {"data": self.data_name or Path(self.data).name} | self.shape
        settings |= {"context": self.context, "vocab_size": self.vocab_size, "seed": self.runtime.seed}
        return settings | asdict(self.recipe) | ({} if self.teacher else {"teacher_weight": 0.0})


def require(allowed: object, message: str) -> None:
    """Raise a RequestError with this message unless `allowed` is true."""
    if not allowed:
        raise RequestError(message)


def check_training(options: BackboneOptions) -> None:
    """Raise RequestError for options that cannot work together in a training run."""
    require(options.data and options.output, "a training needs --data and --output")
    require(bool(options.steps) != bool(options.minutes), "give --steps or --minutes, not both: how long to train")
    own_tokens = options.preset == "backbone" and not options.teacher and options.save_tokenizer
    needing = "--preset draft, --teacher and --no-save-tokenizer"
    require(options.tokenizer or own_tokens, f"{needing} need --tokenizer FOLDER: the backbone's")
    size, heads, kv_heads = (options.shape[name] for name in ("hidden_size", "heads", "kv_heads"))
    even = not size % heads and not size // heads % 2
    require(even, f"--hidden-size {size} over --heads {heads} must give an even size for each head")
    require(not heads % kv_heads, f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    length, context, folder = options.recipe.row_length, options.context, options.output
    require(2 <= length <= context, f"--row-length is {length}; it must lie between 2 and --context {context}")
    require((folder / SETTINGS).is_file() or not options.resume, f"nothing to resume: {folder} holds no {SETTINGS}")
    number = options.device.partition(":")[2]
    way = f"set CUDA_VISIBLE_DEVICES={number} and give --device cuda"
    require(number in ("", "0"), f"--device is {options.device}, and training uses the first GPU; {way}")
    free = not folder.exists() or options.overwrite or options.resume or not any(folder.iterdir())
    require(free, f"{folder} is not empty; add --overwrite, or --resume to continue a training")


def open_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder; raise RequestError unless it has a BOS token."""
    tokenizer = load_tokenizer(folder) if Path(folder).is_dir() else None
    if tokenizer is None or tokenizer.bos_token_id is None:
        raise RequestError(f"{folder} must be a folder with a tokenizer that has a BOS token")
    return tokenizer


def open_model(folder: str, dtype: str, device: str) -> PreTrainedModel:
    """Load the model of a local folder; raise RequestError if there is no such folder."""
    require(Path(folder).is_dir(), f"no such folder: {folder}")
    return load_backbone(folder, LoadOptions(dtype, device)).model


def open_teacher(options: BackboneOptions, dtype: str, vocabulary: int) -> PreTrainedModel | None:
    """Load the teacher, if any; raise RequestError unless it fits a tokenizer of `vocabulary` tokens and reads rows."""
    if not options.teacher:
        return None
    name, teacher = options.teacher, open_model(options.teacher, dtype, options.device)
    known, most = teacher.config.vocab_size, teacher.config.max_position_embeddings
    fits = known >= vocabulary if options.evaluate_only else known == vocabulary  # a loss compares all tokens
    require(fits, f"--teacher {name} has {known} tokens, the tokenizer {vocabulary}; give another teacher")
    length = 0 if options.evaluate_only else options.recipe.row_length
    require(length <= most, f"--teacher {name} reads {most} tokens; --row-length is {length}; give {most} or less")
    return teacher


def training_arguments(options: BackboneOptions) -> TrainingArguments:
    """Make the Trainer's arguments from the command line."""
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps or 2**31,  # or the time budget ends the training
        per_device_train_batch_size=options.recipe.batch_size,
        bf16=options.autocast,
        use_cpu=options.device == "cpu",
        seed=options.runtime.seed,
        save_steps=options.checkpoint_every,
        save_total_limit=1,
        logging_steps=min(100, options.steps or 100),
        dataloader_drop_last=True,
        dataloader_pin_memory=options.device != "cpu",
        remove_unused_columns=False,
        restore_callback_states_from_checkpoint=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # DataParallel would copy the model but not the teacher
    return arguments


def find_checkpoint(options: BackboneOptions, settings: dict[str, object]) -> Path | None:
    """Return the checkpoint to resume, or prepare the folder of a new run; RequestError if the settings changed."""
    place = options.output / SETTINGS
    if options.resume:
        begun = read_json(place)
        changed = ", ".join(name for name in settings if settings[name] != begun.get(name))
        require(not changed, f"{options.output} holds a training run with other settings: {changed}")
        return next(reversed(whole_checkpoints(options.output, SAFE_WEIGHTS_NAME)), None)
    remove_checkpoints(options.output)
    write_json(place, settings)
    return None


def train(options: BackboneOptions) -> None:
    """Read the data, train a model, and write it with its card."""
    check_training(options)
    recipe, separator, asked = options.recipe, options.document_separator, options.vocab_size
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else None
    dtype = "bfloat16" if options.autocast else "float32"
    teacher = open_teacher(options, dtype, len(tokenizer or ()))  # a teacher needs --tokenizer
    if options.eval:
        read_documents(options.eval, separator)  # refused before the training if it cannot be read
    documents = read_documents(options.data, separator, options.max_documents, options.split)
    random.Random(options.runtime.seed).shuffle(documents)
    if tokenizer is None:  # byte-level BPE like the shipped tokenizer, whose only special token is BOS, EOS and PAD
        tokenizer = load_tokenizer("demo").train_new_from_iterator(documents, asked or VOCAB_SIZE, show_progress=False)
        tokenizer.model_max_length = options.context
    tokens = len(tokenizer)
    require(asked in (None, tokens), f"--vocab-size is {asked}; the tokenizer has {tokens} tokens")
    rows = cut_rows(encode(tokenizer, documents), recipe.row_length)
    too_few = f"the text fills {len(rows)} rows of {recipe.row_length} tokens, and a step takes {recipe.batch_size}"
    require(len(rows) >= recipe.batch_size, f"{too_few}; give a smaller --batch-size or --row-length")
    sizes = {CONFIG_NAMES.get(name, name): size for name, size in options.shape.items()}
    sizes |= {"vocab_size": tokens, "max_position_embeddings": options.context}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **special, tie_word_embeddings=True))
    trainer = BackboneTrainer(model, rows, recipe, training_arguments(options), options.minutes)
    if teacher is not None:
        trainer.teacher = Teacher(teacher, len(rows), recipe.row_length, recipe.teacher_top)
    digest = hashlib.sha256(rows.datasets["input_ids"].numpy()).hexdigest()
    trainer.train(resume_from_checkpoint=find_checkpoint(options, options.decisive | {"text and tokenizer": digest}))
    facts = options.decisive | {"vocab_size": tokens, "licence of the data": options.data_licence}
    facts |= {"data": f"{facts['data']}: {len(documents):,} documents", "steps": trainer.state.global_step}
    write_model(options, model, tokenizer, facts | {"bf16 autocast": options.autocast})


def write_model(
    options: BackboneOptions, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, facts: dict[str, object]
) -> None:
    """Write the model in bfloat16, and a card with the `facts` about it and its score."""
    model.to(torch.bfloat16).save_pretrained(options.output)
    if options.save_tokenizer:
        tokenizer.save_pretrained(options.output)
    facts |= {name: Path(path).resolve().name for name in ("teacher", "tokenizer") if (path := getattr(options, name))}
    if options.eval:
        score = score_of(options, str(options.output), tokenizer)
        facts[f"on {Path(options.eval).name}"] = f"{score}; whole documents, with BOS at the start of each"
        print(score)
    card = {"licence": options.data_licence.lower(), "title": options.output.resolve().name}
    table = markdown_table(["", ""], ((name.replace("_", " "), value) for name, value in facts.items()))
    content = CARD.read_text(encoding="utf-8").format(parameters=model.num_parameters(), table=table, **card)
    write_text(options.output / "README.md", content)
    remove_checkpoints(options.output)
    (options.output / SETTINGS).unlink()


def score_of(options: BackboneOptions, folder: str, tokenizer: PreTrainedTokenizerBase) -> Score:
    """Evaluate the model in `folder` on the text of `--eval`, in float32, since bfloat16 differs between devices."""
    model = open_model(folder, "float32", options.device)
    tokens, known = len(tokenizer), model.config.vocab_size
    require(tokens <= known, f"the tokenizer has {tokens} tokens, and {folder} a vocabulary of {known}")
    teacher = open_teacher(options, "float32", tokens)
    return evaluate(model, tokenizer, read_documents(options.eval, options.document_separator), teacher)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(BackboneOptions, script_parser(__doc__), argv)
    options.runtime.prepare()
    if options.evaluate_only:
        require(options.eval, "--evaluate-only needs --eval FILE")
        print(score_of(options, options.evaluate_only, open_tokenizer(options.tokenizer or options.evaluate_only)))
    else:
        train(options)


if __name__ == "__main__":
    run_script(main)
