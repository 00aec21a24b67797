"""Medusa-2: heads and an adapter learn together, the backbone stays close to the original, and both decode."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from decode.bench.methods import medusa_method, plain_method
from decode.settings import Settings
from medusa.__main__ import main
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.fingerprint import differs
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.loading import LoadOptions, head_sizes, load_backbone
from tests.helpers import HIDDEN, VOCAB, random_heads, random_ids, tiny_model
from tests.train.recipes import recipes, run, same
from train import MedusaTrainer
from train.arguments import MedusaTrainingArguments
from train.config import AdapterConfig, HeadsConfig
from train.data.datasets import PackedDataset
from train.data.packing import Example
from train.heads import new_heads, startable
from train.loss.targets import IGNORE, NEXT, head_labels
from train.medusa2.adapter import adapt, adapter_disabled
from train.medusa2.lm_loss import lm_loss, perplexity, tilt_towards
from train.medusa2.trainer import HeadsAndAdapter, lambda_0_at

LENGTH, STEPS = 32, 4


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A run of `medusa train` with an adapter; keywords override the recipe."""
    rows = [{"input_ids": random_ids(LENGTH, seed=seed)} for seed in range(8)]
    content = recipes(tmp_path, rows, LENGTH, max_steps=STEPS, logging_steps=1, save_steps=2, seed=1)
    usual = {"rank": 4, "alpha": 16, "heads_first": 0.0, "lambda_0": 0.2, "teacher_tilt": 0.0}
    usual["modules"] = ["v_proj", "down_proj"]  # two of the seven linear layers: to make an adapter takes its time

    def run_with(
        output: str = "out", with_: Any = None, training: Any = None, adapter: Any = None, **overrides: Any
    ) -> dict[str, Any]:
        given = content(output, **training or {}) | {"adapter": usual | (adapter or {})} | overrides
        return run(given, **with_ or {}).to_dict()

    return run_with


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[MedusaTrainer]:
    """The trainers that run."""
    trainers: list[MedusaTrainer] = []
    start = MedusaTrainer.train
    monkeypatch.setattr(MedusaTrainer, "train", lambda self, **kw: (trainers.append(self), start(self, **kw))[1])
    return trainers


# --- what is learned --------------------------------------------------------------------------------------------------


def rates_of(trainer: MedusaTrainer) -> tuple[set[float], set[float]]:
    """The learning rates of the heads and of the adapter; the optimiser holds each of their parameters once."""
    groups = [(id(parameter), group["lr"]) for group in trainer.optimizer.param_groups for parameter in group["params"]]
    wanted = [id(parameter) for parameter in trainer.trained.parameters() if parameter.requires_grad]
    assert sorted(parameter for parameter, _ in groups) == sorted(wanted)
    of_heads = {id(parameter) for parameter in trainer.heads.parameters()}
    heads, adapter = ({rate for one, rate in groups if (one in of_heads) == kind} for kind in (True, False))
    return heads, adapter


def test_heads_and_adapter_learn_and_the_backbones_own_weights_do_not(recipe: Any, seen: Any) -> None:
    """By default, the heads learn four times as fast."""
    before = dict(tiny_model("llama").named_parameters())
    recipe(training={"save_strategy": "no", "learning_rate": 4e-3, "lr_scheduler_type": "constant"})
    for name, parameter in seen[0].backbone.model.named_parameters():
        if "lora_" in name:
            assert parameter.requires_grad
            assert parameter.any(), f"{name} has learned: B starts at zero"
        else:
            assert not parameter.requires_grad
            assert torch.equal(parameter, before[name.replace(".base_layer", "")])
    assert rates_of(seen[0]) == ({4e-3}, {1e-3})


def test_only_the_heads_learn_at_first(recipe: Any, seen: Any, tmp_path: Path) -> None:
    recipe(adapter={"heads_first": 0.5})
    halfway, end = adapter_of(tmp_path / "out" / "checkpoint-2"), adapter_of(tmp_path / "out")
    assert not any(tensor.any() for name, tensor in halfway.items() if "lora_B" in name)
    assert all(tensor.any() for name, tensor in end.items() if "lora_B" in name)
    lines = [line for line in seen[0].state.log_history if "lm_loss" in line]
    assert [line["lambda_0"] for line in lines] == [1.0, 0.2, 0.2, 0.2], "as it is for the next step"
    assert [line["lm_loss"] > 0 for line in lines] == [False] * 3 + [True], "B is zero in the first joint step"


def test_the_first_stage_equals_medusa_1(recipe: Any, tmp_path: Path) -> None:
    recipe("joint", training={"max_steps": 2, "save_strategy": "no"}, adapter={"heads_first": 0.99})
    content = json.loads((tmp_path / "joint" / "provenance.json").read_text())["config"]
    alone = {"adapter": None, "output_dir": str(tmp_path / "alone")}
    run(content | alone)
    assert same(tmp_path / "joint", tmp_path / "alone")


@pytest.mark.parametrize(
    ("schedule", "at"),
    [("constant", [1, 0.2, 0.2, 0.2]), ("linear", [1, 0, 0.1, 0.2]), ("sine", [1, 0, 0.2 * math.sqrt(0.5), 0.2])],
)
def test_lambda_0_rises_from_where_the_backbone_joins(schedule: str, at: list[float]) -> None:
    config = AdapterConfig(schedule=schedule, lambda_0=0.2, heads_first=0.5)
    assert [lambda_0_at(config, progress) for progress in (0.4, 0.5, 0.75, 1.0)] == pytest.approx(at)


def test_lambda_0_scales_only_the_backbones_gradient(tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = random_heads(model, 2, lm_head="own")
    rows = PackedDataset([Example(random_ids(LENGTH), [True] * LENGTH)], LENGTH)
    adapt(model.requires_grad_(False), AdapterConfig(rank=4, dropout=0.0))
    module = HeadsAndAdapter(heads, model, MedusaTrainingArguments(str(tmp_path), use_cpu=True), "kl")
    gradients = {}
    for weight in (1.0, 0.25):
        module.lambda_0 = weight
        module.zero_grad()
        losses = module(**{name: tensor[None] for name, tensor in rows[0].items()})
        losses.objective.backward()
        gradients[weight] = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert any("lora_B" in name for name in gradients[1.0])
    for name, gradient in gradients[1.0].items():
        # B is zero: nothing has moved, the divergence is at its minimum, and all that the adapter feels is the heads.
        share = 0.25 if "lora_" in name else 1.0
        torch.testing.assert_close(gradients[0.25][name], share * gradient, atol=1e-5, rtol=1e-4)


# --- the LM loss ------------------------------------------------------------------------------------------------------


def test_the_lm_loss_is_the_divergence_or_the_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.medusa2.lm_loss.chunk_rows", lambda *args: 3)
    head = torch.nn.Linear(8, VOCAB).requires_grad_(False)
    teacher, labels = torch.randn(7, 8), torch.randint(0, VOCAB, (7,))
    gradients = []
    for kind in ("kl", "text"):
        hidden = torch.randn(7, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        ours = lm_loss(head, hidden, labels, teacher if kind == "kl" else None)
        (ours_grad,) = torch.autograd.grad(ours, hidden)
        if kind == "kl":
            p, log_q = head(teacher).softmax(-1), head(hidden).log_softmax(-1)
            plain = (p * (p.log() - log_q)).sum(-1).mean()
        else:
            plain = F.cross_entropy(head(hidden), labels)
        (plain_grad,) = torch.autograd.grad(plain, hidden)
        torch.testing.assert_close(ours, plain)  # the same float32 numbers: default tolerances
        torch.testing.assert_close(ours_grad, plain_grad)
        gradients.append(ours_grad)
    assert not torch.allclose(*gradients)
    assert lm_loss(head, teacher, labels, teacher).item() == pytest.approx(0, abs=1e-6)
    assert lm_loss(head, teacher[:0], labels[:0], None).item() == 0


def test_a_tilted_teacher_is_the_product_of_two_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.medusa2.lm_loss.chunk_rows", lambda *args: 3)
    head = torch.nn.Linear(8, VOCAB).requires_grad_(False)
    teacher, labels, foreseen = torch.randn(7, 8), torch.randint(0, VOCAB, (7,)), torch.randn(7, VOCAB).softmax(-1)
    hidden = torch.randn(7, 8).requires_grad_()
    ours = lm_loss(head, hidden, labels, teacher, lambda rows: 0.3 * foreseen[rows].log())
    target = head(teacher).softmax(-1) * foreseen**0.3
    target = target / target.sum(-1, keepdim=True)
    plain = (target * (target.log() - head(hidden).log_softmax(-1))).sum(-1).mean()
    torch.testing.assert_close(ours, plain)  # the same float32 numbers: default tolerances
    torch.testing.assert_close(torch.autograd.grad(ours, hidden), torch.autograd.grad(plain, hidden))


@pytest.mark.parametrize(
    ("kind", "lm_head", "prefix_layers", "dtype"),
    [
        ("medusa", "own", 0, torch.float32),
        ("medusa", "shared", 0, torch.bfloat16),
        ("recurrent", "own", 0, torch.bfloat16),
        ("hydra", "shared", 1, torch.bfloat16),
        ("eagle", "shared", 1, torch.float32),
    ],
)
def test_the_teacher_is_tilted_towards_what_the_first_head_predicted_a_token_before(
    kind: str, lm_head: str, prefix_layers: int, dtype: torch.dtype
) -> None:
    """The heads are float32 on any backbone, and heads of every kind predict as in decoding."""
    model = tiny_model("llama", dtype=dtype)
    heads = random_heads(model, 2, lm_head=lm_head, kind=kind, prefix_layers=prefix_layers).float()
    adapt(model.requires_grad_(False), AdapterConfig(rank=4, dropout=0.0))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], list(range(7))])
    ids = torch.tensor([random_ids(7, seed=1), random_ids(7, seed=2)])
    taught = documents >= 0
    taught[:, -1] = False
    hidden = torch.randn(*documents.shape, HIDDEN, dtype=dtype)
    batch, backbone = {"input_ids": ids, "position_ids": positions, "document_ids": documents}, Backbone(model)
    gain = tilt_towards(heads, backbone, 0.25, hidden, batch, taught)
    found = torch.cat([gain(slice(0, 5)), gain(slice(5, 12))]).reshape(2, 6, VOCAB)
    guess = heads(heads.inputs(hidden, ids, backbone.embed, positions, documents), backbone.lm_head)[0]
    guess = 0.25 * guess.float().log_softmax(-1)  # [2, 7, V]
    for row, position in ((0, 1), (0, 3), (0, 5), (1, 1), (1, 5)):
        torch.testing.assert_close(found[row, position], guess[row, position - 1], rtol=1e-4, atol=1e-5)
    for row, position in ((0, 0), (0, 4), (1, 0)):
        assert not found[row, position].any(), "a document begins here"


def test_a_tilted_teacher_makes_the_text_easier_to_predict(recipe: Any, seen: Any) -> None:
    """The heads are frozen, so the backbone changes: it gives more probability to their guesses."""
    settings = {"max_steps": 5, "save_strategy": "no", "learning_rate": 1e-9, "lr_scheduler_type": "constant"}
    tilted = {"lambda_0": 1e-9, "learning_rate": 3e-2, "teacher_tilt": 0.5, "modules": "all-linear"}
    recipe(training=settings, heads={"num": 2, "lm_head": "shared"}, adapter=tilted)
    (trainer,) = seen
    ids, expected = torch.tensor([random_ids(LENGTH, seed=seed) for seed in range(8)]), []
    for backbone in (Backbone(tiny_model("llama")), trainer.backbone):
        with torch.no_grad():
            hidden = backbone.hidden_states(ids, use_cache=False)
            guess = trainer.heads(HeadInputs(hidden[:, :-1]), backbone.lm_head)[0].log_softmax(-1)
            chosen = backbone.lm_head(hidden[:, 1:]).softmax(-1)
        expected.append(float((chosen * guess).sum(-1).mean()))
    assert trainer.trained.teacher_tilt == 0.5
    assert rates_of(trainer) == ({1e-9}, {3e-2})
    assert expected[1] > expected[0] + 0.3, "nats"


def test_the_teacher_reads_an_adapted_lm_head_without_its_adapter() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(8, VOCAB)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * self.base_layer(rows)

    head, hidden = Adapted(), torch.randn(7, 8)
    p, log_q = head.base_layer(hidden).softmax(-1), head(hidden).log_softmax(-1)
    expected = (p * (p.log() - log_q)).sum(-1).mean()
    ours = lm_loss(head, hidden, torch.zeros(7, dtype=torch.long), hidden)
    torch.testing.assert_close(ours, expected)
    assert ours > 0.01, "the adapter moves it"


def test_the_teacher_is_the_untouched_backbone(llama: Any) -> None:
    model = tiny_model("llama")
    adapt(model.requires_grad_(False), AdapterConfig(rank=4, dropout=0.5))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids = torch.tensor([random_ids(9)])
    model.train()
    with torch.no_grad(), adapter_disabled(model):
        assert torch.equal(model(ids).logits, llama(ids).logits)
    assert model.training
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if "lora_" in name)
    assert not torch.allclose(model.eval()(ids).logits, llama(ids).logits)


def test_kl_keeps_the_backbone_unchanged_and_text_does_not(recipe: Any) -> None:
    settings = {"max_steps": 8, "save_strategy": "no", "learning_rate": 2e-2}
    adapter = {"lambda_0": 1e-4, "modules": "all-linear"}
    kept = recipe("kl", training=settings, adapter=adapter)
    learned = recipe("text", training=settings, adapter=adapter | {"lm_loss": "text"})
    assert kept["perplexity_before"] == learned["perplexity_before"]
    assert kept["perplexity_after"] == pytest.approx(kept["perplexity_before"], rel=0.02)
    assert learned["perplexity_after"] < 0.8 * learned["perplexity_before"], "it learns these very texts by heart"


def test_perplexity_equals_transformers_loss(llama: Any) -> None:
    rows = PackedDataset([Example(random_ids(LENGTH, seed=seed), [True] * LENGTH) for seed in range(5)], LENGTH)
    losses = [llama(input_ids=row["input_ids"][None], labels=row["input_ids"][None]).loss for row in rows]
    ours = perplexity(Backbone(llama), rows, batch_size=2)
    assert ours == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)


def test_quality_is_measured_on_the_given_file_and_a_wrong_one_is_refused_first(
    recipe: Any, seen: Any, tmp_path: Path
) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"input_ids": [3] * LENGTH}), encoding="utf-8")
    other = recipe("other", training={"max_steps": 1}, adapter={"quality_data": str(tmp_path / "other.jsonl")})
    rows = PackedDataset([Example([3] * LENGTH, [True] * LENGTH)], LENGTH)
    expected = perplexity(Backbone(tiny_model("llama")), rows)
    assert other["perplexity_before"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(RequestError, match=r"absent\.jsonl"):
        recipe("absent", adapter={"quality_data": str(tmp_path / "absent.jsonl")})
    assert len(seen) == 1, "the second run never began"


def test_next_labels_are_those_of_the_lm_head() -> None:
    ids, documents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]])
    labels = head_labels(ids, torch.ones_like(ids), documents, 1, first=NEXT)
    assert labels.tolist() == [[[6, IGNORE, 8, IGNORE]]]


def test_accumulation_and_memory_saving_change_nothing(recipe: Any, seen: Any, tmp_path: Path) -> None:
    """Micro-batches, checkpointed activations and states of the original backbone from disk give the same outcome."""
    short = {"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "no"}
    recipe("plain", training=short)
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "activation_checkpointing": True}
    recipe("parts", training=short | parts, cache_features=True)
    assert [one.backbone.model.is_gradient_checkpointing for one in seen] == [False, True]
    found = adapter_of(tmp_path / "parts")
    for name, tensor in adapter_of(tmp_path / "plain").items():
        # AdamW divides tiny gradients by their own size: rounding in float32 moves a weight by a share of a step.
        torch.testing.assert_close(found[name], tensor, atol=1e-3, rtol=0)


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_adapter_and_heads_are_saved_and_decode_together(
    recipe: Any, seen: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe(training={"learning_rate": 5e-2}, adapter={"lm_loss": "text", "merge": True, "modules": "all-linear"})
    out = tmp_path / "out"
    loaded = load_backbone(str(out / "adapter"), LoadOptions(device="cpu"))
    heads, ids = MedusaHeads.from_pretrained(out), torch.tensor([random_ids(9)])
    trained = seen[0].backbone.model.eval()
    assert torch.equal(loaded.model(ids).logits, trained(ids).logits)
    assert not torch.allclose(trained(ids).logits, tiny_model("llama")(ids).logits, atol=0.1), "it has moved"
    assert heads.config.backbone["weights"]
    assert not differs(loaded.model, heads.config.backbone)
    settings = Settings(max_new_tokens=8)
    prompts = [random_ids(5, seed=seed) for seed in range(3)]
    plain = [result.new_ids for result in plain_method(loaded.model, settings)(prompts, None)]
    ours = [result.new_ids for result in medusa_method(loaded.model, heads, settings, tree="chain")(prompts, None)]
    assert ours == plain, "the adapted backbone's own text"
    prompt = tmp_path / "prompt.jsonl"
    prompt.write_text(json.dumps({"input_ids": prompts[0]}), encoding="utf-8")
    command = ["generate", "--backbone", str(out / "adapter"), "--heads", str(out), "--prompts", str(prompt)]
    command += ["--tree", "chain", "--max-new-tokens", "8", "--json", str(tmp_path / "g.json")]
    assert main(command) == 0
    assert "another" not in capsys.readouterr().err, "no warning that the heads are another backbone's"
    assert json.loads((tmp_path / "g.json").read_text())["results"][0]["new_ids"] == plain[0]
    merged = load_backbone(str(out / "merged"), LoadOptions(device="cpu")).model
    assert not hasattr(merged, "peft_config")
    # W + BA in one matrix instead of two products: float32 rounding of logits of order 10.
    torch.testing.assert_close(merged(ids).logits, trained(ids).logits, atol=1e-3, rtol=1e-4)
    of_merged = MedusaHeads.from_pretrained(out / "merged" / "heads").config
    assert not differs(merged, of_merged.backbone)
    assert of_merged.base_model_name_or_path == str(out / "merged")
    assert not (out / "checkpoint-2" / "merged").exists()


def test_a_merged_lm_head_leaves_tied_embeddings_alone(recipe: Any, seen: Any, tmp_path: Path) -> None:
    tied = {"lm_head": True, "lm_loss": "text", "merge": True, "learning_rate": 2e-2}
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    place, heads = str(tmp_path / "tied"), {"num": 2, "lm_head": "own"}
    recipe(training={"learning_rate": 5e-2}, adapter=tied, backbone=place, heads=heads)
    ids, trained = torch.tensor([random_ids(9)]), seen[0].backbone.model.eval()
    merged = load_backbone(str(tmp_path / "out" / "merged"), LoadOptions(device="cpu")).model
    torch.testing.assert_close(merged(ids).logits, trained(ids).logits, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(trained(ids).logits, tiny_model("llama", tie_word_embeddings=True)(ids).logits, atol=0.1)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(recipe: Any, tmp_path: Path) -> None:
    recipe("whole", adapter={"heads_first": 0.2, "dropout": 0.1})
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    recipe("resumed", adapter={"heads_first": 0.2, "dropout": 0.1}, with_={"resume": True})
    for name, tensor in adapter_of(tmp_path / "whole").items():
        assert torch.equal(adapter_of(tmp_path / "resumed")[name], tensor)
    assert same(tmp_path / "whole", tmp_path / "resumed")


def test_two_stages_start_from_trained_heads(recipe: Any, seen: Any, tmp_path: Path) -> None:
    recipe("first", training={"max_steps": 1})
    recipe("second", heads={"start": str(tmp_path / "first")}, training={"learning_rate": 1e-60, "max_steps": 1})
    assert same(tmp_path / "first", tmp_path / "second")
    with pytest.raises(RequestError, match=r"heads\.start: .* has block 'mlp', not 'square'"):
        recipe("third", heads={"start": str(tmp_path / "first"), "block": "square"})
    odd, model = {"num": 2, "kind": "recurrent", "prefix_layers": 1, "vocabulary": 32}, tiny_model("llama")
    new_heads(model, HeadsConfig(**odd), "tiny", vocabulary=torch.arange(32)).save_pretrained(tmp_path / "odd")
    sizes = head_sizes(model.config)
    for said in ({"kind": "medusa"}, {"num": 4}, {"prefix_layers": 0}, {"vocabulary": 0}):  # defaults, but said
        assert startable(str(tmp_path / "odd"), HeadsConfig(), *sizes).config.kind == "recurrent"
        with pytest.raises(RequestError, match=rf"heads\.start: .*, not {next(iter(said.values()))!r}"):
            startable(str(tmp_path / "odd"), HeadsConfig(**said), *sizes)
    tiny_model("llama", hidden_size=16).save_pretrained(tmp_path / "small")
    with pytest.raises(RequestError, match=r"has hidden_size 32, not 16"):
        recipe("fourth", heads={"start": str(tmp_path / "first")}, backbone=str(tmp_path / "small"))


def test_the_lm_head_can_be_adapted_too(recipe: Any, seen: Any, tmp_path: Path) -> None:
    faster = {"learning_rate": 2e-2, "lm_loss": "text"}
    short = {"max_steps": 2, "save_strategy": "no"}
    figures = recipe(heads={"num": 2, "lm_head": "own"}, adapter={"lm_head": True} | faster, training=short)
    assert any("lm_head.lora_B" in name and tensor.any() for name, tensor in adapter_of(tmp_path / "out").items())
    ids = torch.tensor([random_ids(9)])
    loaded = load_backbone(str(tmp_path / "out" / "adapter"), LoadOptions(device="cpu")).model
    assert torch.equal(loaded(ids).logits, seen[0].backbone.model.eval()(ids).logits)
    rows = PackedDataset([Example(random_ids(LENGTH, seed=seed), [True] * LENGTH) for seed in range(8)], LENGTH)
    expected = perplexity(Backbone(seen[0].backbone.model), rows)
    assert figures["perplexity_after"] == pytest.approx(expected, rel=1e-6), "with the adapter of the LM head"
    assert figures["perplexity_after"] != pytest.approx(figures["perplexity_before"], rel=1e-3)
    with pytest.raises(RequestError, match=r"adapter\.lm_head needs one LM head per head"):
        recipe("shared", heads={"num": 2, "lm_head": "shared"}, adapter={"lm_head": True})


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_teacher_is_tilted_by_default_if_there_is_one() -> None:
    assert AdapterConfig().teacher_tilt == 0.06
    assert AdapterConfig(teacher_tilt=0.0).teacher_tilt == 0
    assert AdapterConfig(lm_loss="text").teacher_tilt == 0


def test_backbones_that_cannot_be_adapted_are_refused(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="scales or caps its logits"):
        adapt(tiny_model("gemma2"), AdapterConfig())
    with pytest.raises(RequestError, match=r"adapter\.modules is 'no_such', .*; choose one of all-linear, "):
        adapt(tiny_model("llama"), AdapterConfig(modules=["no_such"]))
    tiny_model("llama").save_pretrained(tmp_path / "own")
    adapted = load_backbone(str(tmp_path / "own")).model
    adapt(adapted, AdapterConfig())
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(RequestError, match="an adapter's folder already"):
        recipe("again", backbone=str(tmp_path / "adapter"))
    with pytest.raises(RequestError, match="sharded backbone cannot be adapted"):
        recipe("sharded", shard_backbone=True)
