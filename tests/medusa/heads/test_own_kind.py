"""A kind of heads of another package, with a setting, a drafter and a published form: this file, and an entry point."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from annotated_types import Ge
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from decode import generate
from decode.draft import Draft, Frontier
from decode.topology import Topology
from medusa.__main__ import main
from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.stored import Form
from medusa.config import KindSettings, MedusaConfig, require_whole
from medusa.errors import RequestError
from medusa.heads import HEADS, class_of
from medusa.heads.independent import IndependentHeads, MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.heads.kind import TAKEN
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, over_all
from tests.helpers import install, random_ids, tiny_model
from tests.train.recipes import recipes, run
from train.config import HeadsConfig
from train.recipe import parse_recipe

# --- the kind, as another package could define it ---------------------------------------------------------------------


@dataclass
class LowRankSettings(KindSettings):
    """The settings of heads of kind `lowrank`."""

    width: Annotated[int | None, Ge(1)] = None
    """Size of the vectors between a head's two matrices; by default a quarter of the hidden size."""


class LowRankHeads(MedusaHeads):
    """Head k computes h + U_k SiLU(D_k h), where D_k maps H numbers to the width, and U_k back."""

    Settings = LowRankSettings
    block_types = ("lowrank",)
    published_form = f"{__name__}:FORM"
    can_draw = False

    @classmethod
    def check(cls, config: MedusaConfig) -> None:
        assert isinstance(config.own, LowRankSettings)
        config.own.width = config.own.width or config.hidden_size // 4
        require_whole("width", config.own.width, 1, config.hidden_size)

    @classmethod
    def drafts_by(cls, config: MedusaConfig) -> str:
        return f"{__name__}:ChainDrafter"

    def make_blocks(self) -> None:
        assert isinstance(self.config.own, LowRankSettings)
        size, width = self.config.hidden_size, self.config.own.width
        assert width is not None
        self.down = nn.ModuleList(nn.Linear(size, width) for _ in range(self.config.num_heads))
        self.up = nn.ModuleList(nn.Linear(width, size) for _ in range(self.config.num_heads))

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        pairs = list(zip(self.down, self.up, strict=True))[:num_heads]
        return torch.stack([inputs.hidden + up(F.silu(down(inputs.hidden))) for down, up in pairs])


class ChainDrafter:
    """Drafts each head's best guess, as a chain."""

    def __init__(self, heads: MedusaHeads, backbone: Any, tree: Tree, target: object = None) -> None:
        self.heads, self.vocab_size, self.lm_head = heads, backbone.vocab_size, lm_head_for(heads, backbone)
        self.topology = Topology.of(Tree.chain(heads.config.num_heads).to(backbone.device))

    def propose(self, frontier: Frontier) -> Draft:
        logits = over_all(self.heads, self.heads(HeadInputs(frontier.hidden), self.lm_head), self.vocab_size)
        return Draft(torch.cat([frontier.root[:, None], logits.argmax(-1).T], dim=1), self.topology)


def read(stored: Mapping[str, Tensor], published: dict[str, Any], source: str, asked: str) -> Checkpoint:
    """Read a form in which the names of tensors begin with `lowrank.`, and the config has only sizes."""
    tensors = {name.removeprefix("lowrank."): tensor for name, tensor in stored.items()}
    config = MedusaConfig(**published, kind="lowrank", block="lowrank", lm_head="shared")
    return Checkpoint(config, tensors).require_complete(source)


FORM = Form(lambda stored: any(name.startswith("lowrank.") for name in stored), read)

# --- what the package does with it ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "low-rank", {"medusa.heads": {"lowrank": f"{__name__}:LowRankHeads"}})
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(HEADS, "_loaded", {})


def recipe(folder: Path, **heads: Any) -> dict[str, Any]:
    rows = [{"input_ids": random_ids(20, seed=n)} for n in range(8)]
    content = recipes(folder, rows, 16, max_steps=1, warmup_steps=0, use_cpu=True, save_strategy="no")
    return content("heads") | {"heads": {"num": 3, "kind": "lowrank"} | heads}


def test_it_trains_saves_loads_and_decodes_exactly(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(recipe(tmp_path, width=5, vocabulary=40, force_vocabulary=True))
    folder, model = tmp_path / "heads", tiny_model("llama")
    heads = MedusaHeads.from_pretrained(folder)
    assert (type(heads).__name__, heads.config.own.width, heads.down[0].out_features) == ("LowRankHeads", 5, 5)
    assert heads.up[0].weight.abs().max() > 0
    assert not heads.config.servable
    assert replace(heads.config, num_heads=2).width == 5
    assert json.loads((folder / "config.json").read_text("utf-8"))["width"] == 5
    ids = torch.tensor([random_ids(6, seed=9)])
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(generate(model, heads, ids, max_new_tokens=8, do_sample=False), wanted)
    with pytest.raises(RequestError, match="draw"):
        generate(model, heads, ids, max_new_tokens=4, do_sample=True, draft="sample")
    assert main(["info", str(folder)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "kind of heads lowrank (low-rank 0.1)" in told
    assert "settings of the kind width 5 " in told


def test_its_published_form_is_read(tmp_path: Path) -> None:
    heads = MedusaHeads.from_config(MedusaConfig(16, 60, 2, kind="lowrank", block="lowrank", lm_head="shared", width=3))
    save_file(
        {f"lowrank.{name}": tensor for name, tensor in heads.state_dict().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 16, "vocab_size": 60, "num_heads": 2, "width": 3}))
    again = MedusaHeads.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in heads.state_dict().items())
    again.save_pretrained(tmp_path / "ours")
    assert set(load_file(tmp_path / "ours" / "medusa_lm_head.safetensors")) == set(heads.state_dict())
    assert MedusaHeads.from_pretrained(tmp_path / "ours").config == again.config


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ({"width": 0}, "heads.width is 0; it must be at least 1"),
        ({"width": "wide"}, "heads.width is 'wide'; it must be"),
        ({"width": 5000}, "heads.width is 5000; it must be a whole number from 1 to 1024"),
        ({"widht": 5}, "unknown key heads.widht; did you mean heads.width"),
        ({"kind": "medusa", "width": 5}, "heads.width belongs to kind lowrank, not medusa; leave it out"),
        ({"rank": 5}, "heads.rank belongs to kind markov or dflash, not lowrank; leave it out"),
        ({"block": "square"}, "heads.block square belongs to kind medusa or .*, not lowrank; choose one of lowrank"),
        ({"kind": "lowrnk"}, "heads.kind is 'lowrnk'; choose one of .*, lowrank .did you mean lowrank"),
        ({"feature_layers": [1]}, "heads.feature_layers belongs to kind eagle or dflash, not lowrank; leave it out"),
        ({"lm_head": "one"}, "heads.lm_head one is not for heads of kind lowrank; take own or shared"),
    ],
)
def test_wrong_recipes_are_refused_in_one_line(tmp_path: Path, heads: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_recipe(recipe(tmp_path, **heads), "test")


def test_without_its_package_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MedusaHeads.from_config(MedusaConfig(16, 60, 2, kind="lowrank", block="lowrank")).save_pretrained(
        tmp_path / "heads"
    )
    (entries,) = (tmp_path / "site").rglob("entry_points.txt")
    entries.write_text("[medusa.heads]\nlowrank = nowhere:LowRankHeads\n", encoding="utf-8")
    monkeypatch.setattr(HEADS, "_loaded", {})
    with pytest.raises(RequestError, match=r"heads.kind is 'lowrank'; low-rank 0.1 has it, but does not load: Module"):
        MedusaHeads.from_pretrained(tmp_path / "heads")


def test_its_settings_are_set_read_and_saved_like_fields() -> None:
    config = MedusaConfig(16, 60, kind="lowrank", block="lowrank", width=3)
    config.width = 5
    assert (config.width, config.own.width, config.to_dict()["width"]) == (5, 5, 5)
    assert MedusaConfig.from_dict(config.to_dict()) == config != replace(config, width=3)
    for name in ("rank", "widht", "reads"):
        with pytest.raises(AttributeError):
            setattr(config, name, 5)


def test_settings_of_heads_in_the_published_form_are_saved_and_loaded(tmp_path: Path) -> None:
    HEADS.register("wide", type("WideHeads", (IndependentHeads,), {"Settings": LowRankSettings}))
    heads = MedusaHeads.from_config(MedusaConfig(16, 60, 2, kind="wide", width=7))
    heads.save_pretrained(tmp_path)
    assert "0.0.linear.weight" in load_file(tmp_path / "medusa_lm_head.safetensors")
    assert MedusaHeads.from_pretrained(tmp_path).config == heads.config


class PlainSettings(KindSettings):
    """Settings that lack the decorator."""

    width: int = 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (PlainSettings, "OddHeads.Settings is no dataclass; make it one, with the base class KindSettings"),
        ({"width": 3}, "OddHeads.Settings is no dataclass"),
        (make_dataclass("Bare", [("width", int, 3)]), "OddHeads.Settings is no dataclass; .* KindSettings"),
        (make_dataclass("Needs", [("width", int)], bases=(KindSettings,)), "has no default for width; give it one"),
        *(
            (make_dataclass("Same", [(name, int, 3)], bases=(KindSettings,)), f"has {name}, a name that all kinds use")
            for name in ("hidden_size", "num_heads", "reads", "medusa_num_heads", "version", "layers", "start", "own")
        ),
    ],
)
def test_kinds_with_unusable_settings_are_refused_and_named(
    settings: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = type("OddHeads", (LowRankHeads,), {"Settings": settings})
    with pytest.raises(RequestError, match=said):
        HEADS.register("odd", odd)
    monkeypatch.setitem(globals(), "OddHeads", odd)
    install(tmp_path / "site", "odd", {"medusa.heads": {"odd": f"{__name__}:OddHeads"}})
    (failure,) = (one.failure for one in HEADS.extensions() if one.name == "odd")
    assert failure is not None
    assert re.search(said, failure)
    assert main(["info", "demo"]) == 0
    assert "kind of heads odd (odd 0.1) does not load: OddHeads.Settings" in " ".join(capsys.readouterr().out.split())


def test_no_key_that_all_kinds_have_is_free_for_settings() -> None:
    for kind in HEADS.own:
        class_of(kind).require_registrable()
    keys = MedusaConfig(8, lm_head="shared").to_dict().keys() | HeadsConfig.model_fields.keys()
    assert keys <= TAKEN
