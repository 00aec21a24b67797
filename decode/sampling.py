"""From the backbone's logits to target probabilities and tokens: the only place, and through transformers' own objects.

Temperature, top-k, top-p and penalties are `LogitsProcessor`s that transformers prepared. They see one row at a time:
the prompt, everything written and the path down to a node, exactly what plain decoding would show them there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.sequences import Request, Sequences


def most_probable(logits: Tensor) -> Tensor:
    """logits [..., V] -> token [...]; float64 is compared as float32, as transformers does."""
    return (logits.float() if logits.dtype == torch.float64 else logits).argmax(-1)


class Target:
    """What texts are to follow: the backbone's distribution as changed by processors, or its most probable token."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.processors = [request.processors for request in requests]
        self.do_sample = requests[0].do_sample
        self.kept: list[list[Tensor]] | None = [[] for _ in requests] if requests[0].config.output_scores else None
        """Per row the scores [1, V] of every token drawn, in order; `None` where nobody asked for them."""

    @property
    def is_argmax(self) -> bool:
        """Whether one argmax over raw logits says it all, so that all nodes can be decided on at once."""
        return not self.do_sample and self.kept is None and not any(self.processors)

    def scores(self, row: int, prefix: Tensor, logits: Tensor) -> Tensor:
        """prefix [1, T] ids and logits [V] of its last position -> processed scores [1, V], float32."""
        raw = logits[None].to(copy=True, dtype=torch.float32)
        return self.processors[row](prefix.to(raw.device), raw)  # type: ignore[arg-type]

    def probabilities(self, row: int, prefix: Tensor, logits: Tensor) -> Tensor:
        """prefix [1, T] and logits [V] -> the target probabilities [V]."""
        return self.scores(row, prefix, logits).softmax(-1)[0]

    def draw(self, row: int, prefix: Tensor, logits: Tensor, most_probable: bool = False) -> int:
        """The next token after `prefix` [1, T]: most probable, or one multinomial draw, as in `model.generate`.

        Draws happen in the order of the tokens, one a token, so a seed gives the text that it gives there.
        """
        scores = self.scores(row, prefix, logits)
        if self.kept is not None:
            self.kept[row].append(scores)
        if most_probable or not self.do_sample:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), num_samples=1))

    def next(
        self, rows: Sequence[int], sequences: Sequences, logits: Tensor, most_probable_only: bool = False
    ) -> Tensor:
        """logits [B, V] after what is written in `rows` -> the next token of each [B]."""
        if self.is_argmax:
            return most_probable(logits)
        drawn = [
            self.draw(row, sequences.prefix(row), logits[index], most_probable_only) for index, row in enumerate(rows)
        ]
        return torch.tensor(drawn, device=logits.device)

    def scores_by_position(self, new_ids: Sequence[Sequence[int]], width: int) -> tuple[Tensor, ...]:
        """Kept scores as `generate` returns them: `width` times [B, V]; under padding a row's last are repeated."""
        kept = self.kept or []
        return tuple(
            torch.cat([kept[row][min(at, len(ids) - 1)].clone() for row, ids in enumerate(new_ids)])
            for at in range(width)
        )
