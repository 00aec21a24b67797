"""From the backbone's logits to target probabilities and tokens: the only place, and through transformers' own objects.

Temperature, top-k, top-p and penalties are `LogitsProcessor`s that transformers prepared. They see one row at a time:
the prompt, everything written and the path down to a node, exactly what plain decoding would show them there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from decode.sequences import Sequences


def most_probable(logits: Tensor) -> Tensor:
    """logits [..., V] -> token [...]; float64 is compared as float32, as transformers does."""
    return (logits.float() if logits.dtype == torch.float64 else logits).argmax(-1)


class Target:
    """What the text is to follow: the backbone's distribution as changed by processors, or its most probable token."""

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, keep_scores: bool = False) -> None:
        self.processors, self.do_sample = processors, do_sample
        self.kept: dict[int, list[Tensor]] | None = {} if keep_scores else None
        """Per row the scores [1, V] of every token drawn, in order; `None` where nobody asked for them."""

    @property
    def is_argmax(self) -> bool:
        """Whether one argmax over raw logits says it all, so that all nodes can be decided on at once."""
        return not self.do_sample and not self.processors and self.kept is None

    def scores(self, prefix: Tensor, logits: Tensor) -> Tensor:
        """prefix [1, T] ids and logits [V] of its last position -> processed scores [1, V], float32."""
        return self.processors(prefix, logits[None].to(copy=True, dtype=torch.float32))  # type: ignore[arg-type]

    def probabilities(self, prefix: Tensor, logits: Tensor) -> Tensor:
        """prefix [1, T] and logits [V] -> the target probabilities [V]."""
        return self.scores(prefix, logits).softmax(-1)[0]

    def draw(self, row: int, prefix: Tensor, logits: Tensor) -> int:
        """The next token after `prefix` [1, T]: most probable, or one multinomial draw, as in `model.generate`.

        Draws happen in the order of the tokens, one a token, so a seed gives the text that it gives there.
        """
        scores = self.scores(prefix, logits)
        if self.kept is not None:
            self.kept.setdefault(row, []).append(scores)
        if not self.do_sample:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), num_samples=1))

    def next(self, rows: Sequence[int], sequences: Sequences, logits: Tensor) -> Tensor:
        """logits [B, V] after what is written in `rows` -> the next token of each [B]."""
        if self.is_argmax:
            return most_probable(logits)
        drawn = [self.draw(row, sequences.prefix(row), logits[index]) for index, row in enumerate(rows)]
        return torch.tensor(drawn, device=logits.device)
