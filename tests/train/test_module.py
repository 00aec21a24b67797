"""Inputs of heads that differ between training and decoding: noise, dropout and the heads' own guesses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs, following_ids
from medusa.heads.markov import MarkovHeads
from tests.helpers import HIDDEN, RESIDUAL, VOCAB, random_heads, random_ids, tiny_model
from train import MedusaTrainer, MedusaTrainingArguments
from train.config import HeadsConfig
from train.data.datasets import PackedDataset
from train.data.packing import Example
from train.heads import new_heads
from train.loss.targets import IGNORE
from train.module import HeadsOnBackbone, with_noise, with_own_guesses
from train.scales import even_steps

HEADS, STEPS = 3, 4
GUIDED = {"hidden_noise": 0.1, "dropout": 0.2, "scheduled_sampling": 0.5}


def on_backbone(
    kind: str = "medusa", tmp_path: Path = Path("unused"), form: Mapping[str, Any] | None = None, **settings: Any
) -> HeadsOnBackbone:
    """Random heads of one kind, as the trainer has them; `form`: their other settings."""
    model = tiny_model("llama")
    heads = random_heads(model, HEADS, kind=kind, lm_head="shared", **(form or {}))
    arguments = MedusaTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **settings)
    return HeadsOnBackbone(heads, model, arguments)


def batch(length: int = 40) -> dict[str, torch.Tensor]:
    ids = torch.tensor([random_ids(length, seed=seed) for seed in range(2)])
    return {
        "input_ids": ids,
        "position_ids": torch.arange(length).expand(2, -1),
        "document_ids": torch.zeros_like(ids),
        "loss_mask": torch.ones_like(ids, dtype=torch.bool),
    }


def trainer(output: Path, kind: str, **settings: Any) -> MedusaTrainer:
    examples = [Example(random_ids(30, seed=seed), [True] * 30) for seed in range(16)]
    given = {"max_steps": STEPS, "logging_steps": 1, "save_steps": 2, "disable_tqdm": True, "use_cpu": True, "seed": 1}
    arguments = MedusaTrainingArguments(output_dir=str(output), **given | settings)
    model = tiny_model("llama")
    torch.manual_seed(0)
    heads = new_heads(model, HeadsConfig(num=HEADS, kind=kind), "tiny")
    return MedusaTrainer(model, heads, arguments, train_dataset=PackedDataset(examples, sequence_length=32))


def losses(run: MedusaTrainer) -> list[float]:
    return [line["loss"] for line in run.state.log_history if "loss" in line]


# --- positions -------------------------------------------------------------------------------------------------------


def test_heads_are_taught_where_the_first_of_them_has_a_label() -> None:
    """Before an answer, later heads reach it from positions at which no step starts."""
    answers = (5, 8)  # where they begin
    given = batch(12) | {"loss_mask": torch.arange(12) >= torch.tensor(answers)[:, None]}
    ids, module = given["input_ids"], on_backbone(objective="text")
    found = module.labelled_positions(**given)
    places = [(row, at) for row, first in enumerate(answers) for at in range(first - 2, 10)]
    expected = [
        [int(ids[row, at]) if at < 12 else IGNORE for row, at in ((r, a + k + 2) for r, a in places)]
        for k in range(HEADS)
    ]
    assert found.labels.tolist() == expected
    states = module.states(ids, given["position_ids"])
    assert torch.equal(found.inputs.hidden, torch.stack([states[place] for place in places]))
    counted = module.label_counts(module.with_labels(given))
    assert counted.tolist() == [sum(label != IGNORE for label in labels) for labels in expected]


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_at_the_scale_of_each_state() -> None:
    """The mean of u^2 is a third; 40,000 draws estimate it to half a per cent (3 sigma: 1.4 %)."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 1000) * torch.logspace(-3, 3, 40)[:, None]
    scale = hidden.square().mean(-1, keepdim=True).sqrt()
    noise = (with_noise(hidden, 0.5) - hidden) / scale
    assert noise.abs().max() <= 0.5 + 1e-4
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.square().mean()) / (0.25 / 3) - 1) < 0.014


def test_each_layer_of_a_state_gets_noise_of_its_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-3's heads read several layers, and later ones are often larger; here by 1, 100 and 10,000."""
    module = on_backbone("eagle", form={"block": "gated", "feature_layers": [0, 1, 2]}, hidden_noise=0.5).train()
    states = torch.randn(2, 40, 3, HIDDEN) * torch.tensor([1.0, 100.0, 10_000.0])[:, None]
    shown, inputs = list[torch.Tensor](), module.heads.inputs
    monkeypatch.setattr(module.heads, "inputs", lambda hidden, *rest: shown.append(hidden) or inputs(hidden, *rest))
    module.labelled_positions(**batch(), hidden=states.flatten(-2))
    noise = shown[0].unflatten(-1, (3, HIDDEN)) - states
    relative = noise.abs().amax(-1) / states.square().mean(-1).sqrt()
    assert relative.max() <= 0.5 + 1e-3
    assert relative.min() > 0.3, "one of 32 draws between -0.5 and 0.5 is almost always larger than 0.3"


@pytest.mark.parametrize("kind", RESIDUAL)
def test_noise_is_added_only_to_head_inputs_in_training(kind: str) -> None:
    plain, noisy = on_backbone(kind), on_backbone(kind, hidden_noise=0.1, objective="distill")
    expected, found = plain.train().labelled_positions(**batch()), noisy.train().labelled_positions(**batch())
    assert not torch.equal(found.inputs.hidden, expected.inputs.hidden)
    torch.testing.assert_close(
        found.inputs.hidden, expected.inputs.hidden, rtol=0, atol=float(0.11 * expected.inputs.hidden.abs().max())
    )
    assert found.teacher is not None
    clean = noisy.states(batch()["input_ids"], batch()["position_ids"]).flatten(0, 1)
    assert torch.equal(found.teacher.hidden, clean), "the teacher speaks from what the backbone said"
    assert torch.equal(
        noisy.eval().labelled_positions(**batch()).inputs.hidden,
        plain.eval().labelled_positions(**batch()).inputs.hidden,
    )


# --- several layers --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_labels_come_from_the_last_layer_and_inputs_from_the_chosen_ones() -> None:
    model = tiny_model("llama")
    heads = random_heads(model, HEADS, kind="eagle", block="gated", lm_head="shared", feature_layers=[1, 0])
    module = HeadsOnBackbone(heads, model, MedusaTrainingArguments("unused", use_cpu=True, objective="distill")).train()
    inputs = batch()
    out = model(**{name: inputs[name] for name in ("input_ids", "position_ids")}, output_hidden_states=True)
    found = module.labelled_positions(**inputs)
    joined = torch.cat([out.hidden_states[1], out.hidden_states[0]], dim=-1).flatten(0, 1)
    assert found.teacher is not None
    torch.testing.assert_close(found.inputs.hidden, heads.join(joined)[found.teacher.position])  # type: ignore[operator]
    torch.testing.assert_close(model.lm_head(found.teacher.hidden), out.logits.flatten(0, 1))
    stored = module.states(inputs["input_ids"], inputs["position_ids"])
    again = module.labelled_positions(**inputs, hidden=stored)
    assert torch.equal(again.inputs.hidden, found.inputs.hidden)


def test_new_heads_of_several_layers_start_from_the_last_of_them() -> None:
    model = tiny_model("llama", num_hidden_layers=9)
    heads = new_heads(model, HeadsConfig(num=HEADS, kind="eagle", block="gated", feature_layers="usual"), "tiny")
    assert heads.config.feature_layers == [2, 4, 6]
    backbone = Backbone(model, heads.config.feature_layers)
    ids = batch()["input_ids"]
    hidden = backbone.hidden_states(ids, use_cache=False)
    features = heads.features(heads.inputs(hidden, ids, backbone.embed))
    last = nn.functional.normalize(hidden[..., -backbone.hidden_size :], dim=-1).expand(HEADS, -1, -1, -1)
    torch.testing.assert_close(nn.functional.normalize(features, dim=-1), last)


@torch.no_grad()
@pytest.mark.parametrize("size", [0.05, 1, 40])
def test_new_heads_of_several_layers_start_with_small_states_on_every_model(size: float) -> None:
    """The states of all layers grow with the embeddings."""
    model = tiny_model("llama", num_hidden_layers=9)
    model.get_input_embeddings().weight.mul_(size / model.get_input_embeddings().weight.square().mean().sqrt())
    heads = new_heads(model, HeadsConfig(num=HEADS, kind="eagle", block="gated", feature_layers="usual"), "tiny")
    joined = heads.join(Backbone(model, [2, 4, 6]).hidden_states(batch()["input_ids"], use_cache=False))  # type: ignore[operator]
    assert 0.07 < float(joined.square().mean().sqrt()) < 0.14


def test_heads_learn_from_large_states_as_from_states_of_size_1() -> None:
    """Steps on states s times as large give weights 1 / s times as large, also with clipping and weight decay."""
    model = tiny_model("llama")
    sizes = torch.tensor([30.0, 0.2]).repeat_interleave(Backbone(model).hidden_size)
    states = torch.randn(64, len(sizes), generator=torch.Generator().manual_seed(0))
    wanted = torch.randn(64, Backbone(model).hidden_size, generator=torch.Generator().manual_seed(1))
    trained = []
    for scale in (torch.ones_like(sizes), sizes):
        heads = random_heads(model, HEADS, kind="eagle", block="gated", lm_head="shared", feature_layers=[0, 1])
        fc = heads.get_parameter("fc.weight")
        fc.data = torch.randn(fc.shape, generator=torch.Generator().manual_seed(2)) / scale
        with even_steps(heads, scale):
            optimizer = torch.optim.AdamW([fc], lr=0.1, weight_decay=0.5)
            for _ in range(5):
                optimizer.zero_grad()
                (heads.join(states * scale) - wanted).square().mean().backward()  # type: ignore[operator]
                nn.utils.clip_grad_norm_([fc], 1e-3)
                optimizer.step()
        trained.append(fc.detach() * scale)
    torch.testing.assert_close(*trained)
    fc.grad = None
    heads.join(states).sum().backward()  # type: ignore[operator]
    torch.testing.assert_close(fc.grad, states.sum(0).expand_as(fc), msg="the context has ended")


def test_a_step_of_training_is_even_over_layers_of_all_sizes(tmp_path: Path) -> None:
    """Adam's first step changes every weight by the learning rate; here, every weight times the size of its layer."""
    model = tiny_model("llama", num_hidden_layers=9)
    model.get_input_embeddings().weight.data *= 1000
    asked = HeadsConfig(num=HEADS, kind="eagle", block="gated", feature_layers="usual")
    heads = new_heads(model, asked, "tiny")
    before = heads.get_parameter("fc.weight").detach().clone()
    examples = [Example(random_ids(30, seed=seed), [True] * 30) for seed in range(4)]
    given = {"max_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0}
    arguments = MedusaTrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, **given)  # type: ignore[arg-type]
    MedusaTrainer(model, heads, arguments, train_dataset=PackedDataset(examples, sequence_length=32)).train()
    ids = torch.tensor([example.input_ids for example in examples])
    states = Backbone(model, [2, 4, 6]).hidden_states(ids, use_cache=False).unflatten(-1, (3, -1))
    sizes = states.square().mean(-1).sqrt().flatten(0, 1).median(0).values
    assert sizes.min() > 5, "or this shows nothing"
    changed = (heads.get_parameter("fc.weight") - before).abs().unflatten(-1, (3, -1)).amax((0, 2))
    torch.testing.assert_close(changed * sizes, torch.full((3,), 1e-3), rtol=0.3, atol=0)


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_one_lm_head_learns_from_all_heads(tmp_path: Path, backend: str) -> None:
    """The gradient of the LM head that heads share is the sum of those of separate ones."""
    model = tiny_model("llama")
    form: dict[str, Any] = {"kind": "eagle", "block": "gated", "feature_layers": [0, 1]}
    gradients = []
    for lm_head in ("one", "own"):
        heads = random_heads(model, HEADS, lm_head=lm_head, **form)
        with torch.no_grad():
            for seed, (_, parameter) in enumerate(sorted(heads.named_parameters())):
                values = torch.randn(parameter.shape[-2:], generator=torch.Generator().manual_seed(seed)) * 0.2
                parameter.copy_(values)
        module = HeadsOnBackbone(
            heads, model, MedusaTrainingArguments(str(tmp_path), use_cpu=True, loss_backend=backend)
        )
        module(**batch()).objective.backward()
        assert heads.lm_heads is not None
        assert heads.lm_heads.grad is not None
        gradients.append(heads.lm_heads.grad.sum(0))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RESIDUAL)
def test_dropout_applies_to_block_outputs_only_in_training(kind: str) -> None:
    model, block = tiny_model("llama"), "mlp" if kind == "hydra" else "square"
    heads = random_heads(model, 1, kind=kind, block=block, num_layers=1, lm_head="shared")
    if kind == "eagle":
        nn.init.zeros_(heads.out.weight)  # type: ignore[arg-type, union-attr]  # its attention, which is no block
    if isinstance(heads, MarkovHeads):
        nn.init.zeros_(heads.root)  # its term of the root, which is no block
    hidden = torch.randn(4000, Backbone(model).hidden_size)
    inputs = HeadInputs(hidden, torch.randn(4000, 1, hidden.shape[-1]))
    added = heads.features(inputs)[0] - hidden
    heads.set_dropout(0.25)
    assert torch.equal(heads.eval().features(inputs)[0] - hidden, added)
    torch.manual_seed(0)
    dropped = heads.train().features(inputs)[0] - hidden
    gone = dropped.abs() < 1e-6
    # 4000 x 32 draws or more: sigma is 0.0012
    assert abs(float(gone.float().mean()) - 0.25) < 0.01
    torch.testing.assert_close(dropped[~gone], added[~gone] / 0.75, rtol=1e-3, atol=1e-4)


def test_heads_trained_with_dropout_decode_without_dropout(tmp_path: Path) -> None:
    run = trainer(tmp_path, "hydra", dropout=0.5, save_strategy="no")
    run.train()
    assert not any(module.training for module in run.heads.modules())
    run.save_model()
    held = [module.p for module in MedusaHeads.from_pretrained(tmp_path).modules() if isinstance(module, nn.Dropout)]
    assert set(held) == {0.0}, "dropout is a run's, not the heads'"


# --- own guesses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind for kind in RESIDUAL if random_heads(tiny_model("llama"), 1, kind=kind).follows_path]
)
def test_a_head_reads_the_guess_of_the_previous_head(kind: str) -> None:
    """Compared with a loop over positions: with probability 1 every token except the root is a guess."""
    module = on_backbone(kind, scheduled_sampling=1.0, **({"path_dropout": 0.0} if kind == "markov" else {})).train()
    module.scheduled_sampling = 1.0
    backbone, inputs = module.backbone, batch()
    hidden = module.states(inputs["input_ids"], inputs["position_ids"])
    rows = module.labelled_positions(**inputs).inputs.following
    assert rows is not None
    where = [(row, at) for row in range(2) for at in range(40 - 2)]  # positions with a label for head 0
    assert len(where) == len(rows)
    for index in (0, 17, len(where) - 1):
        row, at = where[index]
        text, place = following_ids(inputs["input_ids"], HEADS)[row, at], torch.tensor([row * 40 + at])
        here = module.heads.inputs(hidden, inputs["input_ids"], backbone.embed, inputs["position_ids"], place=place)
        logits = module.heads(here, backbone.lm_head)[:, 0]  # [K, V]
        shown = torch.cat([text[:1], logits.argmax(-1)[: HEADS - 1]])
        torch.testing.assert_close(rows[index], backbone.embed(shown))


@torch.no_grad()
def test_scheduled_sampling_applies_only_in_training() -> None:
    module = on_backbone("hydra", scheduled_sampling=0.3)
    text, backbone = torch.randint(VOCAB, (2000, HEADS)), module.backbone
    inputs = HeadInputs(torch.randn(2000, backbone.hidden_size), backbone.embed(text))
    guesses = with_own_guesses(module.heads, backbone, inputs, text, 1.0)
    changed = with_own_guesses(module.heads, backbone, inputs, text, 0.3) != text
    wrong = guesses != text
    assert not changed[:, 0].any()
    assert not (changed & ~wrong).any()
    assert abs(float(changed[wrong].float().mean()) - 0.3) < 0.03  # 4000 draws: sigma is 0.007
    module.scheduled_sampling = 0.3
    before = module.eval().labelled_positions(**batch()).inputs.following
    module.scheduled_sampling = 0.0
    assert torch.equal(before, module.labelled_positions(**batch()).inputs.following)


def test_the_probability_of_own_guesses_rises_over_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    ours = HeadsOnBackbone.labelled_positions

    def watched(self: HeadsOnBackbone, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.scheduled_sampling)
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(HeadsOnBackbone, "labelled_positions", watched)
    trainer(tmp_path, "recurrent", scheduled_sampling=0.6, save_strategy="no").train()
    assert seen == pytest.approx([0.6 * step / STEPS for step in range(STEPS)])


@pytest.mark.parametrize("kind", ["medusa", "cascade"])
def test_scheduled_sampling_is_rejected_for_heads_without_guesses(kind: str) -> None:
    with pytest.raises(
        RequestError, match=f"training.scheduled_sampling: heads of kind {kind} see no guesses; leave it out"
    ):
        on_backbone(kind, scheduled_sampling=0.5)


# --- path dropout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "share"), [({}, 0.4), ({"path_dropout": 0.0}, 0.0), ({"path_dropout": 0.2}, 0.2)])
@pytest.mark.parametrize("kind", ["markov", "dflash"])
def test_path_dropout_reaches_heads_with_path_terms(kind: str, given: dict[str, float], share: float) -> None:
    assert on_backbone(kind, **given).heads.path_dropout == share


def test_path_dropout_is_rejected_for_other_kinds() -> None:
    for kind, form, found in (("recurrent", {}, "recurrent"), ("dflash", {"edges": "none"}, "dflash without edges")):
        with pytest.raises(RequestError, match=rf"is for heads\.kind markov or dflash, not {found}; leave it out"):
            on_backbone(kind, form=form, path_dropout=0.0)


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle", pytest.param("dflash", marks=pytest.mark.full)])
def test_a_resumed_run_with_one_seed_equals_an_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    def weights(heads: MedusaHeads) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in heads.parameters()])

    def trained(name: str, **settings: float) -> MedusaTrainer:
        run = trainer(tmp_path / name, kind, **settings)
        run.train()
        return run

    once = trained("once", **GUIDED)
    if kind == "eagle":
        assert losses(once) != losses(trained("plain"))
    resumed = trainer(tmp_path / "once", kind, **GUIDED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "once" / "checkpoint-2"))
    assert torch.equal(weights(resumed.heads), weights(once.heads))
