"""Parts of make_backbone.py: rows of text, teacher, optimizers, stock Trainer and evaluation.

Shapes: B rows in a batch, T tokens in a row, V tokens in the vocabulary, K most probable tokens of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import StateDict
from torch.utils.data import StackDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from medusa.options import Options, count, option, share
from train.callbacks import ProgressBar, TimeBudget


class Recipe(Options):
    """Hyperparameters of a training run."""

    row_length: int = count(384, "cut the text into rows of N tokens")
    batch_size: int = count(10, "rows in a batch")
    muon_lr: float = option(0.02, "learning rate of matrices", "above 0", lambda value: value > 0, "LR")
    adamw_lr: float = option(3e-3, "learning rate of the rest", "above 0", lambda value: value > 0, "LR")
    warmup_steps: int = option(30, "raise the learning rate over the first N steps", metavar="N")
    teacher_weight: float = share(0.9, "weight of the teacher in the loss", "W")
    teacher_top: int = count(32, "keep the N most probable tokens of the teacher")  # K


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> Iterator[Tensor]:
    """Yield the token ids [T] of each document, with BOS at their start."""
    bos = tokenizer.bos_token_id
    for start in range(0, len(documents), 1000):  # verbose would warn about documents longer than the context
        for ids in tokenizer(list(documents[start : start + 1000]), verbose=False)["input_ids"]:
            yield torch.tensor(ids if ids[:1] == [bos] else [bos, *ids], dtype=torch.int32)


def cut_rows(encoded: Iterable[Tensor], length: int) -> StackDataset:
    """Concatenate all documents and cut them into rows [T], each with its index. The incomplete last row is dropped."""
    stream = torch.cat(list(encoded))
    rows = stream[: len(stream) // length * length].view(-1, length)
    return StackDataset(rows=torch.arange(len(rows)), input_ids=rows)


class Teacher:
    """A trained model that gives the K most probable next tokens at each position, with their probabilities.

    They are computed when a row is first used, and stored: 6 K bytes for each token of the data."""

    def __init__(self, model: PreTrainedModel, rows: int, length: int, top: int) -> None:
        self.model, self.known = model, torch.zeros(rows, dtype=torch.bool)
        self.ids = torch.empty(rows, length - 1, top, dtype=torch.int32)
        self.probabilities = torch.empty(self.ids.shape, dtype=torch.bfloat16)

    def targets(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and probabilities, both [B, T-1, K], for tokens [B, T-1] of the rows with indices `rows`."""
        device, rows = tokens.device, rows.cpu()
        if not self.known[rows].all():
            with torch.no_grad():
                top = self.model(input_ids=tokens, use_cache=False).logits.float().topk(self.ids.shape[-1])
            self.ids[rows], self.known[rows] = top.indices.int().cpu(), True
            self.probabilities[rows] = top.values.softmax(-1).bfloat16().cpu()
        return self.ids[rows].long().to(device), self.probabilities[rows].float().to(device)


def soft_cross_entropy(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the mean cross-entropy in nats of logits [..., V]; the tokens `ids` [..., K] have shares `weights`."""
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

    def step(self, closure: object = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, list[StateDict]]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, list[StateDict]]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class BackboneTrainer(Trainer):
    """The stock Trainer with a teacher in the loss, two optimizers, and a schedule that can follow the clock."""

    teacher: Teacher | None = None

    def __init__(
        self, model: PreTrainedModel, rows: StackDataset, recipe: Recipe, args: TrainingArguments, minutes: float | None
    ) -> None:
        """Make a trainer of `model` on `rows`. If `minutes` is given, training ends after that time."""
        self.recipe, self.minutes = recipe, minutes
        budget = [TimeBudget(60 * minutes)] if minutes else []
        optimizers = (MuonWithAdamW(model, recipe), None)
        super().__init__(model, args, train_dataset=rows, optimizers=optimizers, callbacks=budget)
        for printing in (PrinterCallback, ProgressCallback):  # standard output is for results
            self.remove_callback(printing)
        self.add_callback(ProgressBar(lines=False, budget=lambda: self.budget))

    @property
    def budget(self) -> TimeBudget | None:
        """The time budget in force. A resumed Trainer replaces the budget, also its length, by the checkpoint's."""
        found = next((c for c in self.callback_handler.callbacks if isinstance(c, TimeBudget)), None)
        if found is not None and self.minutes is not None:
            found.seconds = 60 * self.minutes
        return found

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Make a scheduler that follows the steps or, with a time budget, the clock.

        The rate rises linearly during the warm-up and falls linearly to 2 % in the second half of the training."""

        def factor(step: int) -> float:
            done = self.budget.progress() if self.budget else step / num_training_steps
            warmup = min(1.0, (step + 1) / max(1, self.recipe.warmup_steps))
            return warmup * (1.0 - 0.98 * max(0.0, done - 0.5) / 0.5)

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler

    def compute_loss(self, model: PreTrainedModel, inputs: dict[str, Tensor], *_: object, **__: object) -> Tensor:
        """Compute the loss in nats a token: the model's own, mixed with the cross-entropy against the teacher."""
        rows, ids, share = inputs["rows"], inputs["input_ids"].long(), self.recipe.teacher_weight
        output = model(input_ids=ids, labels=ids, use_cache=False)
        if self.teacher is None:
            return output.loss
        targets = self.teacher.targets(rows, ids[:, :-1])
        return (1 - share) * output.loss + share * soft_cross_entropy(output.logits[:, :-1].float(), *targets)


class Score(NamedTuple):
    """Sums over the evaluated text."""

    nats: float
    tokens: int  # without BOS
    characters: int
    agreements: int | None = None  # positions where model and teacher prefer the same token

    @property
    def bits_per_character(self) -> float:
        return self.nats / math.log(2) / self.characters

    def __str__(self) -> str:
        figures = f"{self.nats / self.tokens:.4f} nats a token, {self.bits_per_character:.4f} bits a character"
        figures += f" ({self.tokens} tokens, {self.characters} characters)"
        if self.agreements is not None:
            figures += f", {self.agreements / self.tokens:.4f} top-1 agreement with the teacher"
        return figures


def windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield the windows (begin, end, first) that score a document of `length` tokens: each token but BOS once.

    The model reads the tokens begin to end - 1 and scores those from `first` on. Windows advance by half a context,
    so tokens after the first window have at least half a context before them."""
    begin, end = 0, 1
    while end < length:
        first, end = end, min(begin + context, length)
        yield begin, end, first
        begin += max(context // 2, 1)


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    teacher: PreTrainedModel | None = None,
) -> Score:
    """Score whole documents, with BOS at the start of each; `teacher` adds the count of agreements."""
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
