"""The rule by which the server chooses how much each step drafts: what has written most tokens a second so far.

A draft of many nodes pays for one text, and costs more than it gains for many. So a server has several drafts, from the
whole tree down to none, and measures them while it decodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

TRIES = 3  # times of a draft with about as many texts, before it is compared with others
SEEN = 16  # steps of one text with a draft, before its tokens a step are compared
WINDOW = 5  # times of which the median counts
HORIZON = 128  # steps of one text: a change of the texts is half noticed after about so many
SHARE = 0.005  # of the time, which may be lost by measuring drafts again that are not the fastest
SHORTEST = 1e-6  # seconds of a step that a coarse clock, as that of Windows, reports as 0
WORTHWHILE = 1.02  # a draft must be so many times as fast as none, or noise would often change the choice


class Pace:
    """Chooses the draft of each step by the tokens a second that it was measured to write.

    The speed of a draft is tau / T. Tau, its tokens a step in one text, is a mean over the last steps, whatever the
    number of texts. T is the median time of its last steps with about as many texts: 1, 2, 3 to 4, 5 to 8, and so on.

    1. A draft that was not measured enough is tried, small ones first, unless what is known of its time makes it slower
       than none: it takes at least as long as a smaller draft, and more texts make it slower, compared with none.
    2. Otherwise the fastest is taken. It is none if no draft is `WORTHWHILE` times as fast.
    3. Each other draft is measured again, for two steps, as soon as its part of `SHARE` of the time pays for what this
       is expected to lose. So a draft that is nearly as fast is measured often, and a slow one rarely.

    The first step after a change is not timed, because a drafter may have to read what was written meanwhile."""

    def __init__(self, nodes: Sequence[int]) -> None:
        """Choose among drafts of so many `nodes`, root included; the last is the root alone (1), which is no draft."""
        self.nodes, self.none = list(nodes), len(nodes) - 1
        self.steps = [0] * len(nodes)  # that had each draft
        self.taus, self.seen = [1.0] * len(nodes), [0] * len(nodes)
        self.times: dict[tuple[int, int], deque[float]] = {}  # by the group of numbers of texts, and the draft
        self.saved = [0.0] * len(nodes)  # seconds that measuring each draft again may lose
        self.last = -1
        self.expected: float | None = None  # while a draft is measured again: seconds a token of the fastest one

    def choose(self, texts: int) -> int:
        """Choose the draft for the next step of so many `texts`; returns its index."""
        if self.expected is not None:
            return self.last
        group, drafts = _group(texts), range(len(self.nodes))
        for draft in reversed(drafts):
            few = self.nodes[draft] > 1 and self.seen[draft] < SEEN
            tried = self.times.get((group, draft), ())
            if few or (len(tried) < TRIES and (tried or not self._is_behind(group, draft))):
                return draft
        costs = [self._cost(group, draft) for draft in drafts]
        best = min(drafts, key=costs.__getitem__)
        for draft in drafts:
            loss = 2 * (costs[draft] - costs[best]) * self.taus[draft]
            if draft != best and self.saved[draft] > loss:
                self.saved[draft] = loss  # with more texts more was saved, which would pay for hundreds of steps here
                self.expected, self.last = costs[best], best
                return draft
        return best

    def add(self, texts: int, draft: int, seconds: float, tokens: int) -> None:
        """Add the time of a step of so many `texts`, and the tokens that it wrote to all of them together."""
        seconds = max(seconds, SHORTEST)
        self.steps[draft] += 1
        self.seen[draft] += texts
        self.taus[draft] += (tokens / texts - self.taus[draft]) * min(1, texts / min(self.seen[draft], HORIZON))
        changed, self.last = draft != self.last, draft
        if not changed:
            self.times.setdefault((_group(texts), draft), deque(maxlen=WINDOW)).append(seconds)
        if self.expected is None:
            for other in range(len(self.nodes)):
                self.saved[other] += SHARE / (len(self.nodes) - 1) * seconds if other != draft else 0
        else:
            self.saved[draft] -= seconds - tokens / texts * self.expected
            self.expected = self.expected if changed else None

    def _is_timed(self, group: int, draft: int) -> bool:
        return len(self.times.get((group, draft), ())) >= TRIES

    def _is_behind(self, group: int, draft: int) -> bool:
        """Whether a draft is slower than none by the times that are known; `False` if none is the draft."""
        return draft != self.none and self._cost(group, draft) > self._cost(group, self.none)

    def _cost(self, group: int, draft: int) -> float:
        """The seconds for one token of each text; the least that are possible, if the draft was not timed."""
        return self._time(group, draft) / self.taus[draft] * (WORTHWHILE if self.nodes[draft] > 1 else 1)

    def _time(self, group: int, draft: int) -> float:
        """The median time of a draft with about as many texts, or else a time that it does not fall below (0: any)."""
        if times := self.times.get((group, draft)):
            return sorted(times)[(len(times) - 1) // 2]
        bounds = [self._time(group, less) for less in range(draft + 1, self.none) if self._is_timed(group, less)]
        for fewer in range(group):
            if self._is_timed(fewer, draft) and self._is_timed(fewer, self.none):
                slower = self._time(fewer, draft) / self._time(fewer, self.none)
                bounds.append(slower * self._time(group, self.none))
        return max(bounds, default=0.0)


def _group(texts: int) -> int:
    return (texts - 1).bit_length()
