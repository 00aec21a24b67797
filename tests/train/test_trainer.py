"""Training runs on a tiny backbone: what they learn, what they leave unchanged, and how they stop and resume."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from decode.bench.methods import medusa_method, plain_method
from decode.settings import Settings
from decode.texts import tau
from medusa.backbone import Backbone
from medusa.errors import RequestError, RunError
from medusa.fingerprint import differs, fingerprint
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import rows_for
from tests.helpers import HIDDEN, VOCAB, random_ids, tiny_model
from tests.train.recipes import recipes, run
from train import MedusaTrainer, MedusaTrainingArguments
from train.callbacks import TimeBudget, summarize
from train.checkpoints import whole_checkpoints
from train.config import HeadsConfig
from train.data.datasets import PackedDataset
from train.data.packing import Example
from train.evaluate import OwnText, head_accuracy
from train.heads import describe, new_heads
from train.loss.objectives import Weighting

PROMPTS, NEW_TOKENS, HEADS = 8, 48, 3


@pytest.fixture
def model() -> Any:
    """A separate backbone, as training freezes it."""
    return tiny_model("llama")


@pytest.fixture(scope="module")
def texts() -> list[OwnText]:
    """Greedy texts of the backbone."""
    backbone = tiny_model("llama")
    prompts = [random_ids(4, seed=seed) for seed in range(PROMPTS)]
    results = plain_method(backbone, Settings(max_new_tokens=NEW_TOKENS))(prompts, None)
    return [OwnText(result.input_ids + result.new_ids, 4) for result in results]


@pytest.fixture
def recipe(texts: list[OwnText], tmp_path: Path) -> Callable[..., Any]:
    """A run of `medusa train`, from its recipe."""
    rows = [{"input_ids": text.input_ids} for text in texts]
    usual = recipes(tmp_path, rows, 52, max_steps=4, logging_steps=2, save_steps=2, use_cpu=True)

    def run_with(train_with: Any = None, content: dict[str, Any] | None = None, **training: Any) -> Any:
        given = usual("out", **training) | {"heads": {"num": HEADS}} | (content or {})
        return run(given, **train_with or {}).to_dict()

    return run_with


def trainer(
    model: Any, texts: list[OwnText], output: Path, heads: HeadsConfig | None = None, **settings: Any
) -> MedusaTrainer:
    dataset = PackedDataset([Example(t.input_ids, [True] * len(t.input_ids)) for t in texts], sequence_length=52)
    given = {"max_steps": 4, "logging_steps": 2, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = MedusaTrainingArguments(output_dir=str(output), **given | settings)
    torch.manual_seed(0)
    fresh = new_heads(model, heads or HeadsConfig(num=HEADS), "tiny")
    return MedusaTrainer(model, fresh, arguments, train_dataset=dataset)


def same_weights(left: MedusaHeads, right: MedusaHeads) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- heads alone are trained (original D9) ---------------------------------------------------------------------------


def test_training_does_not_change_the_backbone(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    """Nor does it with LM heads of their own (tests/train/test_footprint.py)."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = trainer(
        model, texts, tmp_path, HeadsConfig(num=HEADS, lm_head="shared"), learning_rate=1e-2, weight_decay=0.1
    )
    start = {name: tensor.clone() for name, tensor in run.heads.state_dict().items()}
    run.train()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(torch.equal(tensor, start[name]) for name, tensor in run.heads.state_dict().items()), "all learn"


def test_the_trainer_takes_the_options_of_transformers(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    arguments = MedusaTrainingArguments(output_dir=str(tmp_path), max_steps=2, save_strategy="no", use_cpu=True)
    heads = new_heads(model, HeadsConfig(num=1), "tiny")
    start = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    frozen = torch.optim.SGD(heads.parameters(), lr=0.0)
    rows = PackedDataset([Example(t.input_ids, [True] * len(t.input_ids)) for t in texts], sequence_length=52)
    run = MedusaTrainer(model, heads, arguments, {"made": "here"}, train_dataset=rows, optimizers=(frozen, None))
    run.train()
    assert run.provenance == {"made": "here"}
    assert all(torch.equal(tensor, start[name]) for name, tensor in heads.state_dict().items()), "it is the optimiser"


def test_optimizer_and_files_hold_heads_only(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    run = trainer(
        model, texts, tmp_path, HeadsConfig(num=2, block="square", lm_head="own"), save_strategy="steps", save_steps=4
    )
    run.train()
    held = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in run.heads.parameters()}
    published = {f"{head}.{name}" for head in range(2) for name in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert load_file(tmp_path / "checkpoint-4" / "medusa_lm_head.safetensors").keys() == published
    assert not list(tmp_path.rglob("model*.safetensors"))
    optimizer = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(list(run.heads.parameters()))


def test_new_heads_give_the_backbones_logits(model: Any) -> None:
    """Own LM heads are copies of the backbone's, and residual blocks add nothing (paper, 2.2.1; original D13)."""
    hidden = torch.randn(5, HIDDEN)
    for block in ("square", "mlp"):
        for lm_head in ("own", "shared"):
            heads = new_heads(model, HeadsConfig(num=2, block=block, lm_head=lm_head), "tiny")
            for logits in heads(HeadInputs(hidden), model.lm_head):
                torch.testing.assert_close(logits, model.lm_head(hidden), atol=1e-5, rtol=1e-5)


def test_an_lm_head_with_a_bias_is_shared_unless_own_heads_are_requested() -> None:
    """Without the bias, own LM heads would start far from the backbone's logits."""
    phi = tiny_model("phi")
    torch.nn.init.normal_(phi.lm_head.bias)
    hidden = torch.randn(50, HIDDEN)
    chosen = new_heads(phi, HeadsConfig(), "tiny")
    assert (chosen.config.lm_head, chosen.config.block) == ("shared", "mlp")
    assert torch.equal(chosen(HeadInputs(hidden), phi.lm_head)[0].argmax(-1), phi.lm_head(hidden).argmax(-1))
    asked = new_heads(phi, HeadsConfig(block="square"), "tiny")
    assert asked.config.lm_head == "own"
    assert "has a bias" not in describe(chosen.config, 1, Backbone(phi))
    assert "heads.lm_head=shared starts closer" in describe(asked.config, 1, Backbone(phi))


def test_blocks_of_a_head_share_no_weights(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    """`[block] * n` was one shared block (original D12), and saving failed at the end of training."""
    run = trainer(model, texts, tmp_path, HeadsConfig(num=2, block="square", layers=3))
    run.train()
    run.save_model()
    loaded = MedusaHeads.from_pretrained(tmp_path)
    assert same_weights(loaded, run.heads)
    assert loaded.config == run.heads.config
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    first, second = tensors["0.0.linear.weight"], tensors["0.1.linear.weight"]
    assert first.any()
    assert not torch.equal(first, second)


# --- learning --------------------------------------------------------------------------------------------------------


def test_training_raises_accuracy_and_shortens_decoding(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    run = trainer(model, texts, tmp_path, max_steps=30, logging_steps=5, learning_rate=1e-2, seed=1)
    backbone = Backbone(model)
    before = head_accuracy(backbone, run.heads, texts)
    run.train()
    after = head_accuracy(backbone, run.heads.eval(), texts)
    for untrained, trained in zip(before.heads, after.heads, strict=True):
        assert trained.top["1"] > untrained.top["1"] + 0.3
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    prompts = [text.input_ids[:4] for text in texts]
    settings = Settings(max_new_tokens=NEW_TOKENS)
    results = medusa_method(model, run.heads, settings, tree="chain")(prompts, None)
    assert tau(results) > 1.3
    assert [result.input_ids + result.new_ids for result in results] == [text.input_ids for text in texts]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("auto", kind) for kind in ("medusa", "markov")),
        *(pytest.param("auto", kind, marks=pytest.mark.full) for kind in ("eagle-3", "dflash")),
        ("plain", "recurrent"),  # tests/train/test_loss.py compares the two losses
    ],
)
def test_sequential_heads_learn_from_earlier_tokens(model: Any, tmp_path: Path, kind: str, backend: str) -> None:
    """Random tokens, each followed by its own successor: only heads that read the random token can predict the next.

    At every other position head 1 predicts the root's successor, and head 2 the first guess's successor.
    """
    several: dict[str, Any] = {"kind": "eagle", "block": "gated", "feature_layers": [0, 1], "expansion": None}
    successor = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    made = []
    for seed in range(12):
        drawn = torch.randint(20, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
        ids = [token for first in drawn for token in (first, 20 + successor[first])]
        made.append(OwnText(ids, 1))
    run = trainer(
        model,
        made,
        tmp_path,
        HeadsConfig(
            **(
                {"num": 2, "kind": kind, "block": "mlp", "expansion": 2.0, "lm_head": "shared"}
                | (several if kind == "eagle-3" else {})
                | ({"block": None, "feature_layers": [0, 1]} if kind == "dflash" else {})
            )
        ),
        max_steps={"dflash": 60, "eagle-3": 40}.get(kind, 25),  # attention first learns where to look
        learning_rate=2e-2,
        objective="text",
        loss_backend=backend,
    )
    run.train()
    backbone = Backbone(model, run.heads.config.feature_layers)
    found = head_accuracy(backbone, run.heads, [OwnText(text.input_ids, 1) for text in made]).heads
    for head in found:
        if run.heads.follows_path:
            assert head.top["1"] > 0.45, "half of the labels can be known"
        else:
            assert head.top["1"] < 0.25, "learnt by heart: no power"


def test_the_log_has_every_heads_loss_and_top1(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    run = trainer(model, texts, tmp_path, logging_steps=1, max_steps=2, head_decay=0.5, learning_rate=1e-60)
    run.train()
    lines = [line for line in run.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        weighted = sum(0.5**head * line[f"head{head + 1}_loss"] for head in range(HEADS))
        assert line["loss"] == pytest.approx(weighted, abs=2e-3), "both are rounded to four digits"
        assert all(0 <= line[f"head{head + 1}_top1"] <= 1 for head in range(HEADS))


def test_evaluation_gives_accuracies_and_the_trees_tau(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    """On the backbone's own greedy text they equal the figures of `medusa evaluate`."""
    run = trainer(model, texts, tmp_path, eval_tree="chain", objective="distill", per_device_eval_batch_size=3)
    for parameter in run.heads.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    answers = [Example(text.input_ids, [position >= 4 for position in range(52)]) for text in texts]
    run.eval_dataset = PackedDataset(answers, sequence_length=52)
    figures = run.evaluate()
    assert figures["eval_loss"] > 0
    line = next(line for line in run.state.log_history if "eval_loss" in line)
    # The first label of the answer, at 4, is head 1's at position 2: one before the prompt's last.
    expected = head_accuracy(Backbone(model), run.heads, [OwnText(text.input_ids, 3) for text in texts])
    first = expected.heads[0]
    assert line["eval_head1_conditional"] == first.conditional_top1
    chain = [head.conditional_top1 for head in expected.heads]
    gain = chain[0] + chain[0] * chain[1] + chain[0] * chain[1] * chain[2]
    assert line["eval_tau"] == pytest.approx(1 + gain, abs=5e-4), "each is rounded to four digits"
    assert line["eval_tau"] > 1.1, "or nothing was compared"
    for head in range(1, HEADS + 1):
        assert line[f"eval_head{head}_top1"] <= line[f"eval_head{head}_top5"] <= line[f"eval_head{head}_top10"] <= 1
    assert summarize(line).endswith(f"tau {line['eval_tau']:.3f}"), "told on the terminal"
    assert figures["eval_tau"] == line["eval_tau"], "what early stopping and metric_for_best_model can go by"
    assert not any(parameter.grad is not None for parameter in run.heads.parameters())


def test_the_loss_of_an_evaluation_is_a_mean_over_labels(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    """Rows with few labels, or none, do not count as much as others; no more where they have a batch of their own."""
    answers = [
        Example(text.input_ids, [position >= start for position in range(52)])
        for text, start in zip(texts, (2, 52, 44, 20), strict=False)
    ]
    found = []
    for size in (1, 4):
        run = trainer(model, texts, tmp_path, per_device_eval_batch_size=size)
        for parameter in run.heads.parameters():
            parameter.data += torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter)
        run.eval_dataset = PackedDataset(answers, sequence_length=52)
        found.append(run.evaluate()["eval_loss"])
    # Heads further ahead have a label or two less at the end of each row, so the weights are not quite those of each.
    assert found[0] == pytest.approx(found[1], rel=0.01)


@pytest.mark.parametrize(
    ("heads", "backend"),
    [
        ({"kind": "medusa"}, "plain"),
        ({"kind": "hydra", "prefix_layers": 1}, "chunked"),
        ({"kind": "eagle", "block": "gated", "feature_layers": [0, 1]}, "chunked"),
        pytest.param({"kind": "eagle", "block": "gated", "feature_layers": [0, 1]}, "plain", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_heads_in_float32_on_a_bfloat16_backbone(
    texts: list[OwnText], tmp_path: Path, heads: dict[str, Any], backend: str
) -> None:
    """The default on a GPU: training, its evaluation and `medusa evaluate` give the same figures."""
    backbone = tiny_model("llama", dtype=torch.bfloat16)
    asked = HeadsConfig(num=HEADS, lm_head="shared", **heads)
    run = trainer(backbone, texts, tmp_path, asked, max_steps=1, loss_backend=backend)
    run.eval_dataset = run.train_dataset
    run.train()
    figures = run.evaluate()
    assert 0 < figures["eval_loss"] < 100
    assert figures["eval_tau"] > 1.1, "fresh heads repeat the backbone's guess, which is right here and there"
    read = Backbone(backbone, run.heads.config.feature_layers)
    assert head_accuracy(read, run.heads, texts[:1]).tokens > 0


def test_distillation_is_evaluated_on_the_backbones_tokens(model: Any, tmp_path: Path) -> None:
    """On other text, the backbone's tokens differ from the text's."""
    foreign = [OwnText(random_ids(52, seed=seed), 4) for seed in range(4)]
    figures = {}
    for objective in ("text", "argmax", "distill"):
        run = trainer(model, foreign, tmp_path, objective=objective)
        run.eval_dataset = run.train_dataset
        figures[objective] = {key: value for key, value in run.evaluate().items() if "top" in key}
    assert figures["distill"] == figures["argmax"] != figures["text"]


def test_training_stops_when_evaluation_stops_improving(recipe: Any, tmp_path: Path) -> None:
    evaluated = {"eval_data": str(tmp_path / "data.jsonl")}
    settings = {"eval_steps": 1, "early_stopping_patience": 2, "learning_rate": 1e-60, "max_steps": 9}
    assert recipe(content=evaluated, **settings)["steps"] == 3, "the first is the best, two are not better"


def test_the_best_heads_can_be_kept(recipe: Any, tmp_path: Path) -> None:
    """The learning rate ruins the heads after a good first step, so the first checkpoint is saved."""
    recipe(
        content={"eval_data": {"path": str(tmp_path / "data.jsonl"), "sequence_length": 52}},
        **{"max_steps": 3, "eval_steps": 1, "save_steps": 1, "learning_rate": 3.0, "warmup_steps": 3},
        **{"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 3},
    )
    states = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    best = Path(states["best_model_checkpoint"])
    assert best.name == "checkpoint-1"
    assert same_weights(MedusaHeads.from_pretrained(tmp_path / "out"), MedusaHeads.from_pretrained(best))
    assert not same_weights(
        MedusaHeads.from_pretrained(tmp_path / "out"), MedusaHeads.from_pretrained(tmp_path / "out" / "checkpoint-3")
    )


def test_the_best_heads_need_a_checkpoint_at_each_evaluation(recipe: Any, tmp_path: Path) -> None:
    """Otherwise the last ones were kept, without a word."""
    with pytest.raises(RequestError, match=r"add training\.save_steps=1, or save_strategy=best"):
        recipe(
            content={"eval_data": {"path": str(tmp_path / "data.jsonl"), "sequence_length": 52}},
            **{"max_steps": 3, "eval_steps": 1, "save_steps": 2, "load_best_model_at_end": True},
        )


def test_heads_that_diverge_are_not_saved(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"training has diverged: after step [12] the heads are not finite; lower"):
        recipe(max_steps=4, save_steps=1, learning_rate=1e38, max_grad_norm=0.0, warmup_steps=0)
    assert not list(tmp_path.glob("out/**/*.safetensors"))


def test_the_objective_selects_the_labels(model: Any, tmp_path: Path) -> None:
    """On the backbone's own greedy text both are equal; on other text `argmax` is the backbone's own token."""
    foreign = [OwnText(random_ids(52, seed=seed), 4) for seed in range(4)]
    batch_of = trainer(model, foreign, tmp_path).train_dataset
    batch = {name: torch.stack([row[name] for row in batch_of]) for name in batch_of[0]}
    seen = {}
    for objective in ("text", "argmax"):
        run = trainer(model, foreign, tmp_path, objective=objective)
        seen[objective] = run.model(**batch).loss
    assert not torch.allclose(seen["text"], seen["argmax"])
    with torch.no_grad():
        choices = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits.argmax(-1)
    batch["input_ids"], said = batch["input_ids"].clone(), batch["input_ids"]
    said[:, 1:], hidden_of = choices[:, :-1], batch["input_ids"]
    run = trainer(model, foreign, tmp_path, objective="text")
    with torch.no_grad():
        hidden = Backbone(model).hidden_states(hidden_of, position_ids=batch["position_ids"], use_cache=False)
        logits = run.heads(HeadInputs(hidden), model.lm_head)
    for head in range(HEADS):
        offset = head + 2
        expected = torch.nn.functional.cross_entropy(
            logits[head, :, :-offset].flatten(0, 1), said[:, offset:].flatten()
        )
        torch.testing.assert_close(seen["argmax"][head], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_distillation_targets_are_the_backbones_distributions(model: Any, tmp_path: Path, weighting: str) -> None:
    """Compared with a loop over documents with the model's own logits, offsets, boundaries and averages."""
    documents = [random_ids(length, seed=length) for length in (20, 11, 3, 30)]  # 64 tokens in rows of 32
    dataset = PackedDataset([Example(ids, [True] * len(ids)) for ids in documents], sequence_length=32)
    smoothing = {"dpace_smoothing": 0.2} if weighting == "dpace" else {}
    distilled = {"objective": "distill", "teacher_temperature": 0.7, "head_weighting": weighting}
    run = trainer(model, [], tmp_path, **distilled, **smoothing)
    for parameter in run.heads.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    figures = run.model(**{name: torch.stack([row[name] for row in dataset]) for name in dataset[0]})
    pieces = [documents[0], documents[1], documents[2][:1], documents[2][1:], documents[3][:30]]
    sums, weighted, counts = torch.zeros(HEADS), torch.zeros(HEADS), torch.zeros(HEADS)
    with torch.no_grad():
        for ids in pieces:
            hidden = Backbone(model).hidden_states(torch.tensor([ids]), use_cache=False)[0]
            told = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            log_p = run.heads(HeadInputs(hidden), model.lm_head).log_softmax(-1)
            for t in range(len(ids) - 2):
                reach = [head for head in range(HEADS) if t + head + 2 < len(ids)]
                right = [float(log_p[head, t, told[t + head + 1].argmax()].exp()) for head in reach]
                gains = torch.tensor([0.8 * q + 0.2 for q in right]).cumprod(0)
                for head in reach:
                    loss = -((told[t + head + 1] / 0.7).softmax(-1) * log_p[head, t]).sum()
                    weight = 0.8**head if weighting == "decay" else gains[head:].sum()
                    sums[head] += loss
                    weighted[head] += weight * loss
                    counts[head] += 1
    assert figures.total.tolist() == counts.tolist()
    torch.testing.assert_close(figures.loss, sums / counts, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(figures.objective, (weighted / counts).sum(), atol=1e-4, rtol=1e-4)


def test_a_given_decay_selects_decay_weighting(tmp_path: Path) -> None:
    def weighting(**training: Any) -> Weighting:
        return MedusaTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **training).weighting

    assert weighting().kind == "dpace"
    assert weighting(head_decay=0.5) == Weighting("decay", 0.5)
    assert weighting(head_weighting="decay") == Weighting("decay", 0.8), "the paper's"
    with pytest.raises(RequestError, match="leave one of them out"):
        weighting(head_weighting="dpace", head_decay=0.8)


def test_a_backbone_that_caps_its_logits_cannot_be_a_teacher(texts: list[OwnText], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="caps or scales its LM head's output"):
        trainer(tiny_model("gemma2"), texts, tmp_path, objective="distill")


def test_mixed_precision_keeps_the_backbones_dtype(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    """Heads read hidden states in the backbone's dtype in decoding, so training must use this dtype, too."""
    run = trainer(model, texts, tmp_path, HeadsConfig(num=HEADS, kind="eagle"), bf16=True, max_steps=1)
    ids = torch.tensor([texts[0].input_ids])
    positions = torch.arange(ids.shape[1])[None]
    with torch.autocast("cpu", torch.bfloat16):
        states = run.trained.states(ids, positions)
    assert torch.equal(states, run.trained.states(ids, positions))
    run.train()
    run.eval_dataset = run.train_dataset
    assert run.evaluate()["eval_tau"] > 1.1
    assert all(parameter.dtype == torch.float32 for parameter in run.heads.parameters())


def test_rows_without_labels_are_accepted(model: Any, tmp_path: Path) -> None:
    texts = [OwnText([1] * 2 + [VOCAB - 1] * 50, 4)]
    run = trainer(model, texts, tmp_path, max_steps=2, logging_steps=1)
    run.train_dataset.loss_mask[:] = False
    run.train()
    assert all(torch.isfinite(parameter).all() for parameter in run.heads.parameters())


# --- stopping and going on -------------------------------------------------------------------------------------------


def test_old_checkpoints_and_heads_are_never_resumed_or_replaced_silently(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nothing to resume"):
        recipe(train_with={"resume": True})
    recipe(max_steps=6)
    with pytest.raises(RequestError, match=r"holds a checkpoint.*--resume.*--overwrite"):
        recipe()
    assert recipe(train_with={"overwrite": True})["steps"] == 4
    newest = whole_checkpoints(tmp_path / "out")[-1]
    assert newest == tmp_path / "out" / "checkpoint-4", "an old checkpoint-6 would be newer by its number"
    for checkpoint in whole_checkpoints(tmp_path / "out"):
        shutil.rmtree(checkpoint)
    with pytest.raises(RequestError, match="--overwrite"):
        recipe()


def test_a_time_budget_ends_with_a_learning_rate_near_zero(
    model: Any, texts: list[OwnText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the time of day, which somebody sets, jumps by days whenever it is read. A step takes 20 ms."""
    now = 0.0

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal now
        now += 0.02
        return stock(*args, **kwargs)

    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: now)
    days = count(time.time(), 1e6)
    monkeypatch.setattr(time, "time", lambda: next(days))
    settings = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 0.2, "learning_rate": 1e-3}
    run = trainer(model, texts, tmp_path, max_steps=-1, max_minutes=0.5 / 60, **settings)
    before = {name: tensor.clone() for name, tensor in run.heads.state_dict().items()}
    stock = run.compute_loss
    monkeypatch.setattr(run, "compute_loss", compute_loss)
    run.fit_budget()
    assert run.args.max_steps > 25
    assert run.args.save_steps == 5, "a share of the steps that fit"
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.heads.state_dict().items()), "only timed"
    start = now
    run.train()
    assert now - start == pytest.approx(0.5)
    rates = [line["learning_rate"] for line in run.state.log_history if "learning_rate" in line]
    assert max(rates) > 5e-4
    assert run.lr_scheduler.get_last_lr()[0] < 1e-4


def test_a_time_budget_is_used_up_where_later_epochs_are_faster(
    model: Any, texts: list[OwnText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU keeps the states of a backbone, here one whose forwards take 100 times as long as the rest of a step."""
    now = 0.0

    def passing(seconds: float) -> None:
        nonlocal now
        now += seconds

    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: now)
    model.get_decoder().register_forward_pre_hook(lambda *_: passing(0.5))
    run = trainer(model, texts, tmp_path, max_steps=-1, max_minutes=1 / 60, save_minutes=0.0)
    run.heads.register_forward_pre_hook(lambda *_: passing(0.02))
    run.trained.register_forward_pre_hook(lambda *_: passing(0.02))
    run.train()
    assert run.budget.progress() == 1, f"{now} seconds after {run.state.global_step} steps"


def test_a_cpu_time_budget_is_used_up_on_a_busy_machine(
    model: Any, texts: list[OwnText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 20 ms of CPU time, but waits for seconds while the first steps are timed."""
    now, busy = {"process_time": 0.0, "perf_counter": 0.0, "monotonic": 0.0}, True

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        for clock in now:
            now[clock] += 0.02 + (clock != "process_time" and busy) * 5
        return stock(*args, **kwargs)

    for clock in now:
        monkeypatch.setattr(time, clock, lambda clock=clock: now[clock])
    run = trainer(model, texts, tmp_path, max_steps=-1, max_cpu_minutes=0.5 / 60, save_steps=0.2)
    stock = run.compute_loss
    monkeypatch.setattr(run, "compute_loss", compute_loss)
    run.fit_budget()
    assert run.args.save_steps == 5, "a share of the steps that fit"
    busy = False
    run.train()
    assert run.budget.progress() == 1, f"ended after {run.state.global_step} steps"


def test_a_cpu_time_budget_does_not_count_waiting(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    """Waiting on a busy machine is not counted."""

    class Waits(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.2)

    run = trainer(model, texts, tmp_path, max_steps=4, max_cpu_minutes=0.5 / 60)
    run.add_callback(Waits())
    start = time.process_time()
    run.train()
    assert run.state.global_step == 4 or time.process_time() - start > 0.5, "0.8 s of sleep did not end it"
    with pytest.raises(RequestError, match="two budgets"):
        MedusaTrainingArguments(output_dir=str(tmp_path), max_minutes=1.0, max_cpu_minutes=1.0)


def test_the_learning_rate_follows_steps_or_the_clock_whichever_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("train.callbacks.time.monotonic", lambda: now)
    for spent, factor, where in [
        (0.5, 0.5, "half of the warm-up"),
        (5.5, 0.5, "half of the fall"),
        (8.2, 0.2, "most of the fall"),
        (20.0, 0.0, "never below nothing"),
    ]:
        assert TimeBudget(10.0, spent).learning_rate_factor(warmup=0.1) == pytest.approx(factor), where
    assert TimeBudget(10.0, 1.0).learning_rate_factor(warmup=0.0) == pytest.approx(0.9)
    assert TimeBudget(10.0).learning_rate_factor(warmup=0.1) > 0, "the first step counts too"


def test_a_resumed_run_has_the_remaining_time_budget(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    settings = {"max_minutes": 10.0, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer(model, texts, tmp_path, **settings).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    spent = state["stateful_callbacks"]["TimeBudget"]["attributes"]["elapsed"]
    assert spent > 0
    resumed = trainer(model, texts, tmp_path, **settings | {"max_steps": 3})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.budget in resumed.callback_handler.callbacks, "the clock that stops the run also lowers the rate"
    assert resumed.budget.spent() > spent


def test_the_steps_of_a_resumed_run_are_estimated_on_top_of_those_done(
    model: Any, texts: list[OwnText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slower machine fewer steps fit into the whole budget than the run has done, but the rest is to be used."""
    settings = {"max_minutes": 10.0, "save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    trainer(model, texts, tmp_path, **settings).train()
    monkeypatch.setattr(MedusaTrainer, "seconds_per_step", lambda self: 6000.0)
    resumed = trainer(model, texts, tmp_path, **settings | {"max_steps": -1})
    resumed.train(resume_from_checkpoint=True)  # the last one
    assert resumed.state.global_step == 3 + 10


def test_a_checkpoints_vocabulary_replaces_that_of_new_heads(model: Any, texts: list[OwnText], tmp_path: Path) -> None:
    """Also after a step with the new heads: the probe of a time budget is one."""
    asked = HeadsConfig(num=1, lm_head="shared", vocabulary=32)
    run = trainer(model, texts, tmp_path, asked)
    held = new_heads(model, asked, "tiny", vocabulary=torch.arange(20, 52))
    held.save_pretrained(tmp_path / "checkpoint")
    assert torch.equal(rows_for(run.heads, model.lm_head).weight, model.lm_head.weight[:32])
    run._load_from_checkpoint(str(tmp_path / "checkpoint"))
    assert torch.equal(rows_for(run.heads, model.lm_head).weight, model.lm_head.weight[20:52])


# --- provenance and refusals -----------------------------------------------------------------------------------------


def test_heads_record_their_provenance(
    recipe: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["medusa", "train", "recipe.yaml", "heads.num=3"])
    figures = recipe(max_steps=4, logging_steps=20)  # shorter than the interval of the log
    assert figures["steps"] == 4
    assert {"loss", "seconds", "head1_loss", "head1_top1", f"head{HEADS}_top1"} <= figures.keys()
    told = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert told["command"] == "medusa train recipe.yaml heads.num=3"
    assert told["versions"].keys() >= {"torch", "transformers", "accelerate"}
    assert told["backbone"] == fingerprint(model, str(tmp_path / "backbone"))
    assert not differs(model, told["backbone"])
    assert told["config"]["heads"]["num"] == HEADS
    assert told["data"]["documents"] == PROMPTS
    assert told["result"] == figures
    assert MedusaHeads.from_pretrained(tmp_path / "out").config.base_model_name_or_path == str(tmp_path / "backbone")
