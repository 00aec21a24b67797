"""decode/drafters/heads.py: what the nodes of a static tree hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.draft import Frontier
from decode.drafters.heads import HeadsDrafter
from medusa.backbone import Backbone
from medusa.heads.inputs import HeadInputs
from tests.helpers import random_heads, random_tree


@pytest.mark.parametrize("vocabulary", [None, 40])
@torch.inference_mode()
def test_every_node_holds_the_guess_of_its_rank(llama: Any, vocabulary: int | None) -> None:
    """One drafter drafts for batches of several sizes, as rows end, and no draft changes an earlier one."""
    heads, backbone = random_heads(llama, vocabulary=vocabulary), Backbone(llama)
    if vocabulary is not None:
        assert heads.vocabulary is not None
        heads.vocabulary.copy_(torch.randperm(backbone.vocab_size)[:vocabulary].sort().values)
    tree = random_tree(9, seed=3, max_depth=3)
    drafter, drafts = HeadsDrafter(heads, backbone, tree), []
    for rows in (3, 1, 2, 1):
        hidden, root = torch.randn(rows, backbone.hidden_size), torch.randint(backbone.vocab_size, (rows,))
        draft = drafter.propose(Frontier(root, hidden, list(range(rows))))
        logits = heads(HeadInputs(hidden), drafter.lm_head)  # [k, B, V]
        assert draft.ids.shape == (rows, tree.num_nodes)
        wanted = []
        for row in range(rows):
            ranked = logits[:, row].argsort(-1, descending=True)
            known = ranked if heads.vocabulary is None else heads.vocabulary[ranked]
            expected = [known[depth - 1, rank] for depth, rank in zip(tree.depth[1:], tree.rank[1:], strict=True)]
            wanted.append([int(root[row]), *map(int, expected)])
        drafts.append((draft.ids, wanted))
    for ids, wanted in drafts:
        assert ids.tolist() == wanted
