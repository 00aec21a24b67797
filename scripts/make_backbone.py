"""Train a small Llama on a text: a backbone to test and demonstrate with, or a draft model for it.

    python scripts/make_backbone.py --data train.txt --eval eval.txt --output backbone --minutes 100
    python scripts/make_backbone.py --preset draft --data train.txt --eval eval.txt --tokenizer backbone \\
        --teacher backbone --no-save-tokenizer --output draft --minutes 30 \\
        --row-length 512 --batch-size 4 --adamw-lr 0.01 --warmup-steps 100
    python scripts/make_backbone.py --evaluate-only backbone --eval eval.txt

Shapes: B rows a step, T tokens a row, V vocabulary, K tokens kept of a teacher's distribution.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# torch and transformers take seconds to import: the functions that use them import them, so that --help and
# the complaints about bad arguments come at once.
if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SEPARATOR = "<|endoftext|>"
SPECIAL_TOKEN = "<|endoftext|>"
BYTES = 256  # pieces that a byte-level vocabulary cannot do without
CHECKPOINT = "training.pt"
IGNORED = -100
Identity = dict[str, Any]  # settings by name: what must be the same for a training to be resumed


class InputError(Exception):
    """Something the user gave cannot work; the message is one line that says what and what would."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int = 4096
    context: int = 512  # positions the model is declared for

    def check(self) -> None:
        """Raise InputError on sizes that no Llama can have."""
        for name, value in asdict(self).items():
            if value < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise InputError(
                f"--hidden-size {self.hidden_size} over --heads {self.heads} must give an even size for every head"
            )
        if self.heads % self.kv_heads:
            raise InputError(f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}")
        if self.vocab_size <= BYTES:
            raise InputError(f"--vocab-size must be at least {BYTES + 1} (every byte, and BOS), not {self.vocab_size}")


PRESETS = {
    "backbone": Shape(hidden_size=256, layers=6, heads=8, kv_heads=4, intermediate_size=704),
    # Two layers, not more: a draft model is paid once for every token it drafts. The rest goes into the width, which
    # bounds the rank of its output; two thirds of the parameters are the embedding.
    "draft": Shape(hidden_size=80, layers=2, heads=5, kv_heads=5, intermediate_size=224),
}


@dataclass(frozen=True)
class Budget:
    """How long to train: so many steps, or so many seconds of training; exactly one is set."""

    steps: int | None = None
    seconds: float | None = None

    def fraction(self, steps: int, seconds: float) -> float:
        """Part of the budget that is spent, 0 to 1."""
        spent = steps / self.steps if self.steps else seconds / self.seconds if self.seconds else 1.0
        return min(spent, 1.0)


@dataclass(frozen=True)
class Recipe:
    """Everything besides data and shape that decides what the training gives."""

    seed: int = 0
    row_length: int = 384  # tokens
    batch_size: int = 10  # rows a step
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup_steps: int = 30
    teacher_weight: float = 0.9  # share of the loss that comes from the teacher, if there is one
    teacher_top: int = 32  # tokens kept of the teacher's distribution at every position


# ---------------------------------------------------------------------------------------------------------------- data


def split_documents(text: str, separator: str = SEPARATOR) -> list[str]:
    """The documents of a text in which they are separated by a line that is `separator`; empty ones are dropped.

    >>> split_documents("one\\n<|endoftext|>\\ntwo\\nlines\\n")
    ['one', 'two\\nlines']
    """
    parts = re.split(rf"^{re.escape(separator)}[ \t]*$", text, flags=re.MULTILINE)
    return [part.strip() for part in parts if part.strip()]


def is_hub_id(data: str) -> bool:
    """Whether `data` can only be meant as `owner/name` on the Hub, and not as a file that is missing."""
    looks_like_id = re.fullmatch(r"[\w.-]+/[\w.-]+", data) is not None
    return looks_like_id and Path(data).suffix not in (".txt", ".text") and not Path(data).parent.is_dir()


def read_file_documents(path: str, separator: str) -> list[str]:
    """The documents of a local text file."""
    try:
        documents = split_documents(Path(path).read_text(encoding="utf-8"), separator)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not documents:
        raise InputError(f"{path} holds no text")
    return documents


def read_hub_documents(dataset: str, split: str, text_column: str, limit: int | None) -> list[str]:
    """The documents of a data set on the Hub, streamed if only the first `limit` are wanted."""
    from datasets import load_dataset

    try:
        records = islice(load_dataset(dataset, split=split, streaming=limit is not None), limit)
        documents = [record[text_column].strip() for record in records]
    except KeyError as error:
        raise InputError(f"{dataset} has no column {error}: name its text with --text-column") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot load {dataset} [{split}] from the Hub: {str(error).splitlines()[0]}") from error
    documents = [document for document in documents if document]
    if not documents:
        raise InputError(f"{dataset} [{split}] holds no text")
    return documents


def read_documents(args: argparse.Namespace) -> list[str]:
    """The training documents that the command line names."""
    if not Path(args.data).exists() and is_hub_id(args.data):
        return read_hub_documents(args.data, args.split, args.text_column, args.max_documents)
    return read_file_documents(args.data, args.document_separator)[: args.max_documents]


def train_tokenizer(documents: Iterable[str], shape: Shape) -> PreTrainedTokenizerBase:
    """A byte-level BPE of `shape.vocab_size` pieces whose only special token, id 0, begins every document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=shape.vocab_size,
            special_tokens=[SPECIAL_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bos = processors.TemplateProcessing(
        single=f"{SPECIAL_TOKEN} $A",
        pair=f"{SPECIAL_TOKEN} $A {SPECIAL_TOKEN} $B",
        special_tokens=[(SPECIAL_TOKEN, core.token_to_id(SPECIAL_TOKEN))],
    )
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIAL_TOKEN,
        eos_token=SPECIAL_TOKEN,
        pad_token=SPECIAL_TOKEN,
        model_max_length=shape.context,
    )


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"no tokenizer in {folder}: {str(error).splitlines()[0]}") from error
    if tokenizer.bos_token_id is None:
        raise InputError(f"the tokenizer in {folder} has no BOS to begin a document with")
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> Iterator[list[int]]:
    """The token ids of every document, BOS first."""
    bos = tokenizer.bos_token_id
    for start in range(0, len(documents), 1000):
        # verbose=False: documents longer than the context are cut into rows later, no reason to warn
        for ids in tokenizer(documents[start : start + 1000], verbose=False)["input_ids"]:
            yield ids if ids[:1] == [bos] else [bos, *ids]


def pack_rows(encoded: Iterable[list[int]], row_length: int) -> Tensor:
    """Concatenate the documents and cut them into rows [R, T] (int32); the last, incomplete row is dropped."""
    import numpy as np
    import torch

    pieces = [np.asarray(ids, dtype=np.int32) for ids in encoded]
    stream = np.concatenate(pieces)
    rows = len(stream) // row_length
    return torch.from_numpy(stream[: rows * row_length].reshape(rows, row_length).copy())


def row_ids_of_step(step: int, rows: int, recipe: Recipe) -> Tensor:
    """Indices [B] of the rows of a step: every pass goes over all the rows in an order of its own.

    It depends on nothing but its arguments, so a resumed run goes on with the rows that it would have had.
    """
    import torch

    steps_per_pass = rows // recipe.batch_size
    passes, position = divmod(step, steps_per_pass)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + passes)
    order = torch.randperm(rows, generator=generator)
    return order[position * recipe.batch_size : (position + 1) * recipe.batch_size]


# --------------------------------------------------------------------------------------------------------- model, loss


def build_model(shape: Shape, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """A freshly initialised Llama with tied embeddings, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def load_model(folder: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The causal language model in a local folder, frozen."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    except (OSError, ValueError) as error:
        raise InputError(f"no model in {folder}: {str(error).splitlines()[0]}") from error
    return model.to(device).eval().requires_grad_(False)


def make_optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, which is what it is made for; AdamW for embedding and norms."""
    import torch

    parameters = dict(model.named_parameters())
    matrices = [name for name, parameter in parameters.items() if ".layers." in name and parameter.ndim == 2]
    rest = [parameter for name, parameter in parameters.items() if name not in matrices]
    return [
        torch.optim.Muon([parameters[name] for name in matrices], lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def learning_rate_factor(step: int, fraction: float, warmup_steps: int) -> float:
    """What the learning rates are multiplied with: warm-up, constant to half-time, then linear down to 2 %.

    >>> [round(learning_rate_factor(100, fraction, 30), 2) for fraction in (0.1, 0.5, 0.75, 1.0)]
    [1.0, 1.0, 0.51, 0.02]
    """
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    decay = 1.0 - 0.98 * max(0.0, fraction - 0.5) / 0.5
    return warmup * decay


class Teacher:
    """The K likeliest next tokens by a trained model, at every position of a row, with their probabilities.

    A row's are computed when it is first met and kept in memory (6 bytes a token and K: 0.4 GB for two million tokens
    and K = 32), so that every pass after the first costs no forward of the teacher.
    """

    def __init__(self, model: PreTrainedModel, rows: Tensor, top: int) -> None:
        import torch

        self.model = model
        self.rows = rows
        size = (rows.shape[0], rows.shape[1] - 1, top)
        self.ids = torch.empty(size, dtype=torch.int32)
        self.probabilities = torch.empty(size, dtype=torch.bfloat16)
        self.known = torch.zeros(rows.shape[0], dtype=torch.bool)

    def targets(self, row_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and probabilities, both [B, T-1, K]; the K probabilities are scaled to sum to 1."""
        import torch

        missing = row_ids[~self.known[row_ids]]
        if len(missing):
            with torch.inference_mode():
                tokens = self.rows[missing, :-1].long().to(self.model.device)
                top = self.model(input_ids=tokens, use_cache=False).logits.float().topk(self.ids.shape[-1])
            self.ids[missing] = top.indices.int().cpu()
            self.probabilities[missing] = top.values.softmax(-1).bfloat16().cpu()
            self.known[missing] = True
        return self.ids[row_ids].long(), self.probabilities[row_ids].float()


def soft_cross_entropy(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits [..., V] against weights [..., K] on the tokens ids [..., K]."""
    log_normaliser = logits.logsumexp(-1)
    return (log_normaliser * weights.sum(-1) - (logits.gather(-1, ids) * weights).sum(-1)).mean()


def training_loss(
    model: PreTrainedModel, rows: Tensor, row_ids: Tensor, teacher: Teacher | None, recipe: Recipe, bf16: bool
) -> Tensor:
    """Loss of one step in nats a token: against the text, mixed with the teacher's distribution if there is one."""
    import torch

    tokens = rows[row_ids].long()  # [B, T]
    ids, weights = tokens[:, 1:, None], torch.ones(1)
    if teacher is not None and recipe.teacher_weight:
        soft_ids, soft_weights = teacher.targets(row_ids)
        share = recipe.teacher_weight
        ids = torch.cat([ids, soft_ids], dim=-1)
        weights = torch.cat([torch.full_like(soft_weights[..., :1], 1 - share), share * soft_weights], dim=-1)
    device = model.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = model(input_ids=tokens[:, :-1].to(device), use_cache=False).logits
    return soft_cross_entropy(logits.float(), ids.to(device), weights.to(device))


# ---------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Score:
    """Sums over a text (characters without those around a document); the figures that one quotes are properties."""

    nats: float
    tokens: int  # predicted ones: all but BOS
    characters: int
    agreements: int | None = None  # tokens at which the likeliest one is also the reference's

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_character(self) -> float:
        return self.nats / math.log(2) / self.characters

    @property
    def agreement(self) -> float | None:
        return None if self.agreements is None else self.agreements / self.tokens

    def __str__(self) -> str:
        agreement = "" if self.agreement is None else f", {self.agreement:.4f} top-1 agreement with the teacher"
        return (
            f"{self.nats_per_token:.4f} nats a token, {self.bits_per_character:.4f} bits a character"
            f" ({self.tokens} tokens, {self.characters} characters){agreement}"
        )


def windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Cover a document of `length` tokens: (begin, end, first), where tokens first..end-1 are scored in begin..end-1.

    Every token but the first (BOS) is scored once. A document longer than the context is read in windows that
    advance by half of it, so that a token past the first window has at least half a context before it.

    >>> list(windows(5, 8)), list(windows(11, 8))
    ([(0, 5, 1)], [(0, 8, 1), (4, 11, 8)])
    """
    begin, first = 0, 1
    while first < length:
        end = min(begin + context, length)
        yield begin, end, first
        first = end
        begin += max(context // 2, 1)


def window_batches(encoded: Iterable[list[int]], context: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels, both [B, T] and padded on the right, of all windows; IGNORED where nothing is scored."""
    import torch

    pairs = []
    for ids in encoded:
        for begin, end, first in windows(len(ids), context):
            pairs.append((ids[begin:end], [IGNORED] * (first - begin) + ids[first:end]))
    pairs.sort(key=lambda pair: len(pair[0]))  # windows of like length together: little padding
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        longest = len(batch[-1][0])
        tokens = torch.tensor([window + [0] * (longest - len(window)) for window, _ in batch])
        labels = torch.tensor([label + [IGNORED] * (longest - len(label)) for _, label in batch])
        yield tokens, labels


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[str],
    reference: PreTrainedModel | None = None,
    batch_size: int = 16,
) -> Score:
    """Score whole documents, each begun by BOS; with a reference, count where both have the same likeliest token."""
    import torch
    import torch.nn.functional as F

    nats, scored_tokens, agreements = 0.0, 0, 0
    context = model.config.max_position_embeddings
    for tokens, labels in window_batches(encode(tokenizer, documents), context, batch_size):
        targets = labels[:, 1:].to(model.device)
        scored = targets != IGNORED
        with torch.inference_mode():
            # no attention mask: padding is on the right, where a causal model cannot see it
            inputs = tokens[:, :-1].to(model.device)
            logits = model(input_ids=inputs, use_cache=False).logits[scored].float()
            nats += F.cross_entropy(logits, targets[scored], reduction="sum").item()
            scored_tokens += int(scored.sum())
            if reference is not None:
                expected = reference(input_ids=inputs, use_cache=False).logits[scored].argmax(-1)
                agreements += int((logits.argmax(-1) == expected).sum())
    characters = sum(map(len, documents))
    return Score(nats, scored_tokens, characters, None if reference is None else agreements)


# ------------------------------------------------------------------------------------------------------------ training


@dataclass
class Progress:
    """How far a training is."""

    steps: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # nats a token, mean over about the last hundred steps


def fingerprint(rows: Tensor, shape: Shape, recipe: Recipe) -> Identity:
    """The identity of a training: sizes, recipe, and a digest of its tokens."""
    digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    return {**asdict(shape), **asdict(recipe), "data and tokenizer": digest}


def save_checkpoint(path: Path, progress: Progress, model: Any, optimizers: list[Any], identity: Identity) -> None:
    """Write all that a resumed training needs; a crash at any moment leaves the previous checkpoint whole."""
    import torch

    temporary = path.with_suffix(".tmp")
    torch.save(
        {
            "identity": identity,
            "progress": asdict(progress),
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        },
        temporary,
    )
    os.replace(temporary, path)


def load_checkpoint(path: Path, model: Any, optimizers: list[Any], identity: Identity) -> Progress:
    """Set model and optimizers to what the checkpoint holds."""
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    changed = [name for name, value in identity.items() if state["identity"].get(name) != value]
    if changed:
        raise InputError(f"{path} is of a training with other settings: {', '.join(changed)}")
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return Progress(**state["progress"])


def train(
    model: PreTrainedModel,
    rows: Tensor,
    recipe: Recipe,
    budget: Budget,
    checkpoint: Path,
    identity: Identity,
    teacher: Teacher | None = None,
    resume: bool = False,
    checkpoint_every: int = 100,
    bf16: bool = False,
) -> Progress:
    """Train until the budget is spent, with a checkpoint every so many steps."""
    import torch
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

    optimizers = make_optimizers(model, recipe)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    progress = load_checkpoint(checkpoint, model, optimizers, identity) if resume else Progress()
    start = time.monotonic() - progress.seconds
    model.train()
    with ProgressBar(console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=1.0)
        while (fraction := budget.fraction(progress.steps, progress.seconds)) < 1.0:
            factor = learning_rate_factor(progress.steps, fraction, recipe.warmup_steps)
            loss = training_loss(model, rows, row_ids_of_step(progress.steps, len(rows), recipe), teacher, recipe, bf16)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * factor
                optimizer.step()
                optimizer.zero_grad()
            progress.steps += 1
            progress.seconds = time.monotonic() - start
            progress.loss += (loss.item() - progress.loss) / min(progress.steps, 100)
            if progress.steps % checkpoint_every == 0:
                save_checkpoint(checkpoint, progress, model, optimizers, identity)
            text = f"step {progress.steps}, loss {progress.loss:.3f}"
            bar.update(task, completed=budget.fraction(progress.steps, progress.seconds), description=text)
    return progress


# --------------------------------------------------------------------------------------------------------- model card


CARD = """---
license: {licence}
library_name: transformers
pipeline_tag: text-generation
language: en
---

# {title}

{kind} of {parameters:,} parameters, made by `scripts/make_backbone.py`: weights in bfloat16.

| | |
|---|---|
{table}
"""


def model_card(args: argparse.Namespace, parameters: int, facts: dict[str, str]) -> str:
    """The README.md of a trained model: front matter, a sentence, a table of facts."""
    return CARD.format(
        licence=args.data_licence.lower(),
        title=args.output.resolve().name,
        kind="A draft model (a small Llama)" if args.preset == "draft" else "A small Llama",
        parameters=parameters,
        table="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
    )


def card_facts(
    args: argparse.Namespace, shape: Shape, recipe: Recipe, documents: int, tokens: int, progress: Progress
) -> dict[str, str]:
    """What the model card says about how the model was made, row by row."""
    trained = progress.steps * recipe.batch_size * recipe.row_length
    facts = {
        "shape": f"{shape.layers} layers, hidden {shape.hidden_size}, {shape.heads} heads, {shape.kv_heads} KV heads, "
        f"intermediate {shape.intermediate_size}, tied, vocabulary {shape.vocab_size}, positions {shape.context}",
        "data": f"{args.data_name}: {documents:,} documents, {tokens:,} tokens; licence {args.data_licence}",
        "tokenizer": tokenizer_fact(args),
        "recipe": f"seed {recipe.seed}; documents shuffled and concatenated into rows of {recipe.row_length} tokens, "
        f"{recipe.batch_size} rows a step, {progress.steps:,} steps ({trained / 1e6:.1f} M tokens, "
        f"{trained / tokens:.1f} passes); Muon (lr {recipe.muon_lr}, momentum 0.95, weight decay 0.01) for the "
        f"matrices of the layers, AdamW (lr {recipe.adamw_lr}, betas 0.9, 0.95) for the rest; {recipe.warmup_steps} "
        "steps of warm-up, constant to half-time, then linear to 2 %; gradient norm clipped at 1"
        + ("; bf16 autocast" if args.bf16 else ""),
    }
    if recipe.teacher_weight:
        facts["teacher"] = (
            f"{Path(args.teacher).resolve().name}: {recipe.teacher_weight:.0%} of the loss is the cross-entropy with "
            f"its {recipe.teacher_top} likeliest next tokens, the rest that with the text's token. A draft is "
            "accepted where it agrees with the model that it drafts for, not where it agrees with the text"
        )
    facts["cost"] = f"{progress.seconds / 60:.0f} minutes on {args.threads or 'all'} thread(s) of a {args.device}"
    facts["loss in training"] = f"{progress.loss:.3f} nats a token" + (" (mixed with the teacher)" * bool(args.teacher))
    facts["limits"] = "it writes text like its data and nothing else; made for tests and demonstrations"
    if recipe.row_length < shape.context:
        facts["limits"] += f"; rows were {recipe.row_length} tokens long: text past that is weaker"
    return facts


def tokenizer_fact(args: argparse.Namespace) -> str:
    """The model card's row on the tokenizer."""
    if not args.tokenizer:
        special = SPECIAL_TOKEN.replace("|", r"\|")  # a bare | would end the cell of the table
        return f"byte-level BPE trained on the same text; `{special}` (0) is BOS, EOS and PAD and begins every document"
    where = "copied here" if args.save_tokenizer else "not copied here: load it from there"
    return f"that of `{Path(args.tokenizer).resolve().name}`, {where}"


# -------------------------------------------------------------------------------------------------------- command line


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage in front of its complaints."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """All the options; those of a preset are None unless given."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("data")
    data.add_argument("--data", help="text file, or data set on the Hub (roneneldan/TinyStories)")
    data.add_argument("--document-separator", default=SEPARATOR, metavar="LINE", help="default: %(default)s")
    data.add_argument("--split", default="train", help="of a data set on the Hub (default: %(default)s)")
    data.add_argument("--text-column", default="text", help="of a data set on the Hub (default: %(default)s)")
    data.add_argument("--max-documents", type=int, metavar="N", help="only the first N; from the Hub, streamed")
    data.add_argument("--eval", metavar="FILE", help="text file to evaluate on")
    data.add_argument("--tokenizer", metavar="FOLDER", help="use this tokenizer instead of training one")

    model = parser.add_argument_group("model: a preset, and what differs from it")
    model.add_argument("--preset", choices=PRESETS, default="backbone", help="default: %(default)s")
    for name in Shape.__dataclass_fields__:
        sizes = ", ".join(f"{preset} {getattr(shape, name)}" for preset, shape in PRESETS.items())
        model.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default: {sizes}")

    recipe = parser.add_argument_group("training")
    length = recipe.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="train for so many steps")
    length.add_argument("--minutes", type=float, help="train for so long; the schedule follows the clock")
    for name, field in Recipe.__dataclass_fields__.items():
        flag, kind = f"--{name.replace('_', '-')}", float if isinstance(field.default, float) else int
        recipe.add_argument(flag, type=kind, default=field.default, metavar="N", help="default: %(default)s")
    recipe.add_argument("--teacher", metavar="FOLDER", help="learn this model's distribution too (same vocabulary)")
    bf16_help = "autocast (default: if the device is fast at it)"
    recipe.add_argument("--bf16", action=argparse.BooleanOptionalAction, help=bf16_help)
    recipe.add_argument("--device", help="default: cuda if there is one, else cpu")
    recipe.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")

    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FOLDER", help="where the model goes")
    output.add_argument("--overwrite", action="store_true", help="allow an output folder that holds something")
    output.add_argument("--resume", action="store_true", help="go on from the checkpoint in the output folder")
    output.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="default: %(default)s")
    output.add_argument("--save-tokenizer", action=argparse.BooleanOptionalAction, default=True, help="with the model")
    output.add_argument("--data-name", help="for the model card (default: the name of --data)")
    output.add_argument("--data-licence", default="CDLA-Sharing-1.0", help="for the model card (default: %(default)s)")
    output.add_argument("--evaluate-only", metavar="FOLDER", help="train nothing: print this model's figures on --eval")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise InputError on what can be known to fail before anything is read."""
    if args.eval and not Path(args.eval).is_file():
        raise InputError(f"no such file: {args.eval}")
    for folder in filter(None, (args.tokenizer, args.teacher, args.evaluate_only)):
        if not Path(folder).is_dir():
            raise InputError(f"no such folder: {folder}")
    if args.evaluate_only:
        if not args.eval:
            raise InputError("--evaluate-only needs --eval FILE")
        return
    if not args.data or not args.output:
        raise InputError("a training needs --data and --output")
    if not Path(args.data).is_file() and not is_hub_id(args.data):
        raise InputError(f"no such file: {args.data}")
    if args.steps is None and args.minutes is None:
        raise InputError("say how long to train: --steps or --minutes")
    limits = ("steps", "minutes", "batch_size", "max_documents", "checkpoint_every", "threads")
    for name in (*limits, "muon_lr", "adamw_lr", "teacher_top"):
        if (value := getattr(args, name)) is not None and not value > 0:  # so that nan is refused too
            raise InputError(f"--{name.replace('_', '-')} must be more than 0, not {value}")
    if args.warmup_steps < 0:
        raise InputError(f"--warmup-steps must not be less than 0, is {args.warmup_steps}")
    if not 0 <= args.teacher_weight <= 1:
        raise InputError(f"--teacher-weight must lie between 0 and 1, not {args.teacher_weight}")
    if not args.tokenizer and (args.preset == "draft" or args.teacher or not args.save_tokenizer):
        raise InputError("--preset draft, --teacher and --no-save-tokenizer need --tokenizer FOLDER: the backbone's")
    shape_from(args)
    check_output(args)


def check_output(args: argparse.Namespace) -> None:
    """Raise InputError where the output folder would lose something, or has nothing to resume."""
    if args.resume and not (args.output / CHECKPOINT).is_file():
        raise InputError(f"nothing to resume: {args.output} holds no {CHECKPOINT}")
    if args.output.exists() and not args.output.is_dir():
        raise InputError(f"{args.output} is no folder")
    if args.output.is_dir() and any(args.output.iterdir()) and not (args.overwrite or args.resume):
        raise InputError(f"{args.output} is not empty: give --overwrite, or --resume to go on with a training")


def shape_from(args: argparse.Namespace) -> Shape:
    """The preset's sizes with those of the command line put in."""
    given = {name: getattr(args, name) for name in Shape.__dataclass_fields__ if getattr(args, name) is not None}
    shape = replace(PRESETS[args.preset], **given)
    shape.check()
    if not 2 <= args.row_length <= shape.context:
        raise InputError(f"--row-length must lie between 2 and --context {shape.context}, not {args.row_length}")
    return shape


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The command line's recipe; without a teacher, one that gives it no weight."""
    recipe = Recipe(**{name: getattr(args, name) for name in Recipe.__dataclass_fields__})
    return recipe if args.teacher else replace(recipe, teacher_weight=0.0)


def fast_at_bf16(device: str) -> bool:
    """Whether bf16 autocast pays on this device."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, bool] = getattr(
        torch.cpu, "get_capabilities", dict
    )()  # older torch has none: float32 is never wrong
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "sve_bf16"))


def set_up_device(args: argparse.Namespace) -> None:
    """Fill in the device and precision that were not given."""
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:  # torch built without it asserts
        raise InputError(f"no device {args.device}: {str(error).splitlines()[0]}") from error
    if args.bf16 is None:
        args.bf16 = fast_at_bf16(args.device)


def load_teacher(args: argparse.Namespace, vocabulary: int) -> PreTrainedModel | None:
    """The model of --teacher, in float32 to be compared with, in bf16 (if fast) to learn from."""
    import torch

    if not args.teacher:
        return None
    dtype = torch.bfloat16 if args.bf16 and not args.evaluate_only else torch.float32
    teacher = load_model(args.teacher, dtype, args.device)
    config = teacher.config
    if config.vocab_size != vocabulary:
        raise InputError(f"--teacher has a vocabulary of {config.vocab_size}, the model one of {vocabulary}")
    if not args.evaluate_only and config.max_position_embeddings < args.row_length:
        raise InputError(f"--teacher has {config.max_position_embeddings} positions, --row-length is {args.row_length}")
    return teacher


def run_evaluation(args: argparse.Namespace) -> None:
    """Print the figures of a model that exists."""
    import torch

    documents = read_file_documents(args.eval, args.document_separator)
    model = load_model(args.evaluate_only, torch.float32, args.device)
    tokenizer = load_tokenizer(args.tokenizer or args.evaluate_only)
    if len(tokenizer) > model.config.vocab_size:
        raise InputError(f"the tokenizer has {len(tokenizer)} pieces, the model knows {model.config.vocab_size}")
    print(evaluate(model, tokenizer, documents, load_teacher(args, model.config.vocab_size)))


def run_training(args: argparse.Namespace) -> None:
    """Read, train, evaluate, write."""
    shape, recipe = shape_from(args), recipe_from(args)
    held_out = read_file_documents(args.eval, args.document_separator) if args.eval else []
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    reference = load_teacher(args, len(tokenizer)) if tokenizer else None
    documents = read_documents(args)
    random.Random(recipe.seed).shuffle(documents)
    tokenizer = tokenizer or train_tokenizer(documents, shape)
    if args.vocab_size not in (None, len(tokenizer)):
        raise InputError(f"the tokenizer has {len(tokenizer)} pieces, --vocab-size is {args.vocab_size}")
    shape = replace(shape, vocab_size=len(tokenizer))
    rows = pack_rows(encode(tokenizer, documents), recipe.row_length)
    if len(rows) < recipe.batch_size:
        raise InputError(
            f"the text fills {len(rows)} rows of {recipe.row_length} tokens, a step takes {recipe.batch_size}: "
            "give a smaller --batch-size or --row-length"
        )
    teacher = Teacher(reference, rows, recipe.teacher_top) if reference is not None else None
    model = build_model(shape, tokenizer, recipe.seed).to(args.device)
    budget = Budget(args.steps, args.minutes and args.minutes * 60)

    args.output.mkdir(parents=True, exist_ok=True)
    checkpoint = args.output / CHECKPOINT
    identity = fingerprint(rows, shape, recipe)
    every, resume, bf16 = args.checkpoint_every, args.resume, args.bf16
    progress = train(model, rows, recipe, budget, checkpoint, identity, teacher, resume, every, bf16)
    score = finish(args, model, tokenizer, held_out, reference)
    facts = card_facts(args, shape, recipe, len(documents), rows.numel(), progress)
    if score:
        facts[f"on {Path(args.eval).name}"] = f"{score}; whole documents, each begun by BOS"
    (args.output / "README.md").write_text(model_card(args, model.num_parameters(), facts), encoding="utf-8")
    checkpoint.unlink(missing_ok=True)
    print(score if score else f"{progress.loss:.4f} nats a token in training")


def finish(
    args: argparse.Namespace, model: Any, tokenizer: Any, held_out: list[str], reference: PreTrainedModel | None
) -> Score | None:
    """Write the model in bfloat16, and score what was written."""
    import torch

    model.to(torch.bfloat16).save_pretrained(args.output)
    if args.save_tokenizer:
        tokenizer.save_pretrained(args.output)
    if not held_out:
        return None
    # what was written, computed with in float32: the figures do not depend on the device's bf16
    written = load_model(str(args.output), torch.float32, args.device)
    return evaluate(written, tokenizer, held_out, reference and reference.float())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 0, 2 on bad input, 130 when interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.data and not args.data_name:
        args.data_name = args.data if is_hub_id(args.data) else Path(args.data).name
    try:
        check_arguments(args)
        set_up_device(args)
        if args.evaluate_only:
            run_evaluation(args)
        else:
            run_training(args)
    except InputError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"{parser.prog}: interrupted; --resume goes on from the last checkpoint, if one was written",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
