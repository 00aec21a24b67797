"""Train a small model from scratch: a backbone for tests and demonstrations, or a draft model for such a backbone.

    python scripts/make_backbone.py --data train.txt --eval eval.txt --output backbone --minutes 100
    python scripts/make_backbone.py --preset draft --data train.txt --eval eval.txt --tokenizer backbone \\
        --teacher backbone --no-save-tokenizer --output draft --minutes 30 \\
        --row-length 512 --batch-size 4 --adamw-lr 0.01 --warmup-steps 100
    python scripts/make_backbone.py --architecture hybrid --data train.txt --output hybrid --cpu-minutes 20
    python scripts/make_backbone.py --evaluate-only backbone --eval eval.txt

The model is a Llama, or a hybrid like Qwen 3.5: of four layers, three are gated delta nets and the last one attends.
Documents are shuffled, laid end to end and cut into rows. Muon trains the matrices of the layers, AdamW the rest. The
learning rate rises during the warm-up, and falls to 2 % in the second half of the training.

Shapes: B rows in a batch, T tokens in a row, V tokens in the vocabulary, K most probable tokens of the teacher.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import BooleanOptionalAction
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from medusa.arguments import parse
from medusa.commands.options import RuntimeOptions
from medusa.cpu import has_fast_bfloat16
from medusa.errors import RequestError
from medusa.files import require_absent
from medusa.loading import load_backbone, load_tokenizer
from medusa.options import LoadOptions, Options, count, group, option, positive, share
from script_tools import read_documents, run_script, script_parser
from text_score import Score, encode, evaluate

SHAPES = {
    "backbone": {"hidden_size": 256, "layers": 6, "heads": 8, "kv_heads": 4, "intermediate_size": 704},
    # Two layers, because each drafted token costs a pass through all layers.
    "draft": {"hidden_size": 80, "layers": 2, "heads": 5, "kv_heads": 5, "intermediate_size": 224},
}
CONFIG_NAMES = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
ARCHITECTURES = {"llama": "llama", "hybrid": "qwen3_5_text"}  # names of transformers
VOCAB_SIZE, TOLD = 4096, 100  # of both presets; steps from one line of progress to the next


class Recipe(Options):
    """Hyperparameters of a training run."""

    row_length: int = count(384, "cut the text into rows of N tokens")
    batch_size: int = count(10, "rows in a batch")
    muon_lr: float = positive(0.02, "learning rate of matrices", "LR")
    adamw_lr: float = positive(3e-3, "learning rate of the rest", "LR")
    warmup_steps: int = option(30, "raise the learning rate over the first N steps", metavar="N")
    teacher_weight: float = share(0.9, "weight of the teacher in the loss", "W")
    teacher_top: int = count(32, "keep the N most probable tokens of the teacher")  # K
    bf16: bool | None = option(None, "bfloat16 autocast (default: if the device is fast)", action=BooleanOptionalAction)
    steps: int | None = count(None, "train for this many steps")
    minutes: float | None = positive(None, "train for M minutes; the schedule follows the clock", "M")
    cpu_minutes: float | None = positive(None, "train for M minutes of CPU time, all threads together", "M")


class BackboneOptions(Options):
    """Options of make_backbone.py. The options that a preset sets are None unless they are given."""

    data: str | None = option(None, "train on a file, a folder or a Hub dataset id (roneneldan/TinyStories)")
    eval: str | None = option(None, "text to evaluate on", metavar="FILE")
    tokenizer: str | None = option(None, "use this tokenizer instead of training one", metavar="FOLDER")
    architecture: str = option("llama", "train a Llama, or a hybrid with recurrent layers", choices=ARCHITECTURES)
    preset: str = option("backbone", "sizes of the model, unless they are given", choices=SHAPES)
    hidden_size: int | None = count(None, "default: backbone 256, draft 80")
    layers: int | None = count(None, "default: backbone 6, draft 2")
    heads: int | None = count(None, "default: backbone 8, draft 5")
    kv_heads: int | None = count(None, "default: backbone 4, draft 5")
    intermediate_size: int | None = count(None, "default: backbone 704, draft 224")
    vocab_size: int | None = count(None, f"default: {VOCAB_SIZE}, or the tokenizer's")
    context: int = count(512, "longest text of the model, in tokens")
    recipe: Recipe = group(Recipe, "training")
    teacher: str | None = option(None, "also train on this model's distribution (same vocabulary)", metavar="FOLDER")
    load: LoadOptions = group(LoadOptions, "loading", only=("device",))
    runtime: RuntimeOptions = group(RuntimeOptions, "runtime")
    output: Path | None = option(None, "write the model here", metavar="FOLDER", type=Path)
    overwrite: bool = option(False, "replace the model in the output folder")
    save_tokenizer: bool = option(True, "write the tokenizer too", action=BooleanOptionalAction)
    evaluate_only: str | None = option(None, "only print the figures of this model on --eval", metavar="FOLDER")

    @property
    def device(self) -> str:
        return self.load.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def autocast(self) -> bool:
        """Whether to train with bfloat16 autocast."""
        is_fast = has_fast_bfloat16 if self.device == "cpu" else torch.cuda.is_bf16_supported
        return is_fast() if self.recipe.bf16 is None else self.recipe.bf16

    @property
    def shape(self) -> dict[str, int]:
        """The sizes of the preset, or those that the user gave instead."""
        return {name: getattr(self, name) or default for name, default in SHAPES[self.preset].items()}

    @property
    def config_sizes(self) -> dict[str, int]:
        """The shape by the names of configs. The heads of recurrent layers have the number and size of the others."""
        shape = self.shape
        sizes = {CONFIG_NAMES.get(name, name): size for name, size in shape.items()}
        sizes["head_dim"] = size = shape["hidden_size"] // shape["heads"]
        if self.architecture == "hybrid":
            sizes |= {"linear_num_key_heads": shape["kv_heads"], "linear_num_value_heads": shape["heads"]}
            sizes |= {"linear_key_head_dim": size, "linear_value_head_dim": size}
        return sizes


def require(allowed: object, message: str) -> None:
    """Raise a RequestError with this message unless `allowed` is true."""
    if not allowed:
        raise RequestError(message)


def check_training(options: BackboneOptions) -> None:
    """Raise RequestError for options that cannot work together in a training run."""
    recipe = options.recipe
    require(options.data and options.output, "a training needs --data and --output")
    budgets = [recipe.steps, recipe.minutes, recipe.cpu_minutes]
    require(budgets.count(None) == 2, "give one of --steps, --minutes and --cpu-minutes: how long to train")
    own_tokens = options.preset == "backbone" and not options.teacher and options.save_tokenizer
    needing = "--preset draft, --teacher and --no-save-tokenizer"
    require(options.tokenizer or own_tokens, f"{needing} need --tokenizer FOLDER: the backbone's")
    size, heads, kv_heads = (options.shape[name] for name in ("hidden_size", "heads", "kv_heads"))
    require(not size % (2 * heads), f"--hidden-size {size} over --heads {heads} must give an even size for each head")
    require(not heads % kv_heads, f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    length, context = recipe.row_length, options.context
    require(2 <= length <= context, f"--row-length is {length}; it must lie between 2 and --context {context}")
    require_absent(options.output / "config.json", options.overwrite)


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


def cut_rows(encoded: Iterable[Tensor], length: int) -> Tensor:
    """Concatenate all documents and cut them into rows [R, T]. The incomplete last row is dropped."""
    stream = torch.cat(list(encoded))
    return stream[: len(stream) // length * length].view(-1, length)


class Teacher:
    """A trained model that gives the K most probable next tokens at each position, with their probabilities.

    They are computed when a row is first used, and stored: 6 K bytes for each token of the data."""

    def __init__(self, model: PreTrainedModel, rows: Tensor, top: int) -> None:
        self.model, self.known = model, torch.zeros(len(rows), dtype=torch.bool)
        self.ids = torch.empty(len(rows), rows.shape[1] - 1, top, dtype=torch.int32)
        self.probabilities = torch.empty(self.ids.shape, dtype=torch.bfloat16)

    def loss(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Compute the mean cross-entropy in nats of logits [B, T-1, V] after `tokens` of the rows with indices `rows`.

        `tokens` is [B, T-1], and the K most probable tokens of the teacher share all of its probability."""
        if not self.known[rows].all():
            with torch.no_grad():
                top = self.model(input_ids=tokens, use_cache=False).logits.float().topk(self.ids.shape[-1])
            self.ids[rows], self.known[rows] = top.indices.int().cpu(), True
            self.probabilities[rows] = top.values.softmax(-1).bfloat16().cpu()
        ids = self.ids[rows].long().to(logits.device)
        weights = self.probabilities[rows].float().to(logits.device)
        return ((logits.logsumexp(-1, keepdim=True) - logits.gather(-1, ids)) * weights).sum(-1).mean()


def optimizers_of(model: PreTrainedModel, recipe: Recipe) -> list[Optimizer]:
    """Make Muon for the matrices of the layers, and AdamW for embeddings and norms."""
    in_layers = {n: p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2}
    rest = [parameter for name, parameter in model.named_parameters() if name not in in_layers]
    return [
        Muon(list(in_layers.values()), lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
        AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def rate_factor(step: int, done: float, warmup_steps: int) -> float:
    """Return the share of the learning rate in a step, from 0, when the share `done` of the training is over."""
    return min(1.0, (step + 1) / max(1, warmup_steps)) * (1.0 - 0.98 * max(0.0, done - 0.5) / 0.5)


def batches(rows: int, size: int) -> Iterator[Tensor]:
    """Yield the indices [B] of the rows of each batch, in another order in each pass; the last batch is dropped."""
    while True:
        yield from torch.randperm(rows)[: rows // size * size].split(size)


def fit(model: PreTrainedModel, rows: Tensor, options: BackboneOptions, teacher: Teacher | None) -> int:
    """Train a model on rows [R, T] until its budget is spent; return the number of steps."""
    recipe, optimizers, step = options.recipe, optimizers_of(model, options.recipe), 0
    clock, minutes = time.monotonic if recipe.minutes else time.process_time, recipe.minutes or recipe.cpu_minutes
    begin = clock()
    parts = [(part, part["lr"]) for each in optimizers for part in each.param_groups]
    for index in batches(len(rows), recipe.batch_size):
        done = step / recipe.steps if recipe.steps else (clock() - begin) / (60 * minutes)
        if done >= 1:
            break
        for part, full in parts:
            part["lr"] = full * rate_factor(step, done, recipe.warmup_steps)
        ids = rows[index].long().to(options.device)
        with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.autocast):
            out = model(input_ids=ids, labels=ids, use_cache=False)
        loss = out.loss
        if teacher is not None:
            taught = teacher.loss(out.logits[:, :-1].float(), index, ids[:, :-1])
            loss = (1 - recipe.teacher_weight) * loss + recipe.teacher_weight * taught
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in optimizers:
            each.step()
        if step % TOLD == 0:
            print(f"step {step}, {done:.0%}: {loss.item():.3f} nats a token", file=sys.stderr, flush=True)
        step += 1
    return step


def train(options: BackboneOptions) -> None:
    """Read the data, train a model, write it in bfloat16, and print its figures."""
    check_training(options)
    recipe, asked = options.recipe, options.vocab_size
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else None
    learning = None
    if options.teacher:
        learning = open_model(options.teacher, "bfloat16" if options.autocast else "float32", options.device)
        known, most = learning.config.vocab_size, learning.config.max_position_embeddings
        fits = known == len(tokenizer or ()) and recipe.row_length <= most
        require(fits, f"--teacher {options.teacher} has {known} tokens and reads {most} at once; give another teacher")
    if options.eval:
        read_documents(options.eval)  # refused before the training if it cannot be read
    documents = read_documents(options.data)
    random.Random(options.runtime.seed).shuffle(documents)
    if tokenizer is None:  # byte-level BPE like the shipped tokenizer, whose only special token is BOS, EOS and PAD
        tokenizer = load_tokenizer("demo").train_new_from_iterator(documents, asked or VOCAB_SIZE, show_progress=False)
        tokenizer.model_max_length = options.context
    tokens = len(tokenizer)
    require(asked in (None, tokens), f"--vocab-size is {asked}; the tokenizer has {tokens} tokens")
    rows = cut_rows(encode(tokenizer, documents), recipe.row_length)
    enough = len(rows) >= recipe.batch_size
    require(enough, f"the text fills {len(rows)} rows; give a smaller --batch-size or --row-length")
    sizes = options.config_sizes | {"vocab_size": tokens, "max_position_embeddings": options.context}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    kind = ARCHITECTURES[options.architecture]
    config = AutoConfig.for_model(kind, **sizes, **special, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).to(options.device)
    teacher = None if learning is None else Teacher(learning, rows, recipe.teacher_top)
    steps = fit(model, rows, options, teacher)
    model.to(torch.bfloat16).save_pretrained(options.output)
    if options.save_tokenizer:
        tokenizer.save_pretrained(options.output)
    print(f"{steps} steps; {model.num_parameters():,} parameters in {options.output}")
    if options.eval:
        print(score_of(options, str(options.output), tokenizer))


def score_of(options: BackboneOptions, folder: str, tokenizer: PreTrainedTokenizerBase) -> Score:
    """Evaluate the model in `folder` on the text of `--eval`, in float32, since bfloat16 differs between devices."""
    model = open_model(folder, "float32", options.device)
    teacher = open_model(options.teacher, "float32", options.device) if options.teacher else None
    known = min(each.config.vocab_size for each in (model, teacher or model))
    require(len(tokenizer) <= known, f"the tokenizer has {len(tokenizer)} tokens, and a model only {known}")
    return evaluate(model, tokenizer, read_documents(options.eval), teacher)


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
