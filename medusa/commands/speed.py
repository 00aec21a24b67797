"""Lines about the speed of finished texts, which several commands print."""

from __future__ import annotations

from medusa.commands.options import warn
from medusa.files import per_second


def speed_line(tokens: int, seconds: float, tokens_per_step: float) -> str:
    """Format the number of generated tokens, the tokens per second and the mean tokens per step as one line."""
    return f"{tokens} tokens, {per_second(tokens / max(seconds, 1e-9))} a second, {tokens_per_step:.2f} a step"


def warn_if_useless(tokens: int, tokens_per_step: float, nodes: int, texts: int = 1) -> None:
    """Warn if hardly any guess of the heads was accepted: fewer than 1.15 tokens per step.

    There is no warning if too little was generated to tell: at most 64 tokens, or at most 16 for each of the `texts`,
    which ended early. With one node (`nodes`), nothing was guessed."""
    if nodes != 1 and tokens > max(64, 16 * texts) and tokens_per_step < 1.15:
        warn("hardly any guess was accepted: these heads do not fit this backbone (another model, or another dtype?)")
