"""Texts of a model whose weights are split over two processes by transformers' tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from decode import generate
from medusa.heads.independent import MedusaHeads
from tests.helpers import plain, random_heads, random_ids, tiny_model
from tests.train.processes import as_two_ranks

CASES = {
    "medusa": ({"kind": "medusa"}, "topk:2,2,2"),
    "markov": ({"kind": "markov"}, "dynamic:8"),
    "markov, fewer tokens": ({"kind": "markov", "vocabulary": 40}, "dynamic:8"),
    "eagle": ({"kind": "eagle", "block": "gated"}, "topk:2,2,2"),
}


@pytest.mark.parametrize("family", ["llama", "phi"])  # phi's LM head has a bias
def test_a_split_model_writes_the_same_text(family: str, tmp_path: Path) -> None:
    """Heads of all kinds are whole in every process, also those that look up rows of the LM head."""
    model = tiny_model(family, vocab_size=64)
    model.save_pretrained(tmp_path / "model")
    for name, (settings, _) in CASES.items():
        random_heads(model, **settings).save_pretrained(tmp_path / name)
    prompt = random_ids(9)
    expected = plain(model, prompt, max_new_tokens=16)

    def work() -> None:
        config = DistributedConfig(tp_size=2)
        split = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, distributed_config=config)
        assert type(split.lm_head.weight) is not torch.nn.Parameter, "nothing is split"
        for name, (_, tree) in CASES.items():
            heads = MedusaHeads.from_pretrained(tmp_path / name)
            ids = torch.tensor([prompt])
            found = generate(split, heads, ids, tree=tree, max_new_tokens=16, do_sample=False)
            assert found[0, len(prompt) :].tolist() == expected, name

    as_two_ranks(work, tmp_path)
