"""References that judge what a server wrote: what they share, and a model that transformers runs here.

The model's logits come from transformers' own forwards, and its distributions from transformers' own processors. None
of this project's decoding takes part, because the server may be `medusa serve`. In shapes, V is the vocabulary, and L
the number of tokens in a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from decode.bench.losslessness.chi2 import GoodnessOfFit, goodness_of_fit
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.commands.audit.asked import Outcome, Prompt, Setting, Text, text_class
from medusa.commands.audit.judged import Deviation
from medusa.loading import text_limits
from medusa.options import dtype_name
from medusa.records.record import continuation_ids, tokens_of

FACTOR = 2.0  # by which gaps may exceed the measured rounding: another engine rounds in other places
NEAREST = 8  # the most probable tokens whose logits' rounding is measured
MEASURED, MEASURED_TOKENS = 3, 32  # prompts, and tokens of each, that are decoded to measure it
BINS = 20  # of the places of tokens in their distributions
CLEAR = 1e-3  # p-values from here on need no other explanation
TOGETHER = 256  # tokens of sampled texts that are read together
REPAIRS = 64  # places of a text where its tokens are found by the reference's guess


class Reference(Protocol):
    """What judges the texts and samples of a server."""

    tolerance: str
    """Which gap counts as a near tie, and why."""
    dtype: str | None
    limits: list[str]
    """What it cannot judge, in sentences."""

    def entropy(self, prompt: Prompt) -> float:
        """Return the entropy of the first token after a prompt, in nats; infinity if it is unknown."""

    def judge(self, number: int, prompt: Prompt, text: Text) -> tuple[int, list[Deviation]]:
        """Return how many tokens of a text were judged, and those that are not the reference's first choice."""

    def test(self, prompt: Prompt, setting: Setting, counts: Counter[Outcome]) -> tuple[GoodnessOfFit, str]:
        """Test how often each first token was sampled; also return a remark, which may be empty."""


class ModelReference:
    """A model and its tokenizer."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos: Sequence[int],
        prompts: Sequence[list[int]],
        max_tokens: int,
        served_context: int | None = None,
    ) -> None:
        """Take a loaded model with its EOS ids, and measure its rounding on the texts after some prompts.

        A text that is judged has `max_tokens`, unless the model, its context or the server's `served_context` ends it.
        """
        self.context = min(filter(None, (text_limits(model.config).context, served_context)), default=None)
        self.model, self.tokenizer, self.eos, self.max_tokens = model, tokenizer, list(eos), max_tokens
        self.dtype: str | None = dtype_name(model.dtype)
        self.limits: list[str] = []
        self.scale, self.rounding = self._measured(prompts)
        self.bound = FACTOR * max(self.rounding, self.unit)
        self.tolerance = (
            f"near ties: gaps of up to {self.bound:.2g}, twice what {self.dtype} changes between a text read "
            "at once and token by token"
        )
        self._places: list[int] = []  # of each token: the index of its text among all different texts
        self._classes: dict[str, int] = {}

    @property
    def unit(self) -> float:
        """A unit in the last place of the largest logit."""
        return torch.finfo(self.model.dtype).eps * self.scale

    def _tensor(self, *texts: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids) for ids in texts], device=Backbone(self.model).device)

    def _logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits [L, V] of a forward over a text."""
        return self._logits_of([ids])[0]

    @torch.inference_mode()
    def _logits_of(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [B, L, V] of a forward over B texts of one length."""
        return self.model(input_ids=self._tensor(*texts), use_cache=False).logits.float().cpu()

    @torch.inference_mode()
    def _last_by_cache(self, ids: Sequence[int]) -> Tensor:
        """Return the logits [V] after a text whose last token is read alone, after a cache of the others."""
        if len(ids) == 1:
            return self._logits(ids)[-1]
        whole = self._tensor(ids)
        cache = self.model(input_ids=whole[:, :-1], use_cache=True).past_key_values
        return self.model(input_ids=whole[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1].float().cpu()

    @torch.inference_mode()
    def _measured(self, prompts: Sequence[list[int]]) -> tuple[float, float]:
        """Return the largest logit's magnitude, and the largest change of the gap between two of the `NEAREST` tokens.

        Texts that transformers decodes token by token are read again in one forward."""
        scale = rounding = 0.0
        for prompt in prompts[:MEASURED]:
            plain = Settings(max_new_tokens=MEASURED_TOKENS, ignore_generation_config=True).generate_kwargs()
            how = plain | {"output_logits": True, "use_cache": True, "return_dict_in_generate": True}
            stock: Any = type(self.model)  # a checkpoint with code of its own may replace the model's `generate`
            done = stock.generate(self.model, self._tensor(prompt), **how)
            stepwise = torch.cat(done.logits).float().cpu()
            at_once = self._logits(done.sequences[0].tolist())[len(prompt) - 1 : -1]
            nearest = stepwise.topk(min(NEAREST, stepwise.shape[1])).indices
            change = (stepwise - at_once).gather(1, nearest)
            scale = max(scale, float(stepwise.abs().amax(-1).max()))
            rounding = max(rounding, float((change.amax(-1) - change.amin(-1)).max()))
        return scale, rounding

    def entropy(self, prompt: Prompt) -> float:
        """Return the entropy of the first token after a prompt, in nats."""
        assert isinstance(prompt, list)
        return float(torch.distributions.Categorical(logits=self._logits(prompt)[-1]).entropy())

    def judge(self, number: int, prompt: Prompt, text: Text) -> tuple[int, list[Deviation]]:
        """Judge a text in one forward: each token must be the most probable one after the text before it."""
        assert isinstance(prompt, list)
        known = text.ids is not None
        ids = list(text.ids) if text.ids is not None else continuation_ids(prompt, text.text, self.tokenizer)
        gaps, best = self._gaps(prompt, ids)
        for _ in range(0 if known else REPAIRS):
            if (repaired := self._repaired(prompt, ids, text.text, gaps, best)) is None:
                break
            ids = repaired
            gaps, best = self._gaps(prompt, ids)
        if text.ended and self.eos and (not ids or ids[-1] not in self.eos):
            ids.append(self.eos[0])
            gaps, best = self._gaps(prompt, ids)
        found = []
        for place, (token, gap, expected) in enumerate(zip(ids, gaps, best, strict=True)):
            if gap > 0:
                written, best_one = (str(self.tokenizer.decode([one])) for one in (token, expected))
                found.append(Deviation(number, place, written, best_one, gap, self.bound))
        early = next((place for place, token in enumerate(ids[:-1]) if token in self.eos), None)
        if early is not None:
            written = str(self.tokenizer.decode([ids[early + 1]]))
            found.append(Deviation(number, early + 1, written, "the end of the text", None, self.bound))
        if not text.ended and self._is_cut(prompt, text):
            found.append(Deviation(number, len(ids), "the end of the text", "another token", None, self.bound))
        return len(ids), found

    def _is_cut(self, prompt: list[int], text: Text) -> bool:
        """Whether a text that the model has not ended is shorter than the limits of tokens and of the context."""
        most = self.max_tokens if self.context is None else min(self.max_tokens, self.context - len(prompt))
        if text.tokens is None:  # in how many tokens a server has written a text is then unknown
            return most > 0 and not text.text
        return text.tokens < most and not (text.ids and text.ids[-1] in self.eos)

    def _gaps(self, prompt: list[int], ids: list[int]) -> tuple[list[float], list[int]]:
        """Return for each token how far its logit is below the largest, and the token that has the largest.

        All EOS tokens count as one."""
        if not ids:
            return [], []
        logits = self._logits(prompt + ids)[len(prompt) - 1 : -1]
        own = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        for place, token in enumerate(ids):
            if token in self.eos:
                own[place] = logits[place, self.eos].max()
        top = logits.max(-1)
        return (top.values - own).tolist(), top.indices.tolist()

    def _repaired(
        self, prompt: list[int], ids: list[int], text: str, gaps: list[float], best: list[int]
    ) -> list[int] | None:
        """Return other tokens of the same text that the reference may have written; `None` if there are none.

        A text can be split into tokens in several ways, and a server that returns no ids does not tell which."""
        place = next((i for i, gap in enumerate(gaps) if gap > self.bound), None)
        if place is None:
            return None
        start = len(str(self.tokenizer.decode(prompt)))
        before = str(self.tokenizer.decode(prompt + ids[:place]))[start:]
        written = str(self.tokenizer.decode([*prompt, *ids[:place], best[place]]))[start:]
        if place == len(ids) - 1 and "\ufffd" in written:
            return ids[:place]  # the text ends within a character
        if len(written) <= len(before) or not text.startswith(written):
            return None
        return [*ids[:place], best[place], *tokens_of(text[len(written) :], self.tokenizer)]

    def test(self, prompt: Prompt, setting: Setting, counts: Counter[Outcome]) -> tuple[GoodnessOfFit, str]:
        """Test first tokens against the distribution of transformers' processors, by a chi-square test.

        Rounding may move a token over the border of top-p, and some engines apply top-p before the temperature. So the
        best fit counts of the distributions that these allow."""
        assert isinstance(prompt, list)
        logits, other = self._logits(prompt)[-1], self._last_by_cache(prompt)
        rounding = float((logits.softmax(-1) - other.softmax(-1)).abs().sum())
        borders = [setting.top_p] if setting.top_p == 1 else [setting.top_p + sign * rounding for sign in (0, -1, 1)]
        found = {}
        for warps_last in (True, False):
            fits = []
            for border in borders:
                asked = setting._replace(top_p=min(max(border, 1e-6), 1.0))
                p, q = (warped(some, asked, warps_last) for some in (logits, other))
                kept = (p > 0) & (q > 0)
                change = float(((p - q).square() / p)[kept].sum())
                # The server and the reference round each logit, which has the variance of a uniform error twice.
                error = FACTOR**2 * change + (self.unit / setting.temperature) ** 2 / 6
                fits.append(goodness_of_fit(*self._counted(counts, p), error))
            found[warps_last] = max(fits, key=lambda fit: fit.p_value)
        if found[True].p_value >= min(CLEAR, found[False].p_value):
            return found[True], ""
        return found[False], "with top-p before temperature"

    @torch.inference_mode()
    def test_texts(
        self, texts: Sequence[tuple[Prompt, Text]], setting: Setting, warps_last: bool, advance: Callable[[], object]
    ) -> GoodnessOfFit:
        """Test all tokens of sampled texts, each by its place in its distribution.

        If the tokens at a place are laid side by side from 0 to 1, the most probable first, each as wide as it is
        probable, then a random point in the width of the written token is uniform, whatever the distribution is."""
        generator, points, impossible = torch.Generator().manual_seed(0), list[Tensor](), 0
        for ids, logits in self._read(texts, advance):
            found, missed = self._points(logits, ids, setting, warps_last, generator)
            points.append(found)
            impossible += missed
        if not points:
            return GoodnessOfFit()
        counts = torch.cat(points).mul(BINS).long().clamp(0, BINS - 1).bincount(minlength=BINS)
        error = (self.unit / setting.temperature) ** 2 / 6
        fit = goodness_of_fit(counts, torch.full((BINS,), 1 / BINS), error)
        return fit._replace(impossible=impossible, p_value=0.0) if impossible else fit

    def _read(
        self, texts: Sequence[tuple[Prompt, Text]], advance: Callable[[], object]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the ids of each text that has any, and the logits [L, V] before them; texts of one length together.

        Texts of different lengths would need padding, which some models do not read as if it were not there."""
        by_length: dict[int, list[tuple[list[int], list[int], bool]]] = {}
        for prompt, text in texts:
            assert isinstance(prompt, list)
            ids = list(text.ids or [])
            unnamed = text.ended and bool(self.eos) and (not ids or ids[-1] not in self.eos)
            ids += self.eos[:1] if unnamed else []
            if ids:
                by_length.setdefault(len(prompt) + len(ids), []).append((prompt, ids, unnamed))
            else:
                advance()
        for length, alike in by_length.items():
            rows = max(TOGETHER // length, 1)
            for some in (alike[start : start + rows] for start in range(0, len(alike), rows)):
                read = self._logits_of([prompt + ids for prompt, ids, _ in some])
                for (prompt, ids, unnamed), logits in zip(some, read, strict=True):
                    before = logits[len(prompt) - 1 : -1]
                    if unnamed:  # the server does not tell which of several EOS it wrote
                        ids[-1] = self.eos[int(before[-1, self.eos].argmax())]
                    yield ids, before
                    advance()

    def _points(
        self, logits: Tensor, ids: Sequence[int], setting: Setting, warps_last: bool, generator: torch.Generator
    ) -> tuple[Tensor, int]:
        """Return the point of each token (`test_texts`), and the number of tokens that top-p excludes for certain."""
        p, token = warped(logits, setting, warps_last), torch.tensor(ids)[:, None]
        own = p.gather(1, token)
        points = (p * (p > own)).sum(-1) + torch.rand(len(ids), generator=generator, dtype=p.dtype) * own[:, 0]
        # Rounding of logits by `bound` moves the sum before a token by at most a quarter of it.
        free = warped(logits, setting._replace(top_p=1.0, temperature=setting.temperature if warps_last else 1.0))
        before = (free * (free > free.gather(1, token))).sum(-1)
        excluded = (own[:, 0] == 0) & (before > setting.top_p + self.bound / setting.temperature / 4)
        return points, int(excluded.sum())

    def _counted(self, counts: Counter[Outcome], p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the counts and probabilities of the outcomes: ids, with all EOS as one, or the texts of tokens."""
        place = torch.arange(len(p))
        by_text = not any(isinstance(outcome, int) for outcome in counts)
        if by_text:
            if not self._places:
                pieces = self.tokenizer.batch_decode([[i] for i in range(len(p))], skip_special_tokens=True)
                texts = [text_class(str(piece)) for piece in pieces]
                self._classes = {text: index for index, text in enumerate(dict.fromkeys(texts))}
                self._places = [self._classes[text] for text in texts]
            place = torch.tensor(self._places)
        elif self.eos:
            place[self.eos] = self.eos[0]
        size = len(p) + 1  # the last one: what no token of this model writes
        merged = torch.zeros(size, dtype=torch.float64).index_add_(0, place, p.double())
        seen = torch.zeros(size, dtype=torch.float64)
        for outcome, count in counts.items():
            if by_text:
                index = self._classes.get(str(outcome), len(p))
            else:
                index = int(place[outcome]) if isinstance(outcome, int) and outcome < len(p) else len(p)
                index = self.eos[0] if outcome == "" and self.eos else index
            seen[index] += count
        return seen, merged


def warped(logits: Tensor, setting: Setting, warps_last: bool = True) -> Tensor:
    """Return the probabilities [V] or [L, V] after temperature and top-p, by transformers' processors.

    `warps_last`: the temperature comes first, as in transformers and vLLM, and not last, as in llama.cpp."""
    chain = [TemperatureLogitsWarper(setting.temperature)] if setting.temperature != 1 else []
    nucleus = [TopPLogitsWarper(setting.top_p)] if setting.top_p < 1 else []
    processors = LogitsProcessorList([*chain, *nucleus] if warps_last else [*nucleus, *chain])
    scores: Any = logits.double().reshape(-1, logits.shape[-1])
    ids: Any = torch.zeros(len(scores), 1, dtype=torch.long)  # which neither processor reads
    return processors(ids, scores).softmax(-1).view_as(logits)
