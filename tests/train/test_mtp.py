"""`heads.kind: mtp`: the model's own layer for multi-token prediction, fine-tuned for several steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from decode import generate
from medusa import MedusaHeads
from medusa.errors import RequestError
from medusa.native_layers import native_heads
from tests.helpers import plain, random_ids
from tests.native_models import needs_forward_layer, save_native
from tests.published_mtp import save_published
from train.architecture import learning_rate
from train.arguments import MedusaTrainingArguments
from train.check import CONTINUED_RATE, check
from train.config import HeadsConfig
from train.heads import new_heads
from train.module import HeadsOnBackbone
from train.recipe import parse_recipe
from train.run import train

STEPS = 3


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random DeepSeek-V3 with an MTP layer."""
    path = tmp_path_factory.mktemp("backbone")
    save_native("deepseek_v3", path)
    return path


@needs_forward_layer
def test_the_loss_is_that_of_forward_layer(backbone: Path, tmp_path: Path) -> None:
    """FastMTP's loss by hand: at each position transformers' code runs the layer, and later steps read its output."""
    model = AutoModelForCausalLM.from_pretrained(backbone).eval()
    heads = new_heads(model, HeadsConfig(kind="mtp", num=STEPS), str(backbone))
    arguments = MedusaTrainingArguments(output_dir=tmp_path, head_decay=0.6, objective="text", use_cpu=True)
    ids = torch.tensor([random_ids(9)])
    positions = torch.arange(9)[None]
    batch = {"input_ids": ids, "position_ids": positions, "document_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        found = HeadsOnBackbone(heads, model, arguments)(**batch, loss_mask=torch.ones_like(ids, dtype=torch.bool))
        layers = MtpModel(model, 1)
        layers.layers[0].load_state_dict(heads.layer.state_dict())  # type: ignore[union-attr]
        hidden, sums = model.model(ids).last_hidden_state, torch.zeros(STEPS)
        for place in range(9):
            feature = hidden[:, : place + 1]
            cache, read = MtpCache(config=model.config.get_mtp_config()), positions[:, 1 : place + 2]
            for step in range(min(STEPS, 9 - 2 - place)):
                tokens = ids[:, 1 : place + 2] if step == 0 else ids[:, place + 1 + step, None]
                feature = layers.forward_layer(0, feature, read, cache, input_ids=tokens)[:, -1:]
                read = read[:, -1:] + 1
                sums[step] += F.cross_entropy(model.lm_head(feature[0]), ids[:, place + 2 + step])
    counts = torch.tensor([9 - 2 - step for step in range(STEPS)])  # positions with a token so far ahead
    assert torch.equal(found.total, counts)
    torch.testing.assert_close(found.loss, sums / counts, rtol=1e-4, atol=1e-5)
    weights = torch.tensor([1, 0.6, 0.36])  # FastMTP's, without its division by their sum
    torch.testing.assert_close(found.objective, (weights * sums / counts).sum(), rtol=1e-4, atol=1e-5)


@pytest.fixture
def recipe(backbone: Path, tmp_path: Path) -> dict[str, Any]:
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"input_ids": random_ids(16, seed=n)}) + "\n" for n in range(6)))
    return {
        "backbone": str(backbone),
        "data": {"path": str(data), "sequence_length": 16},
        "output_dir": str(tmp_path / "out"),
        "heads": {"kind": "mtp", "num": STEPS},
        "device": "cpu",
        "training": {"max_steps": 3, "save_steps": 2, "use_cpu": True, "learning_rate": 1e-3, "head_decay": 0.6},
    }


def test_a_run_fine_tunes_the_layer(backbone: Path, recipe: dict[str, Any]) -> None:
    """All weights of the layer change; the run continues from a checkpoint; and the heads record their origin."""
    output = Path(recipe["output_dir"])
    train(parse_recipe(recipe, "test"), quiet=True)
    heads = MedusaHeads.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(backbone)
    for (name, trained), stored in zip(heads.named_parameters(), native_heads(model, 1).parameters(), strict=True):
        assert not torch.equal(trained, stored), name
    config = heads.config
    assert (config.kind, config.num_heads, config.base_model_name_or_path) == ("mtp", STEPS, str(backbone))
    assert config.mtp is not None
    assert (config.mtp["model_type"], config.mtp["num_hidden_layers"]) == ("deepseek_v3", 2)
    longer = recipe | {"training": recipe["training"] | {"max_steps": 4}}
    train(parse_recipe(longer, "test"), resume=True, quiet=True)
    further = recipe | {"heads": {"start": str(output)}, "output_dir": str(output / "further")}
    further["training"] = recipe["training"] | {"max_steps": 1}
    train(parse_recipe(further, "test"), quiet=True)
    del further["training"]["learning_rate"]
    for heads_asked, share in ((recipe["heads"], 1.0), (further["heads"], CONTINUED_RATE)):
        arguments = check(parse_recipe(further | {"heads": heads_asked}, "test"), quiet=True).arguments
        assert arguments.learning_rate == pytest.approx(0.05 * share * learning_rate(model.config.hidden_size))
    again = MedusaHeads.from_pretrained(output / "further")
    assert again.config.kind == "mtp"
    ids = torch.tensor([random_ids(7)])
    out = generate(model, again, ids, max_new_tokens=6, do_sample=False)
    assert isinstance(out, torch.Tensor)
    assert out[0, 7:].tolist() == plain(model, ids[0].tolist(), max_new_tokens=6)


def test_a_run_starts_from_the_layer_of_a_hybrid_mixture(recipe: dict[str, Any], tmp_path: Path) -> None:
    """The files name the layer in another way, and store its experts one by one."""
    place, output = tmp_path / "hybrid", Path(recipe["output_dir"])
    save_published("qwen3_next", place)
    settings = {"max_steps": 2, "use_cpu": True}  # the first step warms up
    train(parse_recipe(recipe | {"backbone": str(place), "training": settings}, "test"), quiet=True)
    heads, stored = MedusaHeads.from_pretrained(output), native_heads(AutoModelForCausalLM.from_pretrained(place), 1)
    for (name, trained), first in zip(heads.named_parameters(), stored.parameters(), strict=True):
        assert not torch.equal(trained, first), name
        torch.testing.assert_close(trained, first, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": {"kind": "mtp", "block": "mlp"}}, "leave heads.block out"),
        ({"heads": {"kind": "mtp", "lm_head": "own"}}, "leave heads.lm_head out"),
        ({"backbone": "demo"}, "a model of type llama without num_mtp_layers"),
        ({"training": {"dropout": 0.1}}, "heads of kind mtp have no dropout"),
    ],
)
def test_wrong_recipes_are_refused(recipe: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        train(parse_recipe(recipe | changes, "test"), quiet=True)
