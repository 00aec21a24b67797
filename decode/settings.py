"""How to decode, as a user says it, checked before anything long starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from decode.loop import Acceptor
from decode.request import require_compilable, require_one_shape, require_uncontrasted, resolve_acceptance
from decode.strategies.contrastive import Amateur
from medusa.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """Generation settings; all at their defaults mean greedy text until EOS or 256 tokens."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    min_p: float = 0.0
    """0 is off."""
    repetition_penalty: float = 1.0
    """1 is off."""
    stop: tuple[str, ...] = ()
    acceptance: str | None = None
    """greedy or rejection, or one of the lossy: typical, typical-sampled, or at temperature 0 topk:K, distance:D;
    `None`: the lossless one for this temperature."""
    epsilon: float = 0.09
    delta: float = 0.3
    draft: str = "topk"
    """topk, the heads' best guesses, or sample, draws from their distributions."""
    stop_drafting: float = 0.0
    """Confidence below which a dynamic tree drafts nothing more; 0 is off."""
    ignore_eos: bool = False
    compile: bool = False
    """Whole steps as one compiled region (`decode.compiled.regions`)."""
    amateur: Amateur | None = None
    """Whom the backbone is contrasted with."""

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max-new-tokens", self.max_new_tokens, "a whole number of at least 1")
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or above")
        _require(self.top_k >= 0, "top-k", self.top_k, "0 (off) or above")
        _require(0 < self.top_p <= 1, "top-p", self.top_p, "above 0 and at most 1 (off)")
        _require(0 <= self.min_p <= 1, "min-p", self.min_p, "between 0 (off) and 1")
        _require(self.repetition_penalty > 0, "repetition-penalty", self.repetition_penalty, "above 0; 1 is off")
        if any(not stop for stop in self.stop):
            raise RequestError("a stop string is empty; give at least one character")
        require_one_shape(self.compile, self.stop_drafting)
        require_compilable(self.compile, self.acceptor)
        require_uncontrasted(self.compile, self.amateur)

    @property
    def acceptor(self) -> Acceptor:
        return resolve_acceptance(
            self.acceptance, self.do_sample, self.epsilon, self.delta, self.draft, self.stop_drafting
        )

    @property
    def do_sample(self) -> bool:
        return self.temperature > 0

    def generate_kwargs(self, tokenizer: Any = None) -> dict[str, Any]:
        """The same for `model.generate`; what is not named here is as the model's generation config says."""
        kwargs: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.do_sample,
            "temperature": self.temperature if self.do_sample else None,
            "top_k": self.top_k if self.do_sample else None,
            "top_p": self.top_p if self.do_sample else None,
            "min_p": self.min_p if self.do_sample and self.min_p else None,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.stop:
            kwargs |= {"stop_strings": list(self.stop), "tokenizer": tokenizer}
        if self.ignore_eos:
            kwargs["eos_token_id"] = None
        return kwargs

    def to_dict(self) -> dict[str, Any]:
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return told | {
            "acceptance": self.acceptor.name,
            "amateur": None if self.amateur is None else self.amateur.to_dict(),
        }


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value}; it must be {allowed}")
