"""What make_backbone.py is made of: a tokenizer, rows of text, a teacher, two optimizers, a stock Trainer, a score.

Shapes: B rows a step, T tokens a row, V vocabulary, K tokens kept of a teacher's distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from train.callbacks import ProgressBar
from train.time_budget import TimeBudget

SPECIAL_TOKEN = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """What decides the result of a training, besides its data and the model's sizes."""

    seed: int = 0
    row_length: int = 384  # tokens
    batch_size: int = 10  # rows a step
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup_steps: int = 30
    teacher_weight: float = 0.9  # the teacher's share of the loss
    teacher_top: int = 32  # tokens kept of the teacher's distribution


def train_tokenizer(documents: Sequence[str], vocab_size: int, context: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE of `vocab_size` pieces; its only special token has id 0 and is BOS, EOS and PAD."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[SPECIAL_TOKEN], initial_alphabet=alphabet, show_progress=False
        ),
    )
    single, pair = f"{SPECIAL_TOKEN} $A", f"{SPECIAL_TOKEN} $A {SPECIAL_TOKEN} $B"
    bos = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[(SPECIAL_TOKEN, 0)])
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    roles = dict.fromkeys(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKEN)
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=context, **roles)


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> Iterator[Tensor]:
    """The token ids of every document [T], BOS first."""
    bos = tokenizer.bos_token_id
    for start in range(0, len(documents), 1000):  # verbose would warn about documents longer than the context
        for ids in tokenizer(list(documents[start : start + 1000]), verbose=False)["input_ids"]:
            yield torch.tensor(ids if ids[:1] == [bos] else [bos, *ids], dtype=torch.int32)


class Rows(Dataset[dict[str, Tensor]]):
    """Documents laid end to end and cut into rows [T]; the incomplete row at the end is dropped."""

    def __init__(self, encoded: Iterable[Tensor], length: int) -> None:
        stream = torch.cat(list(encoded))
        self.tokens = stream[: len(stream) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"rows": torch.tensor(index), "input_ids": self.tokens[index].long()}


class Teacher:
    """The K most probable next tokens at each position according to a trained model, with their probabilities.

    The targets of a row are computed when it is first used and kept: 6 bytes for each token and each of the K.
    """

    def __init__(self, model: PreTrainedModel, rows: Rows, top: int) -> None:
        self.model = model
        size = (*rows.tokens[:, 1:].shape, top)
        self.ids = torch.empty(size, dtype=torch.int32)
        self.probabilities = torch.empty(size, dtype=torch.bfloat16)
        self.known = torch.zeros(len(rows), dtype=torch.bool)

    def targets(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """rows [B] with tokens [B, T-1] -> ids and probabilities, both [B, T-1, K]; the K probabilities sum to 1."""
        device, rows = tokens.device, rows.cpu()
        if not self.known[rows].all():
            with torch.no_grad():
                top = self.model(input_ids=tokens, use_cache=False).logits.float().topk(self.ids.shape[-1])
            self.ids[rows], self.known[rows] = top.indices.int().cpu(), True
            self.probabilities[rows] = top.values.softmax(-1).bfloat16().cpu()
        return self.ids[rows].long().to(device), self.probabilities[rows].float().to(device)


def soft_cross_entropy(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits [..., V] against weights [..., K] on the tokens ids [..., K]."""
    return ((logits.logsumexp(-1, keepdim=True) - logits.gather(-1, ids)) * weights).sum(-1).mean()


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of the layers and AdamW for embeddings and norms, as one optimizer for the Trainer."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        in_layers = {n: p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2}
        rest = [parameter for name, parameter in model.named_parameters() if name not in in_layers]
        self.parts: list[Optimizer] = [
            Muon(list(in_layers.values()), lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
            AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})  # shared, not copied

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def learning_rate_factor(step: int, done: float, warmup_steps: int) -> float:
    """The schedule: linear warm-up, constant until half of the training is `done`, then linear down to 2 %.

    >>> [round(learning_rate_factor(100, done, 30), 2) for done in (0.1, 0.5, 0.75, 1.0)]
    [1.0, 1.0, 0.51, 0.02]
    """
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    return warmup * (1.0 - 0.98 * max(0.0, done - 0.5) / 0.5)


class BackboneTrainer(Trainer):
    """The stock Trainer with our loss, optimizers and schedule; `minutes`, if given, ends the training by the clock."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        recipe: Recipe,
        arguments: TrainingArguments,
        minutes: float | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.recipe, self.teacher = recipe, teacher
        optimizers = (MuonWithAdamW(model, recipe), None)
        budget = [TimeBudget(60 * minutes)] if minutes else []
        super().__init__(model, arguments, train_dataset=rows, optimizers=optimizers, callbacks=budget)
        for printing in (PrinterCallback, ProgressCallback):  # standard output is for results
            self.remove_callback(printing)
        self.add_callback(ProgressBar(lines=False, budget=lambda: self.budget))

    @property
    def budget(self) -> TimeBudget | None:
        """The time budget in force. On resuming, the Trainer replaces the one that it was given."""
        return next((c for c in self.callback_handler.callbacks if isinstance(c, TimeBudget)), None)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Follow `learning_rate_factor`, by the clock if there is a time budget."""

        def factor(step: int) -> float:
            budget = self.budget
            done = step / num_training_steps if budget is None else budget.progress()
            return learning_rate_factor(step, done, self.recipe.warmup_steps)

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler

    def compute_loss(self, model: PreTrainedModel, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Nats a token against the text, mixed with the teacher's distribution if there is a teacher."""
        tokens, targets = inputs["input_ids"][:, :-1], inputs["input_ids"][:, 1:]
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.teacher is None:
            return loss
        soft = soft_cross_entropy(logits, *self.teacher.targets(inputs["rows"], tokens))
        return (1 - self.recipe.teacher_weight) * loss + self.recipe.teacher_weight * soft


class Score(NamedTuple):
    """Sums over a text. `tokens` leaves BOS out; `agreements` counts where the teacher predicts the same token."""

    nats: float
    tokens: int
    characters: int
    agreements: int | None = None

    @property
    def bits_per_character(self) -> float:
        return self.nats / math.log(2) / self.characters

    def __str__(self) -> str:
        told = f"{self.nats / self.tokens:.4f} nats a token, {self.bits_per_character:.4f} bits a character"
        told += f" ({self.tokens} tokens, {self.characters} characters)"
        if self.agreements is None:
            return told
        return f"{told}, {self.agreements / self.tokens:.4f} top-1 agreement with the teacher"


def windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Cover a document of `length` tokens: (begin, end, first), where tokens first..end-1 are scored in begin..end-1.

    Every token except BOS is scored once. A document longer than the context is read in windows that advance by half
    of it, so that a token after the first window has at least half a context before it.

    >>> list(windows(5, 8)), list(windows(11, 8))
    ([(0, 5, 1)], [(0, 8, 1), (4, 11, 8)])
    """
    begin, first = 0, 1
    while first < length:
        end = min(begin + context, length)
        yield begin, end, first
        first = end
        begin += max(context // 2, 1)


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    teacher: PreTrainedModel | None = None,
) -> Score:
    """Score whole documents, each begun by BOS."""
    nats, tokens, agreements = 0.0, 0, 0
    for ids in encode(tokenizer, documents):
        for begin, end, first in windows(len(ids), model.config.max_position_embeddings):
            inputs = ids[None, begin : end - 1].long().to(model.device)
            targets = ids[first:end].long().to(model.device)
            scored = slice(first - begin - 1, None)
            logits = model(input_ids=inputs, use_cache=False).logits[0, scored].float()
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
            tokens += end - first
            if teacher is not None:
                expected = teacher(input_ids=inputs, use_cache=False).logits[0, scored].argmax(-1)
                agreements += int((logits.argmax(-1) == expected).sum())
    return Score(nats, tokens, sum(map(len, documents)), None if teacher is None else agreements)
