"""Training of block drafters: losses with edges, documents in packed rows, and what a block reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.errors import RequestError
from medusa.heads.dflash import DflashHeads
from tests.helpers import BLOCK_FORMS, VOCAB, random_heads, random_ids, tiny_model
from train import MedusaTrainingArguments
from train.config import HeadsConfig
from train.data.packing import positions_of
from train.heads import new_heads, startable
from train.module import HeadsOnBackbone

K, LENGTHS = 3, (9, 14, 7)
FORMS = {name: form | {"mask_token": None} for name, form in BLOCK_FORMS.items()}
FORMS["two layers"] = FORMS["dflash, markov"] | {"num_layers": 2, "windows": 5, "causal": None, "lm_head": "one"}
FORMS["vocabulary"] = FORMS["dflash, pairwise"] | {"vocabulary": 40, "feature_layers": None}


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


def test_liger_has_no_edges() -> None:
    module = module_of("dflash, markov")
    module.args.loss_backend = "liger"
    with pytest.raises(RequestError, match="loss_backend liger has no edges; take auto"):
        module(**batch(DOCUMENTS))
