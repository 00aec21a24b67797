"""decode/ops/fast_topk.py finds what torch's topk finds; of equal values, it may find others."""

from __future__ import annotations

import pytest
import torch

from decode.ops import fast_topk as greatest
from decode.ops.fast_topk import BLOCK, block_for, by_blocks, top_k

SIZES = [8 * BLOCK, 8 * BLOCK + 1, 9 * BLOCK - 1, 5000]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greatest, "WORTHWHILE", 1)


@pytest.mark.parametrize("size", SIZES)
def test_every_index_is_found(size: int) -> None:
    """This includes the remainder after the last whole block."""
    assert torch.equal(top_k(torch.eye(size), 1).indices[:, 0], torch.arange(size))


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("size", [80 * BLOCK, 80 * BLOCK + 77])
def test_the_k_greatest_in_order(size: int, k: int) -> None:
    values = torch.stack([torch.randperm(size).float() for _ in range(20)])
    values[0] = torch.arange(size)  # all of them in the last block or behind it
    assert all(map(torch.equal, top_k(values, k), values.topk(k)))


@pytest.mark.parametrize("fill", [0.0, -torch.inf, torch.nan])
def test_one_of_compiled_steps(fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps on a CPU find one value by argmax, which the compiler joins with other operations."""
    values = torch.randn(2, 3, 16)
    values[0, 0], values[1, 2, 5] = -torch.inf, fill
    expected = values.topk(1).values
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    found = top_k(values, 1)
    assert torch.equal(found.values.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(found.values.nan_to_num(7.0), values.gather(-1, found.indices).nan_to_num(7.0))


def test_compiled_steps_search_large_vocabularies_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's argmax takes twice as long as the search by blocks (6 x 32,000 values; here `WORTHWHILE` is 1)."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.Tensor, "argmax", None)
    values = torch.randn(2, 8 * BLOCK)
    assert torch.equal(top_k(values, 1).indices[:, 0], torch.from_numpy(values.numpy().argmax(-1)))


@pytest.mark.parametrize(
    ("device", "size", "k", "compiling", "block"),
    [
        ("cuda", 16_384, 16, True, 32),
        ("cuda", 16_384, 32, True, 16),
        ("cuda", 12_000, 1, True, 128),
        ("cuda", 16_384, 16, False, 0),  # starting seven kernels takes longer
        ("cuda", 16_384, 1024, True, 0),
        ("cuda", 32_000, 16, True, 0),  # PyTorch gives a row to several multiprocessors
        ("cuda", 1024, 16, True, 0),  # of pairs of candidates
        ("cpu", 128_256, 16, True, BLOCK),
        ("cpu", 16_384, 32, True, 0),
        ("mps", 128_256, 16, True, 0),
    ],
)
def test_sizes_of_blocks(device: str, size: int, k: int, compiling: bool, block: int) -> None:
    assert block_for(device, 4 * size, size, k, compiling) == block
    assert device == "cpu" or block_for(device, 21 * size, size, k, compiling) == 0, "so it does for more rows"


@pytest.mark.parametrize("size", [8_192, 16_384, 16_384 + 31, 19_999])
@pytest.mark.parametrize("k", [1, 16, 64])
def test_blocks_of_a_gpu_find_the_greatest(size: int, k: int) -> None:
    values = torch.stack([torch.arange(size), torch.arange(size).flip(0), torch.randperm(size)]).float()
    block = block_for("cuda", values.numel(), size, k, compiling=True)
    assert 0 < block < size / k
    assert all(map(torch.equal, by_blocks(values, k, block), values.topk(k)))
    tied = torch.randn(3, size).bfloat16().mul(4).round()
    tied[0, 5], tied[1] = torch.nan, -torch.inf
    found = by_blocks(tied, k, block)
    assert torch.equal(found.values.nan_to_num(99.0), tied.topk(k).values.nan_to_num(99.0))
    assert torch.equal(tied.gather(-1, found.indices).nan_to_num(99.0), found.values.nan_to_num(99.0))
    assert all(len(row.unique()) == k for row in found.indices)
