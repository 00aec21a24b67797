"""Structured output: texts that follow a grammar or a JSON schema, by masks of llguidance (extra `structured`).

A mask is a logits processor: tokens after which the text could no longer follow the grammar get the score -inf. If the
prompt has opened a thought, the grammar begins after the thought. The processor is a function of the text alone. So in
a tree, each node gets the mask of its own path, and the text is that of `model.generate` with the same processor, with
any drafter.

Shapes: B rows of a batch, T tokens of a text, V vocabulary."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from medusa.backbone import Backbone
from medusa.errors import RequestError, RunError, require_extra
from medusa.records.template import opened_thought

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

WHITESPACE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces as Python's `json.dumps` sets them, because weak models that may write any whitespace write nothing else."""
KEPT = 64  # compiled grammars
ENDING = 16  # tokens at the end of a prompt, in which it may open a thought


def json_schema_source(schema: object) -> str:
    """Turn a JSON schema, as a JSON value, into the source of a grammar; raise a `RequestError` if it is invalid.

    The schema's own `x-guidance` can change the whitespace (`WHITESPACE`)."""
    require_extra("structured", "llguidance")
    from llguidance import LLMatcher

    try:
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=WHITESPACE)
    except ValueError as error:
        raise _wrong("JSON schema", str(error)) from None
    return _valid(source, "JSON schema")


def lark_source(text: str) -> str:
    """Turn a grammar in llguidance's form of Lark into the source of a grammar; raise a `RequestError` if invalid."""
    require_extra("structured", "llguidance")
    from llguidance import LLMatcher

    return _valid(LLMatcher.grammar_from_lark(text), "grammar")


def _valid(source: str, what: str) -> str:
    from llguidance import LLMatcher

    if reason := LLMatcher.validate_grammar(source):
        raise _wrong(what, reason)
    return source


def _wrong(what: str, reason: str) -> RequestError:
    return RequestError(f"the {what} is invalid: {' '.join(reason.split())}")


class Grammars:
    """Compiles grammars for the vocabulary of one backbone, and keeps the last ones."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the vocabulary, which takes about a second; raise a `RequestError` if llguidance cannot read it."""
        require_extra("structured", "llguidance")
        from llguidance.hf import from_tokenizer

        ends = model.generation_config.eos_token_id if model.generation_config is not None else None
        ends = tokenizer.eos_token_id if ends is None else ends
        if ends is None:
            raise RequestError("this backbone has no end-of-text token, with which a text of a grammar must end")
        self.ends: list[int] = [ends] if isinstance(ends, int) else list(ends)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise RequestError(f"llguidance reads only fast tokenizers, and this is a {type(tokenizer).__name__}")
        try:
            self.tokenizer = from_tokenizer(tokenizer, Backbone(model).vocab_size, self.ends)
        except ValueError as error:
            raise RequestError(f"llguidance cannot read this tokenizer: {' '.join(str(error).split())}") from None
        self.decode: Callable[[list[int]], str] = lambda ids: str(tokenizer.decode(ids))
        self.compiled = lru_cache(KEPT)(self._compiled)

    def _compiled(self, source: str) -> Grammar:
        return Grammar(source, self.tokenizer, self.ends, self.decode)


class Grammar:
    """A grammar that is compiled for a vocabulary. `Grammars.compiled` makes it."""

    def __init__(
        self, source: str, tokenizer: LLTokenizer, ends: list[int], decode: Callable[[list[int]], str]
    ) -> None:
        """Compile `source`; `ends` are the end-of-text tokens. Raise a `RequestError` if it cannot be compiled."""
        from llguidance import LLMatcher

        self.source, self.ends, self.vocab_size, self.decode = source, ends, tokenizer.vocab_size, decode
        self.start = LLMatcher(tokenizer, source, log_level=0)
        if self.start.is_error():
            raise _wrong("grammar", self.start.get_error())

    def processor(self, prompt: Sequence[int]) -> GrammarProcessor:
        """Make the processor of a text whose first tokens are `prompt`, which follows no grammar."""
        thought = opened_thought(self.decode(list(prompt[-ENDING:])))
        return GrammarProcessor(self, len(prompt), None if thought is None else thought[1])


class GrammarProcessor(LogitsProcessor):
    """Sets the scores of tokens that the grammar forbids to -inf.

    The matcher remembers the tokens of the last text. For another text, it goes back to where both are equal."""

    def __init__(self, grammar: Grammar, prompt_length: int, thought_end: str | None = None) -> None:
        """`thought_end`: the mark that ends the thought which the prompt has opened."""
        self.grammar, self.prompt_length, self.thought_end = grammar, prompt_length, thought_end
        self.matcher: LLMatcher = grammar.start.deep_copy()
        self.ends = torch.tensor(grammar.ends)
        self.read: list[int] = []  # the tokens that the matcher has read

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the scores [B, V] after the texts `input_ids` [B, T]."""
        allowed = torch.stack([self.allowed(ids) for ids in input_ids[:, self.prompt_length :].tolist()])
        size = min(allowed.shape[1], scores.shape[1])
        masked = torch.full_like(scores, -torch.inf)
        masked[:, :size] = scores[:, :size].masked_fill(~allowed[:, :size].to(scores.device), -torch.inf)
        return masked

    def allowed(self, ids: list[int]) -> Tensor:
        """A mask [V] of the tokens that may follow the new tokens `ids`.

        A complete text can only end. So can the path to a node of a draft that breaks the grammar: no rule accepts such
        a node, but lossy rules ask for its scores. Within a thought, everything but the end of the text may follow."""
        if self.thought_end is not None:
            start = self._after_thought(ids, self.thought_end)
            if start is None:
                return torch.ones(self.grammar.vocab_size, dtype=torch.bool).index_fill_(0, self.ends, False)
            ids = ids[start:]
        ended = any(end in ids for end in self.grammar.ends)
        if ended or not self._advanced(ids) or self.matcher.is_stopped():
            return torch.zeros(self.grammar.vocab_size, dtype=torch.bool).index_fill_(0, self.ends, True)
        bits = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
        return (bits[:, None] >> torch.arange(8)).bitwise_and(1).bool().flatten()[: self.grammar.vocab_size]

    def _after_thought(self, ids: list[int], mark: str) -> int | None:
        """Return the number of tokens up to the `mark` that ends the thought; `None` if it has not ended."""
        decode = self.grammar.decode
        if mark not in decode(ids):
            return None
        return bisect_left(range(len(ids)), True, key=lambda count: mark in decode(ids[:count]))

    def _advanced(self, ids: list[int]) -> bool:
        """Make the matcher read the tokens `ids` and no others; return whether they follow the grammar."""
        pairs = enumerate(zip(self.read, ids, strict=False))
        shared = next((at for at, (old, new) in pairs if old != new), min(len(self.read), len(ids)))
        self.matcher.rollback(len(self.read) - shared)
        count = self.matcher.try_consume_tokens(ids[shared:])
        if self.matcher.is_error():
            raise RunError(f"llguidance cannot follow the text: {self.matcher.get_error()}")
        self.read = ids[: shared + count]
        return len(self.read) == len(ids)
