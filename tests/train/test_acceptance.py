"""The objectives of acceptance equal slow versions in float64, written here position by position, with their gradients.

p is the backbone's distribution at a position, q a head's, a the probability that the guess is accepted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.inputs import HeadInputs
from tests.helpers import HIDDEN, VOCAB, random_heads, tiny_model
from train.arguments import MedusaTrainingArguments
from train.loss.heads import head_losses
from train.loss.objectives import ACCEPTANCE_OBJECTIVES, Acceptance, Weighting
from train.loss.targets import IGNORE, BackboneTeacher
from train.module import HeadsOnBackbone

HEADS, ROWS = 3, 17
ALL = [Acceptance(name) for name in ACCEPTANCE_OBJECTIVES[:3]] + [Acceptance("mass", c) for c in (1, 3)]


def slow(way: Acceptance, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and a at one position, from p and q [V], with gradients."""
    entropy = -torch.dot(p, q.log())
    if way.objective == "mass":
        a = torch.dot(p, 1 - (1 - q) ** way.children)
        return -torch.log(a), a
    a = torch.where(p < q, p, q).sum()
    share = {"tv": 0.1, "lk": 0.0, "lk-hybrid": math.exp(-3 * a.item())}[way.objective]
    return (-torch.log(a) if way.objective == "lk" else share * entropy + (1 - share) * (1 - a)), a


@pytest.mark.parametrize("way", ALL, ids=str)
def test_losses_and_gradients_are_those_of_autograd(way: Acceptance) -> None:
    """In float64; the second row of targets is that of a reduced vocabulary, which holds 0.7 of the probability."""
    torch.manual_seed(1)
    logits = (2 * torch.randn(3, 11, dtype=torch.float64)).requires_grad_()
    p = torch.randn(3, 11, dtype=torch.float64).softmax(-1) * torch.tensor([1, 0.7, 1], dtype=torch.float64)[:, None]
    expected = [slow(way, p[row], logits[row].softmax(-1)) for row in range(3)]
    torch.stack([loss for loss, _ in expected]).sum().backward()
    with torch.no_grad():
        gradient = logits.softmax(-1)
        a = way.probability(p, gradient)
        loss = way.loss(a, -(p * gradient.log()).sum(-1))
        way.gradient_(gradient, p, a)
    torch.testing.assert_close(a, torch.stack([a for _, a in expected]), atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(loss, torch.stack([loss for loss, _ in expected]), atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(gradient, logits.grad, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("way", ALL, ids=str)
@pytest.mark.parametrize(("lm_head", "temperature"), [("own", 1.0), ("shared", 0.7)])
def test_the_loss_of_a_batch_is_that_of_a_loop_over_positions(
    monkeypatch: pytest.MonkeyPatch, way: Acceptance, lm_head: str, temperature: float
) -> None:
    """In chunks of 5 positions, with gaps in the labels and D-PACE, whose probability is a."""
    monkeypatch.setattr("train.loss.chunked.chunk_rows", lambda *args: 5)
    backbone = Backbone(tiny_model("llama").requires_grad_(False))
    heads = random_heads(backbone.model, HEADS, lm_head=lm_head)
    hidden, inputs = torch.randn(ROWS + HEADS, HIDDEN), HeadInputs(torch.randn(ROWS, HIDDEN))
    labels = torch.zeros(HEADS, ROWS, dtype=torch.long).masked_fill(torch.rand(HEADS, ROWS) < 0.3, IGNORE)
    teacher = BackboneTeacher(hidden, torch.arange(ROWS), backbone.head, temperature, acceptance=way)
    figures = head_losses(heads, inputs, labels, backbone.head, Weighting("dpace", smoothing=0.2), teacher)
    figures.objective.backward()
    found = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}

    heads.double().zero_grad()
    told = (backbone.head(hidden).double() / temperature).softmax(-1)
    logits = heads(HeadInputs(inputs.hidden.double()), backbone.head.double())
    q = (logits / temperature).softmax(-1)
    objective, sums = torch.zeros((), dtype=torch.float64), torch.zeros(HEADS, dtype=torch.float64)
    for row in range(ROWS):
        taught = [bool(label != IGNORE) for label in labels[:, row]]
        each = [slow(way, told[row + head + 1], q[head, row]) for head in range(HEADS)]
        chances = [taught[head] * (0.8 * each[head][1].item() + 0.2) for head in range(HEADS)]
        for head in range(HEADS):
            if taught[head]:
                weight = sum(math.prod(chances[: last + 1]) for last in range(head, HEADS))
                objective = objective + weight * each[head][0] / taught_by(labels, head)
                sums[head] += each[head][0].detach() / taught_by(labels, head)
    objective.backward()
    # float32 against float64: rounding errors of 6e-8 in sums of VOCAB terms, divided by an a of at least 0.05.
    torch.testing.assert_close(figures.objective.double(), objective, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(figures.loss.double(), sums, atol=1e-5, rtol=1e-5)
    for name, parameter in heads.named_parameters():
        assert parameter.grad.any(), "an oracle of zeros would show nothing"
        torch.testing.assert_close(found[name].double(), parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def taught_by(labels: Tensor, head: int) -> int:
    return int((labels[head] != IGNORE).sum())


def test_mass_is_the_probability_that_a_draw_of_p_is_among_draws_of_q() -> None:
    """All 3^3 triples of draws from q."""
    p, q = torch.tensor([0.5, 0.2, 0.3]), torch.tensor([0.6, 0.1, 0.3])
    triples = itertools.product(range(3), repeat=3)
    found = sum((q[list(drawn)].prod() * p[sorted(set(drawn))].sum()).item() for drawn in triples)
    assert float(Acceptance("mass", 3).probability(p, q)) == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize("way", [Acceptance("lk"), Acceptance("mass", 1)], ids=str)
def test_a_target_of_one_token_makes_the_loss_the_cross_entropy(way: Acceptance) -> None:
    backbone = Backbone(tiny_model("llama").requires_grad_(False))
    heads, inputs = random_heads(backbone.model, HEADS), HeadInputs(torch.randn(ROWS, HIDDEN))
    labels, gradients = torch.zeros(HEADS, ROWS, dtype=torch.long), []
    for acceptance in (None, way):
        about = (torch.randn(ROWS + HEADS, HIDDEN, generator=torch.Generator().manual_seed(0)), torch.arange(ROWS))
        teacher = BackboneTeacher(*about, backbone.head, hard_label_weight=1.0, acceptance=acceptance)
        heads.zero_grad()
        head_losses(heads, inputs, labels, backbone.head, teacher=teacher).objective.backward()
        gradients.append([parameter.grad.clone() for parameter in heads.parameters()])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [None, 40])
def test_dpace_with_lk_follows_the_gradient_of_the_expected_number_of_accepted_guesses(vocabulary: int | None) -> None:
    """Also where the backbone's most probable token is not in a reduced vocabulary: others are accepted there."""
    backbone = Backbone(tiny_model("llama").requires_grad_(False))
    heads = random_heads(backbone.model, HEADS, vocabulary=vocabulary)
    inputs = HeadInputs(torch.randn(ROWS, HIDDEN))
    hidden, labels = torch.randn(ROWS + HEADS, HIDDEN), torch.zeros(HEADS, ROWS, dtype=torch.long)
    about = (backbone.head, 1.0, 0.0, heads.vocabulary, Acceptance("lk"))
    teacher = BackboneTeacher(hidden, torch.arange(ROWS), *about)
    figures = head_losses(heads, inputs, labels, backbone.head, Weighting("dpace", smoothing=0), teacher)
    figures.objective.backward()
    found = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    kept = torch.arange(VOCAB) if heads.vocabulary is None else heads.vocabulary
    told = backbone.head(hidden).softmax(-1)
    assert torch.isin(told.argmax(-1), kept).all() == (vocabulary is None), "the best token is always listed: no power"
    told = told[:, kept]
    p = torch.stack([told[head + 1 : head + 1 + ROWS] for head in range(HEADS)])
    a = torch.minimum(p, heads(inputs, backbone.head).softmax(-1)).sum(-1)
    (-a.cumprod(0).sum(0).mean()).backward()
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_tokens_outside_a_reduced_vocabulary_are_never_accepted() -> None:
    """p keeps the probabilities that it has among all tokens; for the cross-entropy it is normalised.

    Probability that is moved to the most probable token is lost where this token is outside."""
    backbone, kept = Backbone(tiny_model("llama")), torch.arange(0, VOCAB, 2)
    hidden, labels = torch.randn(ROWS + 1, HIDDEN), torch.zeros(1, ROWS, dtype=torch.long)
    told = backbone.head(hidden).softmax(-1)[1:, kept].detach()
    for way, expected in ((None, told / told.sum(-1, keepdim=True)), (Acceptance("tv"), told)):
        teacher = BackboneTeacher(hidden, torch.arange(ROWS), backbone.head, vocabulary=kept, acceptance=way)
        torch.testing.assert_close(teacher.targets(slice(None), labels).distributions, expected, atol=1e-6, rtol=1e-5)
    best = backbone.head(hidden).argmax(-1)[1:]
    assert set((best % 2).tolist()) == {0, 1}, "all inside or all outside: no power"
    sharp = BackboneTeacher(hidden, torch.arange(ROWS), backbone.head, 1.0, 0.25, kept, Acceptance("tv"))
    moved = 0.75 * told + 0.25 * (kept == best[:, None])
    torch.testing.assert_close(sharp.targets(slice(None), labels).distributions, moved, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("objective", ACCEPTANCE_OBJECTIVES)
def test_a_recipe_chooses_the_objective(arguments: Callable[..., MedusaTrainingArguments], objective: str) -> None:
    chosen = {"children": 7} if objective == "mass" else {}
    args, model = arguments(objective=objective, teacher_temperature=0.5, **chosen), tiny_model("llama")
    ids = torch.arange(12)[None]
    batch = {"input_ids": ids, "position_ids": ids, "document_ids": ids * 0, "loss_mask": ids >= 0}
    teacher = HeadsOnBackbone(random_heads(model), model, args).train().labelled_positions(**batch).teacher
    assert teacher is not None
    assert (teacher.acceptance, teacher.temperature) == (Acceptance(objective, **chosen), 0.5)
    with pytest.raises(RequestError, match=f"training.objective {objective}: this backbone caps or scales"):
        HeadsOnBackbone(random_heads(tiny_model("gemma2")), tiny_model("gemma2"), args)
    with pytest.raises(RequestError, match="liger has labels"):
        arguments(objective=objective, loss_backend="liger", head_weighting="decay")


@pytest.mark.parametrize(
    ("chosen", "purpose"),
    [
        ({"objective": "argmax", "children": 7}, "children is for objective mass, not argmax"),
        ({"objective": "tv", "children": 7}, "children is for objective mass, not tv"),
        ({"teacher_temperature": 0.5}, "teacher_temperature is for distributions, which argmax does not learn"),
        ({"objective": "text", "hard_label_weight": 0.1}, "hard_label_weight is for distributions, which text does"),
        ({"head_decay": 0.8, "dpace_smoothing": 0.0}, "dpace_smoothing is for head_weighting dpace, not decay"),
    ],
)
def test_keys_without_an_effect_are_refused(
    arguments: Callable[..., MedusaTrainingArguments], chosen: dict[str, Any], purpose: str
) -> None:
    with pytest.raises(RequestError, match=rf"training\.{purpose}.*; leave it out"):
        arguments(**chosen)


@pytest.fixture
def arguments() -> Callable[..., MedusaTrainingArguments]:
    return lambda **chosen: MedusaTrainingArguments("unused", use_cpu=True, **chosen)
