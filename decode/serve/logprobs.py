"""Log-probabilities of the tokens of a text, and their form in both endpoints of the OpenAI API.

They are those of the model: the log softmax of its logits, without temperature, penalties or grammars."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from decode.cache import TreeCache
from decode.reader import Reader
from medusa.backbone import Backbone
from medusa.records.pieces import TokenBytes, special_ids

PIECE = 256  # tokens of one forward, so that memory holds the logits of one piece only
UTF_8 = getincrementaldecoder("utf-8")
LOWEST = -9999.0  # JSON has no infinity; OpenAI's own servers give this number too


class ScoredToken(NamedTuple):
    """A token of a text, with its log-probability after the tokens before it."""

    id: int
    log_p: float | None  # `None` for the first token of a prompt, which has no tokens before it
    top: list[tuple[int, float]]  # the most probable tokens at its place, best first, with their log-probabilities


@torch.inference_mode()
def scored(backbone: Backbone, ids: Sequence[int], start: int, count: int) -> list[ScoredToken]:
    """Score the tokens `ids[start:]` of a text, each with the `count` most probable tokens at its place.

    The backbone reads the text again, in pieces and without a draft. So the result does not depend on how the text was
    decoded."""
    if start >= len(ids):
        return []
    cache = TreeCache(backbone.model.config, 1, len(ids), backbone.device)
    reader = Reader(backbone, cache)
    text = torch.tensor([list(ids)], device=backbone.device)
    # longrope rotates a forward by its longest position, so a text that may pass the boundary is read in one forward.
    size = PIECE if backbone.rope_boundary is None else len(ids)
    found = [ScoredToken(ids[0], None, [])] if start == 0 else []
    for first in range(0, len(ids) - 1, size):
        last = min(first + size, len(ids) - 1)  # a piece's last token predicts the token `last`
        positions = torch.arange(first, last, device=text.device)[None]
        cache.open(last - first)
        cache.append(last - first)
        logits = reader.forward(text[:, first:last], positions).logits[0]
        cache.keep([last - first])
        wanted = max(first, start - 1)
        if wanted >= last:
            continue
        log_p = logits[wanted - first :].float().log_softmax(-1).clamp_min(LOWEST)
        own = log_p.gather(1, text[0, wanted + 1 : last + 1, None].to(log_p.device))[:, 0].tolist()
        best = log_p.topk(count)
        rows = zip(ids[wanted + 1 : last + 1], own, best.indices.tolist(), best.values.tolist(), strict=True)
        found += [ScoredToken(token, value, list(zip(*top, strict=True))) for token, value, *top in rows]
    return found


def completion_json(
    tokens: Sequence[ScoredToken], tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()
) -> dict[str, object]:
    """The object `logprobs` of a choice of /v1/completions. `before`: the ids of a prompt that is not scored.

    Special tokens have a name, but no place in the text. Bytes of one character have the same place."""
    token_bytes, special, decoder = TokenBytes(tokenizer), special_ids(tokenizer), UTF_8(errors="replace")
    offsets, tops, place = list[int](), list[dict[str, float] | None](), 0
    first = next((token.id for token in tokens if token.id not in special), None)
    if first is not None and special.issuperset(before) and token_bytes(first).startswith(b" "):
        place = -(not str(tokenizer.decode([first])).startswith(" "))  # tokenizers may drop a text's first space
    for token in tokens:
        offsets.append(max(place, 0))
        place += 0 if token.id in special else len(decoder.decode(token_bytes(token.id)))
        # Several ids may have one text, such as parts of characters: the most probable of them stays.
        listed = {_text(token_bytes(other)): log_p for other, log_p in reversed(token.top)}
        tops.append(None if token.log_p is None else {_text(token_bytes(token.id)): token.log_p} | listed)
    texts, values = [_text(token_bytes(token.id)) for token in tokens], [token.log_p for token in tokens]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_json(tokens: Sequence[ScoredToken], tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The object `logprobs` of a choice of /v1/chat/completions."""
    token_bytes = TokenBytes(tokenizer)

    def entry(token: int, log_p: float | None) -> dict[str, object]:
        part = token_bytes(token)
        return {"token": _text(part), "logprob": log_p, "bytes": list(part)}

    content = [entry(one.id, one.log_p) | {"top_logprobs": [entry(*other) for other in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def _text(part: bytes) -> str:
    return part.decode(errors="replace")
