"""Heads with a draft vocabulary, compared with the same heads over all tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import decode.compiled.region
from decode import generate
from decode.bench.calibration.recording import record
from decode.bench.losslessness.cases import Rule, passes
from decode.bench.losslessness.experiment import Experiment
from decode.draft import Draft, Frontier
from decode.drafters.layouts import DynamicTree
from decode.drafters.trained_heads import TrainedHeads, heads_drafter
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.settings import Settings
from decode.target import Target
from decode.texts import Decoding, stepper_for
from medusa import Tree
from medusa.backbone import Backbone
from medusa.checkpoints.stored import CONFIG, WEIGHTS
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.guesses import MISSED
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import SelectedRows, lm_head_for, over_all, rows_for, token_ids
from tests.helpers import RESIDUAL, VOCAB, left_padded, plain, random_heads, random_ids, run_as_written, tiny_model
from tests.train.recipes import recipes, run
from train.architecture import BackboneSizes
from train.data.datasets import PackedDataset, StreamedDataset
from train.data.packing import Example
from train.evaluate import label_ranks
from train.loss.heads import head_losses, head_losses_plain
from train.loss.objectives import Acceptance, Weighting
from train.loss.targets import IGNORE, BackboneTeacher
from train.vocabulary import most_frequent, usual_size, vocabulary_gain

WORDS, HEADS = 40, 3
LM_HEADS = ["own", "shared"]


def pair(model: Any, kind: str = "medusa", lm_head: str = "shared", seed: int = 0) -> tuple[MedusaHeads, MedusaHeads]:
    """The same heads over all tokens and over WORDS of the tokens in random order."""
    whole = random_heads(model, HEADS, seed, kind=kind, lm_head=lm_head, block="mlp")
    some = random_heads(model, HEADS, seed, kind=kind, lm_head=lm_head, block="mlp", vocabulary=WORDS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6 * parameter.shape[-1] ** -0.5)
            if name != "lm_heads":
                some.get_parameter(name).copy_(parameter)
        some.vocabulary = torch.randperm(VOCAB, generator=generator)[:WORDS]
        if whole.lm_heads is not None:
            assert some.lm_heads is not None
            some.lm_heads.copy_(whole.lm_heads[..., some.vocabulary])
    return whole, some


def shown(model: Any, heads: MedusaHeads, count: int = 50) -> HeadInputs:
    """Hidden states, with embeddings of the next tokens for sequential heads."""
    torch.manual_seed(1)
    backbone = Backbone(model)
    hidden = torch.randn(count, backbone.hidden_size)
    ids = torch.randint(VOCAB, (count, HEADS))
    return HeadInputs(hidden, backbone.embed(ids).detach() if heads.follows_path else None)


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lm_head", LM_HEADS)
@pytest.mark.parametrize("kind", RESIDUAL)
@torch.no_grad()
def test_logits_cover_only_the_draft_vocabulary(llama: Any, kind: str, lm_head: str) -> None:
    whole, some = pair(llama, kind, lm_head)
    inputs = shown(llama, whole)
    backbone = Backbone(llama)
    expected = whole(inputs, backbone.lm_head)
    found = some(inputs, lm_head_for(some, backbone))
    assert some.vocabulary is not None
    assert found.shape[-1] == WORDS
    torch.testing.assert_close(found, expected[..., some.vocabulary], rtol=1e-4, atol=1e-5)
    spread = over_all(some, found, VOCAB)
    assert (spread.isfinite().sum(-1) == WORDS).all()
    assert torch.equal(spread.argmax(-1), token_ids(some, found.argmax(-1)))
    assert torch.equal(token_ids(whole, found.argmax(-1)), found.argmax(-1)), "without a list a place is a token"


def step_of_training(layer: nn.Linear) -> None:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(layer.in_features)).sum().backward()
    optimizer.step()


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "optimizer": step_of_training,
    "copy": lambda layer: layer.weight.detach().copy_(-layer.weight),
    "uncounted": lambda layer: layer.weight.data.add_(1),  # as peft merges an adapter
    "dtype": lambda layer: layer.double(),
    "other": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_those_of_the_lm_head_at_the_time(llama: Any, change: str) -> None:
    _, some = pair(llama)
    assert some.vocabulary is not None
    layer = nn.Linear(8, VOCAB)
    with torch.inference_mode():  # as in decoding
        before = SelectedRows(some, layer)
    place = before.rows.weight.data_ptr()
    for _ in range(2):
        rows = rows_for(some, layer)
        assert torch.equal(rows.weight, layer.weight[some.vocabulary])
        assert torch.equal(rows.bias, layer.bias[some.vocabulary])
        assert not any(parameter.requires_grad for parameter in rows.parameters())
        before.refresh()
        assert torch.equal(before.rows.weight, rows.weight.to(before.rows.weight.dtype))
        assert before.rows.weight.data_ptr() == place
        CHANGES[change](layer)
    assert not any("rows" in name for name in some.state_dict()), "heads never hold a part of the backbone"


@pytest.mark.parametrize(("kind", "compile"), [("medusa", False), ("cascade", True), ("markov", True)])
def test_drafts_follow_changes_of_the_lm_head(kind: str, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a kept region, which keeps its drafter. A rule that accepts everything shows the drafts."""
    run_as_written(monkeypatch)
    model = tiny_model("llama")
    _, some = pair(model, kind)
    sampled = {"do_sample": True, "temperature": 1e3, "top_k": 0, "max_new_tokens": 12, "eos_token_id": None}
    requests = prepare(model, [random_ids(5)], **sampled)

    def drafted(heads: MedusaHeads, compile: bool) -> list[Any]:
        factory, rule = TrainedHeads(heads, Tree.chain(HEADS)), AcceptanceRule("typical", epsilon=1e-9, delta=1e-9)
        return [step.ids for step in Decoding(stepper_for(model, factory, requests, rule, compile=compile))]

    before = drafted(some, compile)
    model.lm_head.weight.data.copy_(model.lm_head.weight.data.roll(1, 0))
    others = MedusaHeads.from_config(some.config).eval()  # the same heads, which have read nothing yet
    others.load_state_dict(some.state_dict())
    assert before != drafted(some, compile) == drafted(others, False)


def test_new_own_lm_heads_copy_the_backbones_rows(llama: Any) -> None:
    _, some = pair(llama, lm_head="own")
    weight = Backbone(llama).head_weight
    some.start_from(weight)
    assert some.lm_heads is not None
    for matrix in some.lm_heads:
        assert torch.equal(matrix, weight[some.vocabulary].T)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_heads_with_a_draft_vocabulary_survive_saving_and_loading(
    llama: Any, tmp_path: Path, kind: str, lm_head: str
) -> None:
    _, some = pair(llama, kind, lm_head)
    some.save_pretrained(tmp_path)
    back = MedusaHeads.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert back.config == some.config
    assert back.vocabulary is not None
    assert torch.equal(back.vocabulary, some.vocabulary), "ids stay whole numbers"
    assert not back.config.servable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda words: words.float(), "vocabulary is torch.float32; it must be a list of token ids"),
        (lambda words: words.clone().fill_(3), "must name tokens below .*, each once"),
        (lambda words: words + VOCAB, "must name tokens below"),
        (lambda words: words[1:], r"vocabulary has the shape \[39\], not \[40\]"),
        (None, "misses the tensor vocabulary"),
    ],
)
def test_invalid_draft_vocabularies_are_rejected(llama: Any, tmp_path: Path, change: Any, message: str) -> None:
    _, some = pair(llama)
    some.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    words = tensors.pop("vocabulary")
    save_file(tensors | ({} if change is None else {"vocabulary": change(words)}), tmp_path / WEIGHTS)
    with pytest.raises(RequestError, match=message):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("words", [True, 8, VOCAB, 40.0])
def test_invalid_draft_vocabulary_sizes_are_rejected(llama: Any, tmp_path: Path, words: Any) -> None:
    _, some = pair(llama)
    some.save_pretrained(tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(content | {"vocabulary": words}))
    with pytest.raises(RequestError, match=r"heads.vocabulary is"):
        MedusaHeads.from_pretrained(tmp_path)


# --- decoding --------------------------------------------------------------------------------------------------------


def drafted(model: Any, heads: MedusaHeads, tree: Any, target: Target | None = None) -> Draft:
    torch.manual_seed(2)
    frontier = Frontier(torch.tensor([3, 4]), torch.randn(2, Backbone(model).hidden_size), [0, 1])
    with torch.no_grad():
        return heads_drafter(heads, Backbone(model), tree, target).propose(frontier)


@pytest.mark.parametrize("tree", [Tree.top_k([4, 2, 1]), DynamicTree.over_heads(9, HEADS)], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", RESIDUAL)
def test_drafts_equal_those_of_full_heads_with_other_tokens_masked(
    llama: Any, kind: str, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, some = pair(llama, kind)
    found = drafted(llama, some, tree)
    assert some.vocabulary is not None
    unknown = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, some.vocabulary, False)
    for name in ("logits", "logits_of"):
        if (says := getattr(whole, name, None)) is not None:
            monkeypatch.setattr(whole, name, silenced(says, unknown), raising=False)
    expected = drafted(llama, whole, tree)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.topology.parent, expected.topology.parent)
    assert set(found.ids[:, 1:].flatten().tolist()) <= set(some.vocabulary.tolist())


def silenced(says: Callable[..., Tensor], unknown: Tensor) -> Callable[..., Tensor]:
    return lambda *args: says(*args).masked_fill(unknown, -torch.inf)


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
def test_draft_distributions_cover_all_tokens(llama: Any, kind: str) -> None:
    whole, some = pair(llama, kind)
    requests = prepare(llama, [[1, 2], [3, 4]], [0, 1], max_new_tokens=4, do_sample=True, top_k=0, top_p=1.0)
    ours, theirs = (drafted(llama, heads, Tree.top_k([2, 2]), Target(requests)) for heads in (some, whole))
    assert ours.proposal is not None
    assert theirs.proposal is not None
    assert some.vocabulary is not None
    q, p = ours.proposal.q, theirs.proposal.q
    assert q.shape[-1] == VOCAB
    known = torch.zeros_like(q).index_fill_(1, some.vocabulary, 1.0)
    assert not (q * (1 - known)).any()
    of_root = ours.proposal.of_children[:, 0]  # deeper nodes may have drawn other tokens, and follow them
    expected = p[of_root] * known[of_root]
    torch.testing.assert_close(q[of_root], expected / expected.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "tree"), [("medusa", "topk:3,2,2"), ("hydra", "topk:3,2,2"), ("eagle", "dynamic:9")])
def test_greedy_text_equals_plain_decoding(llama: Any, kind: str, tree: str) -> None:
    _, some = pair(llama, kind)
    prompts = [random_ids(n, seed=n) for n in (5, 9, 7)]
    out = generate(llama, some, **left_padded(prompts), tree=tree, max_new_tokens=8)
    for row, prompt in enumerate(prompts):
        assert out[row, 9:].tolist() == plain(llama, prompt, max_new_tokens=8)


def test_samples_have_the_target_distribution() -> None:
    """Tokens outside the draft vocabulary have the backbone's probabilities (the experiment of `medusa verify`)."""
    model = tiny_model("llama", initializer_range=0.15)
    _, some = pair(model, "hydra")
    with torch.no_grad():
        for parameter in some.parameters():
            parameter.mul_(0.3)
    generator = torch.Generator().manual_seed(0)
    settings = Settings(temperature=1.0)
    made = Experiment(model, TrainedHeads(some, Tree.top_k([12, 2])), random_ids(5), settings, generator)
    assert passes([made.run(Rule("rejection", draft), 0, 20_000) for draft in ("topk", "sample")])


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "lm_head", "tree"), [("medusa", "own", "topk:3,2,1"), ("recurrent", "shared", "dynamic:4")]
)
def test_whole_steps_can_be_compiled(kind: str, lm_head: str, tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured without a graph break, as one is in tests/decode/compiled/test_compiled.py."""

    def traced(step: Any, *how: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(step, fullgraph=True, dynamic=False, backend="eager")

    monkeypatch.setattr(decode.compiled.region, "compiled", traced)
    model = tiny_model("llama", num_hidden_layers=1)
    _, some = pair(model, kind, lm_head)
    prompt = random_ids(5)
    out = generate(model, some, torch.tensor([prompt]), tree=tree, max_new_tokens=6, do_sample=False, compile=True)
    assert out[0, 5:].tolist() == plain(model, prompt, max_new_tokens=6)


def test_a_tree_wider_than_the_draft_vocabulary_is_rejected(llama: Any) -> None:
    with pytest.raises(RequestError, match=str(WORDS)):
        generate(llama, pair(llama)[1], torch.tensor([[1, 2]]), tree=f"topk:{WORDS + 1}", max_new_tokens=4)


@torch.no_grad()
def test_recordings_and_ranks_use_token_ids(llama: Any) -> None:
    """Ranks equal those over all tokens; tokens outside the draft vocabulary count as missed."""
    whole, some = pair(llama, "recurrent")
    backbone, inputs = Backbone(llama), shown(llama, whole, 200)
    labels = torch.randint(VOCAB, (HEADS, 200))
    assert some.vocabulary is not None
    unknown = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, some.vocabulary, False)
    logits = whole(inputs, backbone.lm_head).masked_fill(unknown, -torch.inf)
    place = (logits.argsort(descending=True) == labels[..., None]).int().argmax(-1)
    expected = torch.where((place < 10) & ~unknown[labels], place, MISSED)
    assert torch.equal(label_ranks(backbone, some, inputs, labels), expected)
    recording = record(backbone, some, [([1, 2], random_ids(60, seed=3))])
    new = torch.tensor(random_ids(60, seed=3))
    came, ranks = recording.right[0][:-HEADS], recording.ranks[0][:-HEADS]
    for head in range(HEADS):
        aim = new[head + 1 : head + 1 + len(came)]
        assert torch.equal(came[:, head].isnan(), unknown[aim])
        assert (ranks[unknown[aim], head] == MISSED).all()
        best = recording.best[0][: len(came), head]
        inside = ranks[:, head] < MISSED
        assert torch.equal(best[inside, ranks[inside, head]], came[inside, head])


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["labels", "teacher", "sampling"])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_the_chunked_loss_equals_the_plain_loss(lm_head: str, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.loss.chunked.chunk_rows", lambda *args: 7)
    model = tiny_model("llama").requires_grad_(False)
    _, some = pair(model, lm_head=lm_head)
    inputs = shown(model, some)
    labels = torch.randint(VOCAB, (HEADS, 50)).masked_fill(torch.rand(HEADS, 50) < 0.2, IGNORE)
    head = Backbone(model).head
    teacher = None
    if objective != "labels":
        way = Acceptance("lk-hybrid") if objective == "sampling" else None
        hidden = torch.randn(50, inputs.hidden.shape[1])
        teacher = BackboneTeacher(hidden, torch.arange(50), head, 0.7, 0.3, some.vocabulary, way)
    found = []
    for losses in (head_losses, head_losses_plain):
        some.zero_grad()
        figures = losses(some, inputs, labels, head, Weighting("dpace"), teacher)
        figures.objective.backward()
        found.append((*figures, *(p.grad.clone() for p in some.parameters() if p.grad is not None)))
    for ours, plainly in zip(*found, strict=True):
        torch.testing.assert_close(ours, plainly, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[0][3], (labels != IGNORE).sum(1)), "what cannot be guessed is a label all the same"


def test_a_label_outside_the_draft_vocabulary_ends_the_chain(llama: Any) -> None:
    """Heads do not learn from this label or later labels, because no path continues there."""
    _, some = pair(llama)
    assert some.vocabulary is not None
    missing = next(token for token in range(VOCAB) if token not in some.vocabulary)
    inputs = shown(llama, some, 1)
    known = int(some.vocabulary[0])

    def objective(labels: list[int]) -> float:
        figures = head_losses(some, inputs, torch.tensor(labels)[:, None], llama.lm_head, Weighting("dpace"))
        return figures.objective.item()

    ended = objective([known, IGNORE, IGNORE])
    assert 0 < ended < objective([known, known, known])
    assert objective([known, missing, known]) == pytest.approx(ended), "as where the text ends"
    assert head_losses(some, inputs, torch.tensor([[missing]] * HEADS), llama.lm_head).correct.sum() == 0


def dataset(texts: list[list[int]]) -> PackedDataset:
    return PackedDataset([Example(ids, [True] * len(ids)) for ids in texts], len(texts[0]))


def test_the_most_frequent_labels_and_their_coverage() -> None:
    """A document's first two tokens are not labels; each row counts for one of two halves."""
    texts = [[9, 9, 4, 4, 4, 2], [9, 9, 4, 2, 2, 7], [9, 9, 2, 4, 4, 4], [9, 9, 4, 4, 3, 1]]
    found = most_frequent(dataset(texts), 3, 10)
    assert found.ids.tolist() == [4, 2, 1], "of equals the lower id"
    # Even rows: 4 x 6, 2 x 2 -> 4, 2, 0. Odd rows: 4 x 3, 2 x 2, 1, 3, 7 -> 4, 2, 1.
    assert found.coverage == (8 + 5) / 16
    assert most_frequent(dataset(texts), 9, 10).ids.tolist() == [4, 2, 1, 3, 7, 0, 5, 6, 8]
    with pytest.raises(RequestError, match=r"heads.vocabulary is 10, but the backbone has 10 tokens"):
        most_frequent(dataset(texts), 10, 10)


def test_a_draft_vocabulary_trades_tau_for_time() -> None:
    sizes = BackboneSizes(hidden_size=4096, vocab_size=128_256, parameters=8_000_000_000)
    heads = {"num_heads": 4, "blocks": 134_000_000, "lm_heads": 4}
    assert vocabulary_gain(sizes, **heads, vocabulary=128_256, coverage=1.0) == 1
    # 1.6 x 8.005e9 + 0.134e9 weights, and 4 x 4096 a word.
    time = (12.942e9 + 16384 * 128_256) / (12.942e9 + 16384 * 32_000)
    assert vocabulary_gain(sizes, **heads, vocabulary=32_000, coverage=1.0) == pytest.approx(time)
    tau = sum(0.72**depth for depth in range(5)) / sum(0.75**depth for depth in range(5))
    assert vocabulary_gain(sizes, **heads, vocabulary=32_000, coverage=0.96) == pytest.approx(time * tau)


@pytest.mark.parametrize(
    ("kind", "vocab_size", "parameters", "words", "usual"),
    [
        ("markov", 32_768, 10_000_000, 3000, 4096),
        ("markov", 32_768, 10_000_000, 6000, 8192),  # half of the tokens beyond the first 4,096 would be missed
        ("hydra", 32_768, 10_000_000, 3000, 4096),
        ("eagle", 32_768, 10_000_000, 3000, 4096),
        ("markov", 32_768, 8_000_000_000, 3000, None),  # the LM head is a small part of what a step reads
        ("markov", 8191, 10_000_000, 3000, None),
        ("medusa", 32_768, 10_000_000, 3000, None),  # other programs read such heads, with all tokens
    ],
)
def test_new_heads_guess_among_fewer_tokens_where_that_makes_decoding_faster(
    kind: str, vocab_size: int, parameters: int, words: int, usual: int | None
) -> None:
    text = dataset([[token % words for token in range(number, number + 2000)] for number in range(0, 18_000, 1000)])
    config = MedusaConfig(256, vocab_size, num_heads=4, kind=kind, block="gated" if kind == "eagle" else "mlp")
    assert usual_size(config, text, parameters) == usual
    assert usual_size(config, StreamedDataset(None, 1, 0), parameters) is None


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Any]:
    rows = [{"input_ids": [token % 45 for token in random_ids(20, seed=seed)]} for seed in range(20)]
    content = recipes(tmp_path, rows, 20, max_steps=1, save_strategy="no")

    def run_with(kind: str = "medusa", training: dict[str, Any] | None = None, **heads: Any) -> Any:
        return run(content("out", **training or {}) | {"heads": {"num": 2, "kind": kind} | heads}, overwrite=True)

    return run_with


@pytest.mark.parametrize(
    ("kind", "objective", "lm_head"),
    [("medusa", "argmax", "own"), ("hydra", "distill", "shared"), ("eagle", "text", "own")],
)
def test_a_run_with_a_draft_vocabulary_counts_trains_and_saves(
    recipe: Any, tmp_path: Path, kind: str, objective: str, lm_head: str
) -> None:
    recipe(kind, {"objective": objective}, lm_head=lm_head, vocabulary=WORDS, force_vocabulary=True)
    heads = MedusaHeads.from_pretrained(tmp_path / "out")
    assert heads.vocabulary is not None
    assert (len(heads.vocabulary), int(heads.vocabulary.max())) == (WORDS, 44), "of 45 tokens that come at all"
    if kind == "hydra":
        recipe(kind, start=str(tmp_path / "out"))
        again = MedusaHeads.from_pretrained(tmp_path / "out")
        assert again.vocabulary is not None
        assert torch.equal(again.vocabulary, heads.vocabulary)


def test_a_run_takes_the_usual_vocabulary_unless_it_is_told_otherwise(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.build.usual_size", lambda *_: WORDS)
    for asked, expected in (({}, WORDS), ({"vocabulary": 0}, None)):
        recipe("markov", force_vocabulary=True, **asked)
        found = MedusaHeads.from_pretrained(tmp_path / "out")
        assert found.config.vocabulary == expected


def test_a_draft_vocabulary_that_slows_decoding_is_rejected(recipe: Any) -> None:
    message = (
        rf"heads.vocabulary {WORDS} of {VOCAB} tokens holds [0-9.]+% of the labels and is expected to make decoding "
        r"0\.\d+ times as fast; leave it out, take more tokens, or insist with heads.force_vocabulary=true"
    )
    with pytest.raises(RequestError, match=message):
        recipe(vocabulary=WORDS)


def test_a_stream_has_no_most_frequent_tokens() -> None:
    with pytest.raises(RequestError, match=r"counted on the whole text, and data.streaming has no end"):
        most_frequent(StreamedDataset(None, 1, 0), 3, 10)
