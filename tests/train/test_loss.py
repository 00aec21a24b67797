"""The chunked loss equals the plain one, and labels can be the backbone's own tokens."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from tests.helpers import HIDDEN, VOCAB, random_heads, random_ids, tiny_model
from train.arguments import MedusaTrainingArguments
from train.loss.heads import HeadLosses, head_losses, head_losses_plain
from train.loss.objectives import ACCEPTANCE_OBJECTIVES, Acceptance, Weighting, head_weights
from train.loss.targets import IGNORE, BackboneTeacher, backbone_choices, chunk_rows, taught_labels

HEADS, ROWS, POSITIONS = 3, 21, 40
KINDS = [(block, lm_head) for block in ("square", "mlp") for lm_head in ("own", "shared")]
WEIGHTINGS = {"decay": Weighting("decay", 0.8), "dpace": Weighting("dpace", smoothing=0.3)}
TEACHERS: list[dict[str, Any] | None] = [
    None,
    {},
    {"temperature": 0.5},
    {"hard_label_weight": 0.3},
    *({"acceptance": Acceptance(objective), "temperature": 0.7} for objective in ACCEPTANCE_OBJECTIVES),
]
# Both versions add the same float32 numbers in another order: at most ROWS x VOCAB = 1281 terms of order 1, whose
# rounding errors (6e-8 each) add up like a random walk to some 2e-6. A wrong row or a missing chunk shows as 1e-2.
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture
def backbone() -> Backbone:
    """Frozen, as it is in training."""
    return Backbone(tiny_model("llama").requires_grad_(False))


def some_labels() -> Tensor:
    """[HEADS, ROWS], a third of them IGNORE."""
    labels = torch.randint(0, VOCAB, (HEADS, ROWS))
    return labels.masked_fill(torch.rand(HEADS, ROWS) < 1 / 3, IGNORE)


def some_teacher(backbone: Backbone, **kwargs: Any) -> BackboneTeacher:
    """A teacher for ROWS of POSITIONS; the last row is the last position, whose targets are beyond the end."""
    rows = torch.randperm(POSITIONS - 1)[: ROWS - 1].sort().values
    return BackboneTeacher(
        torch.randn(POSITIONS, HIDDEN), torch.cat([rows, torch.tensor([POSITIONS - 1])]), backbone.head, **kwargs
    )


def chunks_of(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr("train.loss.chunked.chunk_rows", lambda *args: rows)


def outcome(
    losses: Any, heads: MedusaHeads, *args: Any, scale: float = 1.0, **kwargs: Any
) -> tuple[HeadLosses, dict[str, Tensor]]:
    """The losses, and every parameter's gradient of the objective times `scale`."""
    heads.zero_grad()
    figures = losses(heads, *args, **kwargs)
    (figures.objective * scale).backward()
    return figures, {name: p.grad.clone() for name, p in heads.named_parameters() if p.grad is not None}


def assert_same(heads: MedusaHeads, *args: Any, **kwargs: Any) -> None:
    """Check that every loss and gradient is the same with and without chunks."""
    kwargs |= {"counts": torch.tensor([14, 30, 19]), "scale": 2.0}  # as in a larger batch, of two processes
    ours, our_gradients = outcome(head_losses, heads, *args, **kwargs)
    plain, plain_gradients = outcome(head_losses_plain, heads, *args, **kwargs)
    torch.testing.assert_close(ours.objective, plain.objective, **CLOSE)
    torch.testing.assert_close(ours.loss, plain.loss, **CLOSE)
    assert ours.correct.tolist() == plain.correct.tolist()
    assert ours.total.tolist() == plain.total.tolist()
    assert our_gradients.keys() == dict(heads.named_parameters()).keys()
    for name, gradient in plain_gradients.items():
        assert gradient.any(), "an oracle of zeros would show nothing"
        torch.testing.assert_close(
            our_gradients[name], gradient, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize(("block", "lm_head"), KINDS)
def test_chunks_change_neither_loss_nor_gradients(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, block: str, lm_head: str, chunk: int
) -> None:
    chunks_of(monkeypatch, chunk)
    heads = random_heads(backbone.model, HEADS, block=block, lm_head=lm_head, num_layers=2)
    assert_same(heads, HeadInputs(torch.randn(ROWS, HIDDEN)), some_labels(), backbone.head)


@pytest.mark.parametrize("teacher", [None, {}], ids=str)
def test_probabilities_too_small_for_float32_change_nothing(backbone: Backbone, teacher: dict[str, Any] | None) -> None:
    """Logits far below the greatest one, as those of new heads are."""
    heads = random_heads(backbone.model, HEADS, lm_head="own")
    with torch.no_grad():
        heads.get_parameter("lm_heads").mul_(60)
        spread = heads(HeadInputs(torch.randn(ROWS, HIDDEN)), backbone.lm_head).std()
    assert spread > 50, "no probability is small enough to show anything"
    taught_by = None if teacher is None else some_teacher(backbone, **teacher)
    assert_same(heads, HeadInputs(torch.randn(ROWS, HIDDEN)), some_labels(), backbone.head, teacher=taught_by)


@pytest.mark.parametrize(
    ("teacher", "weighting", "lm_head"),
    [
        (teacher, weighting, ("own", "shared")[(number + place) % 2])
        for number, teacher in enumerate(TEACHERS)
        for place, weighting in enumerate(WEIGHTINGS)
    ],
    ids=str,
)
def test_chunks_change_nothing_under_any_objective_and_weighting(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, lm_head: str, teacher: dict[str, Any] | None, weighting: str
) -> None:
    chunks_of(monkeypatch, 4)
    heads = random_heads(backbone.model, HEADS, lm_head=lm_head)
    labels = some_labels()
    labels[:, -1] = IGNORE  # as at a text's end
    taught_by = None if teacher is None else some_teacher(backbone, **teacher)
    assert_same(heads, HeadInputs(torch.randn(ROWS, HIDDEN)), labels, backbone.head, WEIGHTINGS[weighting], taught_by)


def test_the_teachers_distribution_predicts_the_heads_token(backbone: Backbone) -> None:
    """A head with the model's own distribution has the entropy as its loss, and no gradient.

    The model's own logits are used: head k at t predicts token t + k + 2, which logits[t + k + 1]
    predict, so an offset that is wrong by one is detected.
    """
    ids = torch.tensor([random_ids(POSITIONS, seed=3)])
    hidden = backbone.hidden_states(ids, use_cache=False)[0]
    told = backbone.model(input_ids=ids, use_cache=False).logits[0].softmax(-1)
    position = torch.arange(POSITIONS - HEADS)
    teacher = BackboneTeacher(hidden, position, backbone.head)
    soft, index, labels, *_ = teacher.targets(slice(2, 9), torch.zeros(HEADS, 7, dtype=torch.long))
    for head in range(HEADS):
        for row, t in enumerate(range(2, 9)):
            torch.testing.assert_close(soft[index[head, row]], told[t + head + 1], atol=1e-6, rtol=1e-5)
            assert labels[head, row] == told[t + head + 1].argmax()

    class Oracle(MedusaHeads):
        def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
            return torch.stack([hidden[position + head + 1] for head in range(HEADS)]).requires_grad_()

    heads = Oracle(random_heads(backbone.model, HEADS, lm_head="shared").config)
    features = heads.features(HeadInputs(hidden))
    heads.features = lambda *args, **kwargs: features  # type: ignore[method-assign]
    figures = head_losses(
        heads,
        HeadInputs(hidden[position]),
        torch.zeros(HEADS, len(position), dtype=torch.long),
        backbone.head,
        teacher=teacher,
    )
    figures.objective.backward()
    for head in range(HEADS):
        distributions = told[position + head + 1]
        entropy = -(distributions * distributions.log()).sum(-1).mean()
        torch.testing.assert_close(figures.loss[head], entropy, atol=1e-5, rtol=1e-5)
    assert figures.correct.tolist() == figures.total.tolist()
    assert features.grad.abs().max() < 1e-6, "p - q = 0, up to the rounding of a softmax"


def test_a_teacher_at_temperature_zero_is_the_argmax(backbone: Backbone) -> None:
    """At temperature 1e-5 the distribution is one-hot, like the label."""
    heads = random_heads(backbone.model, HEADS)
    inputs, labels = HeadInputs(torch.randn(ROWS, HIDDEN)), torch.zeros(HEADS, ROWS, dtype=torch.long)
    teacher = some_teacher(backbone, temperature=1e-5)
    choices = teacher.targets(slice(None), labels)[2]
    expected, gradients = outcome(head_losses, heads, inputs, choices, backbone.head)
    sharp = BackboneTeacher(teacher.hidden, teacher.position, backbone.head, hard_label_weight=1.0)
    for of in (teacher, sharp):
        figures, ours = outcome(head_losses, heads, inputs, labels, backbone.head, teacher=of)
        torch.testing.assert_close(figures.loss, expected.loss, **CLOSE)
        for name, gradient in gradients.items():
            torch.testing.assert_close(ours[name], gradient, **CLOSE)


def test_worked_example_of_dpace_weights() -> None:
    """q = .5, .8, .5 gains .5 + .4 + .2 tokens: head 0 contributes to all three, head 2 only to the last."""
    taught = torch.ones(3, 2, dtype=torch.bool)
    probability = torch.tensor([[0.5, 1.0], [0.8, 0.0], [0.5, 1.0]])
    weights = Weighting("dpace", smoothing=0.0)(probability, taught)
    torch.testing.assert_close(weights, torch.tensor([[1.1, 1.0], [0.6, 0.0], [0.2, 0.0]]))
    lifted = Weighting("dpace", smoothing=1.0)(probability, taught)
    torch.testing.assert_close(lifted, torch.tensor([[3.0, 3.0], [2.0, 2.0], [1.0, 1.0]]))
    taught[2, 0] = taught[1, 1] = False  # the text ends there: nothing to gain, and a gap ends the chain
    torch.testing.assert_close(
        Weighting("dpace", smoothing=0.0)(probability, taught), torch.tensor([[0.9, 1.0], [0.4, 0.0], [0.0, 0.0]])
    )


def test_dpace_follows_the_gradient_of_the_expected_gain(backbone: Backbone) -> None:
    """Without smoothing, the gradient is that of minus the expected number of accepted guesses (mean over rows)."""
    heads = random_heads(backbone.model, HEADS, lm_head="own")
    inputs, labels = HeadInputs(torch.randn(ROWS, HIDDEN)), torch.randint(0, VOCAB, (HEADS, ROWS))
    _, ours = outcome(head_losses, heads, inputs, labels, None, Weighting("dpace", smoothing=0.0))
    heads.zero_grad()
    right = heads(inputs).softmax(-1).gather(-1, labels[..., None])[..., 0]
    (-right.cumprod(0).sum(0).mean()).backward()
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, **CLOSE, msg=name)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_a_head_without_labels_has_zero_loss(backbone: Backbone, lm_head: str) -> None:
    heads = random_heads(backbone.model, HEADS, lm_head=lm_head)
    labels = some_labels()
    labels[1] = IGNORE
    for losses, weighting in itertools.product((head_losses, head_losses_plain), WEIGHTINGS.values()):
        figures, gradients = outcome(
            losses, heads, HeadInputs(torch.randn(ROWS, HIDDEN)), labels, backbone.head, weighting
        )
        assert figures.loss[1] == 0
        assert figures.total[1] == 0
        assert torch.isfinite(figures.loss).all()
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
        assert not any(gradient[1].any() for gradient in gradients.values()), "and teaches nothing"


@pytest.mark.parametrize("rows", [0, 5])
def test_a_batch_without_labels_gives_zero(backbone: Backbone, rows: int) -> None:
    heads = random_heads(backbone.model, HEADS, lm_head="own")
    labels = torch.full((HEADS, rows), IGNORE)
    figures, gradients = outcome(head_losses, heads, HeadInputs(torch.randn(rows, HIDDEN)), labels, backbone.head)
    assert figures.loss.tolist() == [0.0] * HEADS
    assert not any(gradient.any() for gradient in gradients.values())


def test_the_loss_is_the_mean_in_nats_over_the_labels(backbone: Backbone) -> None:
    """LM heads of zeros make every token equally likely."""
    heads = random_heads(backbone.model, 1)
    torch.nn.init.zeros_(heads.lm_heads)
    labels = torch.tensor([[7, IGNORE, 0, 0, IGNORE]])
    figures = head_losses(heads, HeadInputs(torch.randn(5, HIDDEN)), labels, None)
    assert figures.loss.item() == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert (figures.correct.item(), figures.total.item()) == (2, 3), "the best of equals is id 0"


@pytest.mark.parametrize("acceptance", [None, Acceptance("lk-hybrid"), Acceptance("mass")], ids=str)
@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_only_one_chunk_of_logits_is_in_memory(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, lm_head: str, acceptance: Acceptance | None
) -> None:
    chunks_of(monkeypatch, 4)
    heads = random_heads(backbone.model, HEADS, lm_head=lm_head)
    teacher = some_teacher(backbone, acceptance=acceptance)
    sizes: list[int] = []
    weights = {HIDDEN * VOCAB, heads.lm_heads.numel() if heads.lm_heads is not None else 0}

    class Spy(TorchDispatchMode):
        """Counts the elements of everything with a dimension of V that is not an LM head or its gradient."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
            sizes.extend(t.numel() for t in made if VOCAB in t.shape and t.numel() not in weights)
            return out

    with Spy():
        figures = head_losses(
            heads, HeadInputs(torch.randn(ROWS, HIDDEN)), some_labels(), backbone.head, teacher=teacher
        )
        figures.objective.backward()
    assert max(sizes) == HEADS * 4 * VOCAB


def test_a_chunk_is_bounded_in_bytes_but_never_a_few_rows() -> None:
    assert chunk_rows(4, 512, "cpu") * 4 * 512 * 4 == 4 << 20
    assert chunk_rows(4, 4096, "cpu") == 64
    assert chunk_rows(4, 128_000, "cpu") == chunk_rows(4, 256_000, "cpu") == 64
    assert chunk_rows(4, 4096, "cuda") == 4096
    assert chunk_rows(4, 128_000, "cpu", own=True) == 40
    # Every chunk also adds to the gradients of own LM heads, as long as its logits stay below 2 GiB.
    assert chunk_rows(4, 32_000, "cuda", own=True) == chunk_rows(4, 128_000, "cuda", own=True) == 1024
    assert 1024 > chunk_rows(4, 262_144, "cuda", own=True) == 2**31 // (4 * 4 * 262_144)
    assert chunk_rows(1, 4096, "cuda", own=True) == chunk_rows(1, 4096, "cuda") == 16_384


def test_under_autocast_the_figures_are_those_of_bfloat16(backbone: Backbone) -> None:
    """The chunks choose their own dtype; autocast changes nothing else. bfloat16 has 8 bits: 1 % of each figure."""
    for lm_head in ("own", "shared"):
        heads = random_heads(backbone.model, HEADS, lm_head=lm_head)
        args = (HeadInputs(torch.randn(ROWS, HIDDEN)), some_labels(), backbone.head)
        full, gradients = outcome(head_losses, heads, *args)
        with torch.autocast("cpu", torch.bfloat16):
            half, ours = outcome(head_losses, heads, *args)
        assert half.objective.dtype == torch.float32
        assert not torch.equal(half.objective, full.objective), "bfloat16 was used"
        torch.testing.assert_close(half.objective, full.objective, atol=0, rtol=1e-2)
        for name, gradient in gradients.items():
            assert ours[name].dtype == torch.float32
            assert (ours[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_a_large_step_loses_nothing_in_float16(backbone: Backbone) -> None:
    """A batch with 1/65,536 of a step's labels; float16 rounds 1/65,536 of a feature to three bits or to zero."""
    heads = random_heads(backbone.model, HEADS, lm_head="own")
    labels = some_labels()
    args = (HeadInputs(torch.randn(ROWS, HIDDEN)), labels, None)
    with torch.autocast("cpu", torch.float16):
        _, alone = outcome(head_losses, heads, *args)
        _, part = outcome(head_losses, heads, *args, counts=(labels != IGNORE).sum(1) * 65_536, scale=65_536.0)
    for name, gradient in alone.items():
        torch.testing.assert_close(part[name], gradient)


def test_unavailable_backends_are_rejected(tmp_path: Path) -> None:
    def arguments(backend: str, objective: str, weighting: str) -> MedusaTrainingArguments:
        chosen = {"loss_backend": backend, "objective": objective, "head_weighting": weighting}
        return MedusaTrainingArguments(output_dir=str(tmp_path), **chosen)

    arguments("auto", "distill", "dpace")
    with pytest.raises(RequestError, match="'fast'; choose one of auto, chunked, plain, liger"):
        arguments("fast", "text", "decay")
    with pytest.raises(RequestError, match="liger has labels and head_weighting decay only"):
        arguments("liger", "distill", "decay")
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(RequestError, match="needs the package liger_kernel"):
            arguments("liger", "text", "decay")


def test_the_backbones_lm_head_gets_no_gradient(backbone: Backbone) -> None:
    heads = random_heads(backbone.model, HEADS, lm_head="shared")
    outcome(head_losses, heads, HeadInputs(torch.randn(ROWS, HIDDEN)), some_labels(), backbone.head)
    assert backbone.head.weight.grad is None


def test_an_lm_head_with_a_bias_is_applied_with_it(backbone: Backbone) -> None:
    lm_head = torch.nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    heads = random_heads(backbone.model, HEADS, lm_head="shared")
    args = (HeadInputs(torch.randn(ROWS, HIDDEN)), some_labels(), lm_head)
    torch.testing.assert_close(head_losses(heads, *args).loss, head_losses_plain(heads, *args).loss, **CLOSE)


@pytest.mark.parametrize("level", [200.0, -200.0])
def test_logits_whose_exponentials_are_no_float32(backbone: Backbone, level: float) -> None:
    """A bias that is the same for all tokens changes neither loss nor gradient."""
    lm_head = torch.nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    heads = random_heads(backbone.model, HEADS, lm_head="shared")
    args = (heads, HeadInputs(torch.randn(ROWS, HIDDEN)), some_labels(), lm_head)
    torch.nn.init.constant_(lm_head.bias, 0.0)
    figures, gradients = outcome(head_losses, *args)
    torch.nn.init.constant_(lm_head.bias, level)
    shifted, shifted_gradients = outcome(head_losses, *args)
    # A float32 near 200 is rounded by up to 8e-6, which the sum over all tokens averages.
    torch.testing.assert_close(shifted.loss, figures.loss, atol=2e-5, rtol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(shifted_gradients[name], gradient, atol=2e-5, rtol=1e-3)


def test_later_heads_have_smaller_weights() -> None:
    weights = head_weights(4, 0.8)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.8, 0.64, 0.512]))
    taught = torch.tensor([[True, True], [True, False]])
    torch.testing.assert_close(Weighting("decay", 0.5)(torch.rand(2, 2), taught), torch.tensor([[1, 1], [0.5, 0]]))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_backbones_choice_is_its_argmax_after_each_prefix(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    chunks_of(monkeypatch, 4)
    model = tiny_model(family)
    backbone = Backbone(model)
    ids = torch.tensor([random_ids(9, seed=1), random_ids(9, seed=2)])
    text = torch.full_like(ids, True), torch.zeros_like(ids)
    labels, places = taught_labels(ids, *text, 3)
    with torch.no_grad():
        hidden = backbone.hidden_states(ids, use_cache=False).flatten(0, 1)
        chosen = backbone_choices(backbone, hidden, labels, places)
        after = model(input_ids=ids, use_cache=False).logits.argmax(-1).flatten()
    for head, (own, old) in enumerate(zip(chosen.tolist(), labels.tolist(), strict=True)):
        expected = [
            int(after[place + head + 1]) if label != IGNORE else IGNORE
            for place, label in zip(places, old, strict=True)
        ]
        assert own == expected
    none = torch.full_like(labels, IGNORE)
    assert backbone_choices(backbone, hidden, none, places).equal(none), "nothing is taught"
