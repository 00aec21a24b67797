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


@pytest.mark.full
def test_a_split_model_writes_the_same_text(tmp_path: Path) -> None:
    """Heads of all kinds are whole in every process, also those that look up rows of the LM head."""
    prompt, expected, new = random_ids(9), dict[str, list[int]](), 12
    for family in ("phi", "llama"):  # phi's LM head has a bias
        model = tiny_model(family, vocab_size=64)
        model.save_pretrained(tmp_path / family)
        for name, (settings, _) in CASES.items():
            random_heads(model, **settings).save_pretrained(tmp_path / family / name)
        expected[family] = plain(model, prompt, max_new_tokens=new)

    def work() -> None:
        config, ids = DistributedConfig(tp_size=2), torch.tensor([prompt])
        for family, text in expected.items():
            files = tmp_path / family
            split = AutoModelForCausalLM.from_pretrained(files, dtype=torch.float32, distributed_config=config)
            assert type(split.lm_head.weight) is not torch.nn.Parameter, "nothing is split"
            for name, (_, tree) in CASES.items():
                heads = MedusaHeads.from_pretrained(files / name)
                found = generate(split, heads, ids, tree=tree, max_new_tokens=new, do_sample=False)
                assert found[0, len(prompt) :].tolist() == text, (family, name)

    as_two_ranks(work, tmp_path)
