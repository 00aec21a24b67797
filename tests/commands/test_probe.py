"""The probe of `medusa fit`: how long answers are."""

from __future__ import annotations

import pytest

from decode.settings import Settings
from decode.texts import TextGenerator
from medusa.commands.fit import probe
from tests.helpers import random_ids, tiny_model


@pytest.mark.parametrize(("seconds", "longest"), [(600.0, 600.0), (0.0, 600.0), (0.0, 0.0)])
def test_answers_are_awaited_until_half_have_ended(
    seconds: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, if there is time; but half of them no longer than a minute. Without an end, answers count as long as
    they may be."""
    monkeypatch.setattr(probe, "ANSWERING", seconds)
    monkeypatch.setattr(probe, "LONGEST", longest)
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    model.generation_config.eos_token_id = [1, 2, 3]  # of 61 tokens
    generator = TextGenerator(model, Settings(max_new_tokens=200, temperature=1.0))
    prompts = [random_ids(5, seed=seed) for seed in range(24)]
    lengths = [len(result.new_ids) for result in generator(prompts, seeds=range(24))]
    mean = sum(lengths) / len(lengths)
    assert 5 < mean < 60
    found = probe._answer_tokens(generator, prompts)
    if longest:  # other random numbers are drawn there
        assert mean / 2 < found < 2 * mean
        whole = abs(found * len(prompts) - round(found * len(prompts))) < 1e-6
        assert whole is (seconds > 0), "the mean of all answers, or an estimate"
    else:
        assert min(lengths) > 1, "no answer ends at once"
        assert found == 200
