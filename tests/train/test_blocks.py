"""Training of block drafters: losses with edges, documents in packed rows, and what a block reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.errors import RequestError
from medusa.heads.dflash import DflashHeads
from medusa.vocabulary import lm_head_for
from tests.helpers import BLOCK_FORMS, HIDDEN, VOCAB, random_heads, random_ids, tiny_model
from train import MedusaTrainer, MedusaTrainingArguments
from train.config import HeadsConfig
from train.data.datasets import PackedDataset
from train.data.packing import Example, positions_of
from train.heads import new_heads, startable
from train.loss.targets import IGNORE
from train.module import HeadsOnBackbone

K, LENGTHS = 3, (9, 14, 7)
FORMS = {name: form | {"mask_token": None} for name, form in BLOCK_FORMS.items()}
FORMS["two layers"] = FORMS["dflash, markov"] | {"num_layers": 2, "windows": 5, "causal": None, "lm_head": "one"}
FORMS["vocabulary"] = FORMS["dflash, markov"] | {"vocabulary": 40, "feature_layers": None}
FORMS["vocabulary, pairwise"] = FORMS["dflash, pairwise"] | {"vocabulary": 40}


def module_of(name: str, **settings: Any) -> HeadsOnBackbone:
    """Random heads of a form on a tiny backbone."""
    model = tiny_model("llama")
    heads = random_heads(model, K, **FORMS[name])
    if heads.vocabulary is not None:
        heads.vocabulary = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[: len(heads.vocabulary)]
    return HeadsOnBackbone(heads, model, MedusaTrainingArguments("unused", use_cpu=True, **settings)).eval()


def batch(documents: list[list[int]]) -> dict[str, Tensor]:
    """Pack documents into one row; learn from the third token of each on."""
    ids = torch.tensor([[token for text in documents for token in text]])
    number = torch.tensor([[index for index, text in enumerate(documents) for _ in text]])
    positions = positions_of(number[0])[None]
    return {"input_ids": ids, "position_ids": positions, "document_ids": number, "loss_mask": positions >= 2}


DOCUMENTS = [random_ids(length, seed=length) for length in LENGTHS]


def gradients(module: HeadsOnBackbone, *batches: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the summed objective of batches, each weighted by its labels."""
    module.zero_grad()
    counts = torch.stack([module.label_counts(module.with_labels(one)) for one in batches]).sum(0)
    for one in batches:
        module(**one, counts=counts).objective.backward()
    return {name: torch.zeros(()) if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        *((name, "argmax") for name in FORMS),
        *(
            pytest.param(name, "tv", marks=[pytest.mark.full] * (name not in ("vocabulary", "two layers")))
            for name in FORMS
        ),
    ],
)
def test_chunked_losses_and_gradients_are_the_plain_ones(
    name: str, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.loss.chunked.chunk_rows", lambda *args: 5)
    plain, chunked = (module_of(name, loss_backend=b, objective=objective).train() for b in ("plain", "chunked"))
    found = []
    for module in (plain, chunked):
        torch.manual_seed(0)  # path dropout
        found.append(gradients(module, batch(DOCUMENTS)))
    for parameter, gradient in found[0].items():
        torch.testing.assert_close(found[1][parameter], gradient, rtol=1e-3, atol=1e-5)
        assert gradient.abs().max() > 1e-5, f"{parameter} does not learn: no power"


@pytest.mark.parametrize("name", FORMS)
def test_a_block_never_sees_another_document(name: str) -> None:
    """A packed row teaches what its documents teach alone."""
    module = module_of(name)
    together = gradients(module, batch(DOCUMENTS))
    alone = gradients(module, *(batch([text]) for text in DOCUMENTS))
    for parameter, gradient in together.items():
        torch.testing.assert_close(gradient, alone[parameter], rtol=1e-3, atol=1e-5)


def test_path_dropout_leaves_out_edges_but_those_that_choose_candidates() -> None:
    """Markov edges of the root choose the first candidates, and pairwise edges of the root do not."""
    for name, kept in (("dflash, markov", 1.0), ("dflash, pairwise", 0.5)):
        module = module_of(name, path_dropout=0.5).train()
        inputs = module.labelled_positions(**batch(DOCUMENTS * 12)).inputs
        torch.manual_seed(0)
        assert isinstance(module.heads, DflashHeads)
        shown = module.heads.features(inputs)[..., -module.heads.rank :].any(-1).float().mean(-1)
        # 324 draws: sigma is 0.028
        torch.testing.assert_close(shown, torch.tensor([kept, 0.5, 0.5]), rtol=0, atol=0.1)
        assert module.heads.eval().features(inputs)[..., -module.heads.rank :].any(-1).all()


def test_a_backbone_that_scales_its_embeddings_is_refused() -> None:
    with pytest.raises(RequestError, match="Gemma3ForCausalLM scales its embeddings"):
        new_heads(tiny_model("gemma3_text"), HeadsConfig(kind="dflash"), "tiny")


@pytest.mark.parametrize("wrong", [{"logit_scale": 2.0}, {"logit_cap": 3.0}])
def test_drafters_whose_logits_are_scaled_only_decode(wrong: dict[str, float], tmp_path: Path) -> None:
    heads = random_heads(tiny_model("llama"), K, **FORMS["dflash"] | wrong)
    heads.save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"heads\.start: .* which can decode but not be trained"):
        startable(str(tmp_path), HeadsConfig(start=str(tmp_path)), heads.config.hidden_size, VOCAB)


@pytest.mark.parametrize("objective", ["argmax", "distill", "tv", "mass"])
@torch.no_grad()
def test_confidences_learn_the_share_that_guess_and_target_have_in_common(objective: str) -> None:
    """1 minus the total variation distance, in a loop over the positions at which the head sees the token before.

    D-PACE changes the weights of guesses alone."""
    module = module_of("dflash, markov", objective=objective, head_weighting="dpace", path_dropout=0.4).train()
    heads, text = module.heads, module.with_labels(batch(DOCUMENTS))
    assert isinstance(heads, DflashHeads)
    assert heads.confidence_head is not None
    assert heads.before is not None
    found, ids = module.labelled_positions(**text), text["input_ids"][0]
    torch.manual_seed(0)
    losses, sums = module.losses(found), torch.zeros(K)
    torch.manual_seed(0)
    features, lm_head = heads.features(found.inputs), lm_head_for(heads, module.backbone)
    q, (weight, bias) = heads.logits(features, lm_head).softmax(-1), heads.confidence_head.parameters()
    shown = features[..., HIDDEN:].any(-1)
    for head, row in (shown & (found.labels != IGNORE)).nonzero().tolist():
        place, share = int(text["places"][row]), 0.6 if head else 1.0  # of the positions that are shown
        p = F.one_hot(found.labels[head, row].clamp_min(0), VOCAB).float()
        if found.teacher is not None:
            p = module.backbone.lm_head(found.teacher.hidden[place + head + 1]).softmax(-1)
        target = 1 - (p - q[head, row]).abs().sum() / 2
        read = torch.cat([features[head, row, :HIDDEN], heads.before[ids[place + head + 1]]])
        sure = torch.sigmoid(weight[0] @ read + bias[0])
        sums[head] -= (target * sure.log() + (1 - target) * (1 - sure).log()) / share
    assert losses.confidence is not None
    torch.testing.assert_close(losses.confidence, sums / losses.total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses.sums[3], sums, rtol=1e-4, atol=1e-4)
    assert not shown.all(), "nothing is hidden: no power"
    heads.confidence_head = None
    torch.manual_seed(0)
    term = losses.objective - module.losses(found).objective
    torch.testing.assert_close(term, (torch.tensor([1, 0.8, 0.64]) * losses.confidence).sum(), rtol=1e-4, atol=1e-4)


def pairs(count: int, seed: int) -> list[list[int]]:
    """Texts of random tokens, each of which a token follows that it determines."""
    drawn = torch.randint(0, VOCAB // 2, (count, 8), generator=torch.Generator().manual_seed(seed))
    return torch.stack([drawn, drawn + VOCAB // 2], dim=-1).flatten(1).tolist()


@pytest.mark.full
def test_learned_confidences_predict_on_other_texts_which_guesses_are_right() -> None:
    module = module_of("dflash, markov", objective="text").train()
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(module.heads.parameters(), lr=0.02)
    for step in range(100):
        optimizer.zero_grad()
        module(**batch(pairs(16, step))).objective.backward()
        optimizer.step()
    module.eval()
    with torch.no_grad():
        found = module.labelled_positions(**batch(pairs(64, seed=1000)))
        features = module.heads.features(found.inputs)
        best = module.heads.logits(features, lm_head_for(module.heads, module.backbone)).argmax(-1)
        sure = module.heads.confidence(features)
    for head in range(K):
        known = found.labels[head] != IGNORE
        right, rate = (best == found.labels)[head, known].float(), sure[head, known].sigmoid()
        constant = F.binary_cross_entropy(right.mean().expand_as(right), right)
        assert F.binary_cross_entropy(rate, right) < constant / 2


def test_a_run_logs_the_losses_of_confidences(tmp_path: Path) -> None:
    model, rows = tiny_model("llama"), PackedDataset([Example(text, [True] * len(text)) for text in DOCUMENTS], 30)
    asked = HeadsConfig.model_validate({"num": 2, "kind": "dflash", "feature_layers": [0, 1], "confidence": True})
    often = {"max_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    arguments = MedusaTrainingArguments(str(tmp_path), path_dropout=0.0, disable_tqdm=True, use_cpu=True, **often)
    run = MedusaTrainer(model, new_heads(model, asked, "tiny"), arguments, train_dataset=rows, eval_dataset=rows)
    run.train()
    logged = {key: value for line in reversed(run.state.log_history) for key, value in line.items()}
    for head in (1, 2):
        assert logged[f"head{head}_confidence_loss"] == round(math.log(2), 4), "new heads give every guess one half"
        assert logged[f"eval_head{head}_confidence_loss"] < math.log(2)


def test_liger_has_no_edges() -> None:
    module = module_of("dflash, markov")
    module.args.loss_backend = "liger"
    with pytest.raises(RequestError, match="loss_backend liger has no edges; take auto"):
        module(**batch(DOCUMENTS))
