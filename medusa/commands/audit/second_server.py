"""A second server as the reference that judges what a server wrote."""

from __future__ import annotations

import math
from collections import Counter

import torch

from decode.bench.losslessness.chi2 import GoodnessOfFit, same_distribution
from medusa.commands.audit.asked import Asked, Outcome, Prompt, Setting, Text, first_difference
from medusa.commands.audit.judged import Deviation
from medusa.commands.distill.client import ServerError
from medusa.files import Json

SERVER_TIE = 0.25  # nats; a near tie of two servers: two units in the last place of bfloat16 for logits of 16 to 32


class ServerReference:
    """A second server. Its own greedy texts and samples are compared, and its log-probabilities judge near ties."""

    tolerance = f"near ties: log-probabilities within {SERVER_TIE} nats, two units of bfloat16 for logits of 16 to 32"
    dtype: str | None = None  # unknown

    def __init__(self, asked: Asked, max_tokens: int, draws: int) -> None:
        """Take a server that has been probed; its texts have `max_tokens`, and its tests use `draws` samples."""
        self.asked, self.max_tokens, self.draws = asked, max_tokens, draws
        self._known: dict[int, Text] = {}
        self.limits = [f"as reference, {limit}" for limit in asked.limits]

    def entropy(self, prompt: Prompt) -> float:
        """Return infinity, because the entropy is unknown."""
        return math.inf

    def judge(self, number: int, prompt: Prompt, text: Text) -> tuple[int, list[Deviation]]:
        """Compare a text with the reference's own; where they differ, let it score the server's text."""
        if number not in self._known:
            self._known[number] = self.asked.texts([prompt], self.max_tokens, False, lambda: None)[0]
        own = self._known[number]
        by_id = own.ids is not None and text.ids is not None
        one, other = (own.ids or [], text.ids or []) if by_id else (list(own.text), list(text.text))
        place = first_difference(one, other)
        if place is None and own.ended == text.ended:
            return len(other), []
        at = len(other) if place is None else place
        found = [
            Deviation(number, index, token, best, gap, SERVER_TIE)
            for index, (token, best, gap) in enumerate(self._scored(number, prompt, text))
            if gap > 0
        ]
        if found and at < len(other):  # otherwise the text ended too early, which no token of it shows
            return len(other), found
        shown = 1 if by_id else 20
        written, expected = ("".join(map(str, some[at : at + shown])) or "the end of the text" for some in (other, one))
        return len(other), [Deviation(number, at, written, expected, None, SERVER_TIE)]

    def _scored(self, number: int, prompt: Prompt, text: Text) -> list[tuple[str, str, float]]:
        """Return each token of a text, the reference's first choice there, and how far its log-probability is below.

        The list is empty if the reference does not score given texts (`echo` with `logprobs`)."""
        given: Prompt
        if isinstance(prompt, list) and self.asked.takes_ids:
            if text.ids is None:
                return []
            given = prompt + text.ids
        else:
            given = f"{self.asked.in_form(prompt)}{text.text}"
        body: Json = {"prompt": given, "max_tokens": 0, "temperature": 0.0, "echo": True, "logprobs": 5}
        try:
            scores = self.asked.server.reply("/completions", body)["choices"][0].get("logprobs") or {}
            tokens, own, tops = (scores[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
            before = self._known[number].prompt_tokens or 0
            found = []
            for token, log_p, top in list(zip(tokens, own, tops, strict=True))[before:]:
                best = max(top, key=top.get)
                found.append((str(token), str(best), max(float(top[best]) - float(log_p), 0.0)))
            return found
        except (ServerError, KeyError, TypeError, ValueError) as error:
            told = f"the reference scores no given texts ({error}), so it cannot tell near ties from faults"
            self.limits += [] if told in self.limits else [told]
            return []

    def test(self, prompt: Prompt, setting: Setting, counts: Counter[Outcome]) -> tuple[GoodnessOfFit, str]:
        """Test whether first tokens of both servers follow one distribution, by a two-sample chi-square test."""
        texts = self.asked.samples([(prompt, setting)], self.draws, 1, lambda n: None)[0]
        others = Counter(text.first for text in texts)
        names = sorted({*counts, *others}, key=str)
        one, other = (torch.tensor([some[name] for name in names], dtype=torch.float64) for some in (counts, others))
        return same_distribution(one, other), ""
