"""scripts/peers.py: what it counts, what it does with packages that are missing or fail, and its tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import peer_methods
import peers
from decode.bench.methods import Method, medusa_method, plain_method
from decode.settings import Settings
from medusa.errors import RequestError
from medusa.loading import load_backbone
from peer_methods import Counter
from real_measure import SETS
from tests.helpers import HIDDEN, VOCAB, random_heads, random_ids, tiny_model

WORK = {"tau": 1.0, "layers": 2.0, "drafter_layers": 0.0, "heads_read": 1.0, "head_vectors": 1.0}


def test_plain_decoding_applies_each_layer_and_reads_the_head_once_a_token() -> None:
    model, prompts = tiny_model(), [random_ids(7), random_ids(4, seed=1)]
    method = plain_method(model, Settings(max_new_tokens=5, ignore_eos=True))
    assert Counter(model).of(method, prompts) == pytest.approx(WORK | {"layers": len(model.model.layers)})
    assert not model.model.layers[0]._forward_hooks


def test_guesses_cost_layers_and_products_of_the_head() -> None:
    """After the prompt, each step drafts three tokens by the LM head, and reads four rows of the model."""
    model, prompts = tiny_model(), [random_ids(6)]
    heads = random_heads(model, 3, lm_head="shared")
    method = medusa_method(model, heads, Settings(max_new_tokens=8, ignore_eos=True), tree="chain")
    steps, counter = len(method(prompts)[0].step_lengths), Counter(model)
    found = counter.of(method, prompts)
    assert counter.forwards == steps
    assert counter.applied == len(model.model.layers) * (len(prompts[0]) + 4 * (steps - 1))
    assert found["tau"] == 8 / steps
    assert found["head_vectors"] == pytest.approx((1 + (4 + 3) * (steps - 1)) / 8)
    assert found["drafter_layers"] > 0


@pytest.mark.parametrize("inference", [False, True])
def test_products_outside_the_layers_are_heads_by_their_rows(inference: bool) -> None:
    model = tiny_model()
    counter = Counter(model)
    inner = next(part for part in model.model.layers[0].modules() if isinstance(part, nn.Linear))
    half = torch.randn(counter.widest + 1, HIDDEN)
    with counter, torch.inference_mode(inference):
        F.linear(torch.randn(3, HIDDEN), half)
        torch.bmm(torch.randn(2, 4, HIDDEN), half.T.expand(2, -1, -1))  # two heads of their own, four vectors each
        F.linear(torch.randn(2, 5, inner.in_features), inner.weight)
        torch.baddbmm(torch.randn(4, 1, HIDDEN), torch.randn(4, 1, HIDDEN), torch.randn(4, HIDDEN, HIDDEN))
    F.linear(torch.randn(3, HIDDEN), half)
    assert counter.heads_read == pytest.approx(3 * len(half) / VOCAB)
    assert counter.vectors == pytest.approx(11 * len(half) / VOCAB)
    assert counter.drafted == pytest.approx((10 * inner.weight.numel() + 4 * HIDDEN**2) / counter.size)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The command line of a comparison on the embedded model, with random heads and a text of six tokens."""
    for name, (folder, _) in SETS.items():
        (tmp_path / folder).mkdir()
        lines = [json.dumps({"turns": ["Once upon a time"]} if name == "MT-bench" else {"question": f"One {folder}"})]
        (tmp_path / folder / "x.jsonl").write_text("\n".join(lines) + "\n")
    random_heads(load_backbone("demo").model, 2, lm_head="shared").save_pretrained(
        tmp_path / "run" / "stages" / "medusa"
    )
    (tmp_path / "run" / "fit.json").write_text(json.dumps({"request": {"minutes_of_training": 2}, "stages": {}}))
    text = json.dumps({"input_ids": [5, 6, 7, 5, 6, 7], "prompt_tokens": 4})
    (tmp_path / "run" / "stages" / "text.jsonl").write_text(text + "\n")
    words = ["demo", "--data", str(tmp_path), "--run", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    return [*words, "--dtype", "float32", "--each", "1", "--tokens", "4", "--kind", "medusa", "--tuning", "1"]


def fake_methods(given: peer_methods.Settings) -> Iterator[tuple[str, Method]]:
    """The methods of a package: one that decodes plainly, one with a wrong text, one that fails, and a failure."""
    plain = plain_method(given.opened.loaded.model, given.opened.settings)

    def decode(prompt: Any, limit: int) -> list[int]:
        return plain([prompt.tolist()])[0].new_ids

    def fail(prompt: Any, limit: int) -> list[int]:
        raise ValueError("no such layer")

    right, wrong = given.method(decode), given.method(lambda prompt, limit: [1, *decode(prompt, limit)[1:]])
    slow = given.method(lambda prompt, limit: [decode(prompt, limit) for _ in range(9)][-1])
    yield "fake: right", given.fastest("fake: right", {"slow": slow, "fast": right, "failing": given.method(fail)})
    yield "fake: wrong", wrong
    yield "fake: failing", given.method(fail)
    raise RuntimeError("no such kind")


@pytest.mark.full
@pytest.mark.usefixtures("one_tree_check")
def test_packages_are_compared_and_failures_reported(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "VERSIONS", {"pytest": "0", "no-such-package": "1.2"})
    monkeypatch.setattr(peers, "METHODS", {"pytest": fake_methods})
    peers.main(command)
    out, error = capsys.readouterr()
    assert "no-such-package is left out; install it by: pip install no-such-package==1.2" in error
    content = json.loads((tmp_path / "out" / "peers.json").read_text())
    rows, chosen = content["rows"], content["chosen"]
    ours = {"plain", "transformers", "ours: n-grams", "ours: medusa", "ours: medusa and n-grams"}
    assert {*rows} == ours | {"transformers: prompt lookup", "fake: right", "fake: wrong"}
    assert {name: row["equal"] for name, row in rows.items()} == dict.fromkeys(rows, 3) | {"fake: wrong": 0}
    assert rows["plain"] == rows["plain"] | WORK | {"layers": rows["fake: right"]["layers"]}
    assert chosen["fake: right"]["setting"] == "fast"
    assert chosen["fake: right"]["failed_settings"] == {"failing": "no such layer"}
    assert chosen["fake: failing"] == {"failed": "no such layer"}
    assert chosen["pytest"] == {"failed": "no such kind"}
    assert out.strip() == (tmp_path / "out" / "peers.md").read_text().strip()
    assert "| fake: wrong |" in out
    assert str(tmp_path) not in out


def test_a_comparison_without_packages_or_heads_is_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "VERSIONS", {"no-such-package": "1.2"})
    with pytest.raises(RequestError, match=r"pip install no-such-package==1\.2"):
        peers.main(command)
    monkeypatch.setattr(peers, "VERSIONS", {"pytest": "0"})
    command[command.index("--kind") : command.index("--kind") + 2] = []
    with pytest.raises(RequestError, match="has no calibration in float32"):
        peers.main(command)
    (tmp_path / "run" / "fit.json").unlink()
    with pytest.raises(RequestError, match=r"holds no run of real_model\.py"):
        peers.main(command)
