"""decode/bench/chi2.py against scipy and against samples with a known distribution."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from decode.bench.losslessness.chi2 import MIN_EXPECTED, goodness_of_fit, same_distribution


def sample(p: torch.Tensor, draws: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(p, draws, replacement=True, generator=generator).bincount(minlength=len(p))


@pytest.mark.parametrize("seed", range(5))
def test_p_values_equal_scipys(seed: int) -> None:
    p = torch.randn(40, generator=torch.Generator().manual_seed(seed)).double().softmax(-1)
    counts = sample(p, 40_000, seed)
    assert float(p.min()) * 40_000 > MIN_EXPECTED
    ours, theirs = goodness_of_fit(counts, p), stats.chisquare(counts.numpy(), (40_000 * p).numpy())
    assert ours.chi2 == pytest.approx(theirs.statistic)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert ours.degrees_of_freedom == 39


@pytest.mark.parametrize("error", [1e-5, 1e-3, 0.02])
def test_p_values_with_rounding_are_of_the_noncentral_distribution(error: float) -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.03, 0.02]).double()
    found = goodness_of_fit(sample(p + torch.tensor([0.02, -0.02, 0, 0, 0, 0]), 5_000, 0), p, error)
    assert found.p_value == pytest.approx(stats.ncx2.sf(found.chi2, 5, 5_000 * error))


def test_two_samples_are_compared_as_by_scipy() -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05]).double()
    one, other = sample(p, 3_000, 0), sample(p, 7_000, 1)
    theirs = stats.chi2_contingency(torch.stack([one, other]).numpy(), correction=False)
    assert same_distribution(one, other).p_value == pytest.approx(theirs.pvalue)
    assert same_distribution(one, sample(p.roll(1), 7_000, 1)).p_value < 1e-9
    assert same_distribution(one, torch.zeros(5)).p_value == 1


def test_small_cells_are_pooled() -> None:
    """Expected 8000, 1940, 30, 18, 12: the last two make a cell of 30; of 1000 draws they join the smallest other."""
    p = torch.tensor([0.8, 0.194, 0.003, 0.0018, 0.0012]).double()
    ours = goodness_of_fit(torch.tensor([7900, 2000, 40, 60, 0]), p)
    assert ours.degrees_of_freedom == 3
    assert ours.chi2 == pytest.approx(100**2 / 8000 + 60**2 / 1940 + 10**2 / 30 + 30**2 / 30)
    ours = goodness_of_fit(torch.tensor([790, 200, 10, 0, 0]), p)
    assert ours.degrees_of_freedom == 1
    assert ours.chi2 == pytest.approx(10**2 / 800 + 10**2 / 200)


def test_an_impossible_draw_fails_at_once() -> None:
    ours = goodness_of_fit(torch.tensor([500_000, 499_999, 1]), torch.tensor([0.5, 0.5, 0.0]))
    assert (ours.impossible, ours.p_value) == (1, 0.0)


def test_distances_of_true_samples_are_as_predicted() -> None:
    """Means over 200 samples: 5 % is far more than their scatter and far less than the factor of a wrong formula."""
    p = torch.randn(300, generator=torch.Generator().manual_seed(0)).mul(2).double().softmax(-1)
    found = [goodness_of_fit(sample(p, 50_000, seed), p) for seed in range(200)]
    mean = torch.tensor([[c.total_variation, c.std_of_difference**2] for c in found]).double().mean(0)
    assert float(mean[0]) == pytest.approx(found[0].expected_total_variation, rel=0.05)
    assert float(mean[1]) ** 0.5 == pytest.approx(found[0].expected_std, rel=0.05)


def test_p_values_of_true_samples_are_uniform() -> None:
    """Kolmogorov-Smirnov at 1e-4: an excess of small p-values would raise the false-alarm rate."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.03, 0.02]).double()
    values = [goodness_of_fit(sample(p, 5_000, seed), p).p_value for seed in range(500)]
    assert stats.kstest(values, "uniform").pvalue > 1e-4


def test_one_outcome_or_no_draw_gives_no_evidence() -> None:
    assert goodness_of_fit(torch.tensor([7]), torch.tensor([1.0])).p_value == 1.0
    assert goodness_of_fit(torch.tensor([0, 0]), torch.tensor([0.5, 0.5])).p_value == 1.0


def test_tiny_p_values_are_accurate() -> None:
    fair = torch.tensor([0.5, 0.5])
    assert goodness_of_fit(torch.tensor([5_200, 4_800]), fair).p_value == pytest.approx(6.33e-5, rel=1e-2)
    assert goodness_of_fit(torch.tensor([6_000, 4_000]), fair).p_value < 1e-80


def test_a_target_of_nan_fails() -> None:
    """All outcomes join the pool, so no degree of freedom is left."""
    assert goodness_of_fit(torch.tensor([500, 500]), torch.tensor([torch.nan, torch.nan])).p_value == 0.0
