"""decode/stable.py: with stable numerics, the bits of a text do not depend on trees, batches or the drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decode import generate
from decode.bench.methods import transformers_method
from decode.ops import fast_linear
from decode.ops.fast_linear import ROWS
from decode.settings import Settings
from decode.stable import require_stable, stable_forwards
from medusa import Tree
from medusa.errors import OptionError, RequestError
from tests.helpers import left_padded, random_heads, random_ids, random_tree, tiny_model, weekly

NEW = 10
PROMPTS = [random_ids(length, seed=length) for length in (33, 7, 20)]


def written(model: Any, prompts: list[list[int]], numerics: str, **options: Any) -> tuple[Tensor, Tensor]:
    """The new ids [B, NEW] and the logits [NEW, B, V] of texts."""
    how = {"max_new_tokens": NEW, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    out: Any = generate(model, **left_padded(prompts), numerics=numerics, **how, **options)
    return out.sequences[:, -NEW:], torch.stack(out.logits)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", torch.float16), ("mistral, window", torch.bfloat16), *weekly(("llama", torch.bfloat16))],
    ids=str,
)
def test_the_bits_of_trees_batches_and_plain_decoding_are_equal(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    heads = random_heads(model, 5)
    plain = [written(model, [prompt], "stable", tree=Tree.chain(0), heads=heads) for prompt in PROMPTS]
    ids, logits = torch.cat([ids for ids, _ in plain]), torch.cat([logits for _, logits in plain], dim=1)
    ways: list[dict[str, Any]] = [
        *({"heads": heads, "tree": random_tree(nodes, seed=nodes)} for nodes in (2, 9, 40)),
        {"heads": heads, "tree": "dynamic:12"},
        {"drafter": "ngram"},
    ]
    for number, way in enumerate(ways):
        rows = slice(1 if number % 2 else None)
        got, after = written(model, PROMPTS[rows], "stable", **way)
        assert torch.equal(got, ids[rows]), way
        assert torch.equal(after, logits[:, rows]), way
    fast = written(model, PROMPTS, "fast", **ways[2])[1]
    assert not torch.equal(fast, logits), "other forwards have the same bits, too: no power"


def test_generate_of_transformers_has_the_same_bits_in_stable_forwards() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    settings = Settings(max_new_tokens=NEW, ignore_eos=True)
    method = stable_forwards(model)(transformers_method(model, settings))
    expected = written(model, PROMPTS[:1], "stable", drafter="ngram")[0]
    assert method(PROMPTS[:1])[0].new_ids == expected[0].tolist()


@torch.no_grad()
def test_only_stable_forwards_multiply_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    counts = list[int]()
    stock = fast_linear.STOCK

    def counted(input: Tensor, *rest: Any) -> Tensor:
        counts.append(input.numel() // input.shape[-1])
        return stock(input, *rest)

    monkeypatch.setattr("decode.ops.fast_linear.STOCK", counted)
    monkeypatch.setattr("torch.nn.functional.linear", counted)
    ids = torch.tensor([random_ids(2 * ROWS + 5, seed=1)])
    with stable_forwards(model):
        counts.clear()  # `Backbone` has tested the model
        model(ids)
    assert set(counts) == {ROWS}
    counts.clear()
    model(ids)
    assert set(counts) == {ids.numel()}


def test_what_cannot_be_stable_is_refused() -> None:
    with pytest.raises(RequestError, match="eager"):
        require_stable(tiny_model("llama", dtype=torch.bfloat16, attn_implementation="eager"))
    with pytest.raises(RequestError, match="bfloat16 and float16"):
        require_stable(tiny_model("llama"))
    with pytest.raises(RequestError, match="on a CPU"):
        require_stable(tiny_model("llama").to("meta"))
    with pytest.raises(OptionError, match="compiled"):
        Settings(numerics="stable", compile=True)
    with pytest.raises(OptionError, match=r"'stale'.*stable"):
        Settings(numerics="stale")
