"""decode/drafters/ngram.py: lookups, the incremental index, and tries as tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from decode.bench.methods import medusa_method, transformers_method
from decode.draft import Frontier
from decode.drafters.ngram import NgramConfig, NgramDrafter, NgramIndex
from decode.sequences import Sequences
from decode.settings import Settings
from medusa.loading import LoadOptions, load_backbone


def searched(text: list[int], least: int, n: int, most: int) -> list[int]:
    """A slow, simple version of `NgramIndex.matches`: search the whole text once for every length."""
    found: list[int] = []
    for size in range(n, least - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:] and end not in found:
                found.append(end)
    return found[:most]


@pytest.mark.parametrize("seed", range(6))
def test_an_incremental_index_equals_a_search(seed: int) -> None:
    rng = random.Random(seed)
    least, n, most = rng.choice([(1, 3, 1), (2, 4, 3), (1, 1, 5), (3, 3, 2)])
    index, text = NgramIndex(least, n), []
    for _ in range(40):
        more = [rng.randrange(4) for _ in range(rng.randint(1, 5))]
        index.extend(more)
        text += more
        assert list(index.matches(most)) == searched(text, least, n, most)


def test_only_new_tokens_are_read() -> None:
    index = NgramIndex(1, 3)
    index.extend(list(range(1000)))
    before = sum(map(len, index.ends.values()))
    index.extend([5])
    assert sum(map(len, index.ends.values())) == before + 3


def test_a_match_at_the_end_continues_periodically() -> None:
    """The text repeats three tokens, so one period back only three tokens can be copied."""
    index = NgramIndex(1, 3)
    index.extend([9, 1, 2, 3, 1, 2, 3])
    (place,) = index.matches(1)
    assert place == 4
    assert index.after(place, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert index.after(1, 4) == [1, 2, 3, 1]


class Request:
    """The part of a request that rows need."""

    def __init__(self, prompt: list[int], room: int = 20) -> None:
        self.prompt, self.max_new_tokens, self.criteria = prompt, room, ()


def drafts(plan: NgramConfig, *prompts: list[int], room: int = 20) -> Any:
    sequences = Sequences([Request(p[:-1], room) for p in prompts], None, torch.device("cpu"))  # type: ignore[misc]
    for row, prompt in enumerate(prompts):
        sequences.extend(row, prompt[-1:])
    frontier = Frontier(torch.tensor([p[-1] for p in prompts]), torch.zeros(len(prompts), 1), [*range(len(prompts))])
    return NgramDrafter(sequences, plan).propose(frontier)


def test_worked_example() -> None:
    """7 8 was followed by 1 2 3 (latest) and 4 5 6; 8 was also followed by 9."""
    text = [7, 8, 4, 5, 6, 8, 9, 7, 8, 1, 2, 3, 7, 8]
    chain = drafts(NgramConfig(n=2, tokens=3), text)
    assert chain.ids.tolist() == [[8, 1, 2, 3]]
    assert chain.topology.parent.tolist() == [[0, 0, 1, 2]]
    trie = drafts(NgramConfig(n=2, tokens=2, matches=3), text)
    assert trie.ids.tolist() == [[8, 1, 2, 4, 5, 9, 7]]
    assert trie.topology.parent.tolist() == [[0, 0, 1, 0, 3, 0, 5]]
    assert drafts(NgramConfig(n=2, tokens=2, matches=3, nodes=4), text).ids.tolist() == [[8, 1, 2, 4]]
    assert drafts(NgramConfig(), [1, 2, 3]).ids.tolist() == [[3]], "nothing to copy: the root alone"
    assert drafts(NgramConfig(n=2, tokens=3), text, room=3).ids.tolist() == [[8, 1]], "3 tokens: root, draft, next root"


def test_shorter_rows_are_padded() -> None:
    draft = drafts(NgramConfig(n=2, tokens=2), [1, 2, 3, 1, 2], [4, 5, 6])
    assert draft.ids.tolist() == [[2, 3, 1], [6, 0, 0]]
    trie = drafts(NgramConfig(n=1, tokens=1, matches=2), [1, 2, 1, 3, 1], [4, 5, 6])
    assert trie.ids.tolist() == [[1, 3, 2], [6, 0, 0]]
    assert trie.topology.parent.tolist() == [[0, 0, 0], [0, 0, 1]]


def test_ids_of_transformers_prompt_lookup() -> None:
    """Both decode greedily, with the embedded backbone and a text that repeats its prompt."""
    loaded = load_backbone("demo", LoadOptions("float32"))
    settings = Settings(max_new_tokens=30)
    text = "Tom had a red ball. Tom lost the red ball. Tell it again. Tom had a red ball."
    prompts = [loaded.tokenizer(text)["input_ids"]]
    theirs = transformers_method(loaded.model, settings, prompt_lookup_num_tokens=10)(prompts)
    ours = medusa_method(loaded.model, None, settings, drafter=NgramConfig(n=2, tokens=10))(prompts)
    assert [result.new_ids for result in ours] == [result.new_ids for result in theirs]
    assert max(ours[0].uncut_lengths) > 2, "nothing was copied: no power"
