"""The acceptance rules that change the text compared with the lossless rule, in speed and in likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from decode.bench.benchmark import Contender, summarize
from decode.bench.figures import LossyFigures
from decode.bench.measure import BenchmarkJob
from decode.results import Result
from decode.settings import LOSSY
from medusa.backbone import Backbone


def compare_lossy_rules(job: BenchmarkJob) -> list[LossyFigures]:
    """Sample with plain decoding, the lossless rule and each lossy rule, in one round at one temperature.

    The temperature is the job's, or 1 if the job is greedy. The mean log-likelihood of a token under the backbone
    measures the quality: text above that of plain sampling is more predictable than the model's own, text below less.
    """
    warm = replace(job.settings, temperature=job.settings.temperature or 1.0, acceptance="rejection")
    contenders = [
        Contender("plain", job.plain(warm)),
        Contender("transformers", job.by_transformers(warm)),
        *(Contender(rule, job.drafted(replace(warm, acceptance=rule))) for rule in ("rejection", *LOSSY)),
    ]
    job.run(contenders, 1, "lossy rules")
    figures = summarize(contenders, [None] * len(job.prompts))
    backbone = Backbone(job.loaded.model)
    return [
        LossyFigures(
            acceptance=contender.name,
            lossless=contender.name not in LOSSY,
            temperature=warm.temperature,
            tau=figures[contender.name].tau,
            speedup_vs_generate=figures[contender.name].speedup_vs_generate,
            log_likelihood=log_likelihood(backbone, contender.rounds[0], warm.temperature),
        )
        for contender in contenders
        if contender.name != "transformers"
    ]


@torch.inference_mode()
def log_likelihood(backbone: Backbone, results: Sequence[Result], temperature: float) -> float:
    """Mean of log p(token | text before it) in nats over all written tokens, p at `temperature` without truncation."""
    total, count = 0.0, 0
    for result in results:
        ids = torch.tensor([result.input_ids + result.new_ids], device=backbone.device)
        hidden = backbone.hidden_states(ids[:, :-1], use_cache=False)[0, len(result.input_ids) - 1 :]
        for part, wanted in zip(hidden.split(64), ids[0, len(result.input_ids) :].split(64), strict=True):
            log_p = (backbone.lm_head(part).float() / temperature).log_softmax(-1)
            total += float(log_p.gather(1, wanted[:, None]).sum())
        count += len(result.new_ids)
    return total / max(count, 1)
