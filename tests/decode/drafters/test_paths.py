"""decode/drafters/levelwise.py: every node holds its head's guess, compared with one pass of the heads per path."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor

from decode import reader
from decode.bench.calibration.calibrate import calibrate
from decode.bench.calibration.recording import grow, predicted_tau, record
from decode.bench.methods import medusa_method, plain_method
from decode.draft import Draft, Frontier
from decode.drafters import levelwise
from decode.drafters.heads import HeadsDrafter
from decode.drafters.layouts import DynamicTree, resolve_tree
from decode.drafters.levelwise import LevelwiseDrafter, PathDrafter
from decode.drafters.trained_heads import heads_drafter
from decode.drafters.trellis import TrellisDrafter
from decode.ops.draws import SharedDraws
from decode.request import prepare, with_generators
from decode.rules import AcceptanceRule
from decode.session import Session
from decode.settings import Settings
from decode.target import Target
from decode.texts import tau
from medusa import Tree
from medusa.backbone import Backbone
from medusa.config import MedusaConfig
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.heads.sequential import SequentialHeads
from tests.helpers import (
    EAGLE_FORMS,
    FORMS,
    plain,
    random_ids,
    random_tree,
    run_steps,
    shared_model,
    tiny_model,
)

FOLLOWING = ["hydra", "recurrent", "markov", "eagle"]


def heads_for(
    model: Any, kind: str, seed: int = 0, scale: float = 0.6, lm_head: str = "shared", prefix_layers: int = 0
) -> SequentialHeads:
    """Make random heads of a kind, or of a name in `EAGLE_FORMS`, which sets the LM head too."""
    backbone = Backbone(model)
    settings = {"lm_head": lm_head, "block": "mlp", "prefix_layers": prefix_layers} | FORMS[kind]
    heads = MedusaHeads.from_config(MedusaConfig(backbone.hidden_size, backbone.vocab_size, num_heads=3, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale * parameter.shape[-1] ** -0.5)
    assert isinstance(heads, SequentialHeads)
    return heads.eval()


def frontier(model: Any, rows: int = 2) -> Frontier:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, Backbone(model).hidden_size, generator=generator)
    return Frontier(torch.arange(3, 3 + rows), hidden, list(range(rows)))


@torch.no_grad()
def log_p_after(model: Any, heads: SequentialHeads, hidden: Tensor, path: list[int]) -> Tensor:
    """Log-probabilities [V] of the head of that depth after the tokens of `path`, root first."""
    backbone = Backbone(model)
    padded = torch.tensor([path + [0] * (3 - len(path))])
    logits = heads(HeadInputs(hidden[None], backbone.embed(padded)), backbone.lm_head)
    return logits[len(path) - 1, 0].log_softmax(-1)


def path_to(draft: Draft, row: int, node: int) -> list[int]:
    topology = draft.topology
    line = topology.paths[0 if topology.is_shared else row, node]
    return draft.ids[row, line[line >= 0]].tolist()


def best_paths(log_p_after: Callable[[list[int]], Tensor], root: int, nodes: int, depth: int) -> set[tuple[int, ...]]:
    """The most probable paths, `root` first: of so many nodes, as deep as `depth`, by a search over all paths."""
    taken, open_paths = set[tuple[int, ...]](), {(root,): 0.0}
    while len(taken) < nodes:
        path = max(open_paths, key=lambda p: open_paths[p])
        worth = open_paths.pop(path)
        taken.add(path)
        if len(path) <= depth:
            after = log_p_after(list(path)).tolist()
            open_paths |= {(*path, token): worth + log_p for token, log_p in enumerate(after)}
    return taken


def require_drawn(
    make: Callable[[Target], LevelwiseDrafter],
    one: Frontier,
    copies: bool,
    q_after: Callable[[list[int]], Tensor],
    **sampling: Any,
) -> None:
    """Draw a tree for each of 4000 rows of one context, or as `copies`: q is stored, and first children follow it.

    `q_after`: the distribution [V] after the tokens of a path, root first."""
    model, rows = shared_model(), 4000
    prepared = prepare(model, [[1, 2]], [0], max_new_tokens=4, do_sample=True, top_p=1.0, **sampling)
    requests = with_generators(model, rows * prepared, range(rows))  # preparing each row would take most of the time
    drafter = make(Target(requests))
    if copies:
        draft = drafter.draw(one, Target(requests[:1]), SharedDraws(torch.Generator().manual_seed(0)), rows)
    else:
        draft = drafter.propose(Frontier(one.root.expand(rows), one.hidden.expand(rows, -1), list(range(rows))))
    assert draft.proposal is not None
    (q, of_children), topology = draft.proposal, draft.topology
    for row in (0, 7):
        for node in (topology.depth[0] < topology.max_depth).nonzero()[:, 0].tolist():
            wanted = q_after(path_to(draft, row, node))
            torch.testing.assert_close(q[of_children[row, node]], wanted, rtol=1e-4, atol=1e-6)
    first, second = topology.children()[0, 0, :2]
    seen = draft.ids[:, first].bincount(minlength=q.shape[-1]).double() / rows
    # Five standard errors of the largest share; ten tokens at most are drawn.
    assert (seen - q[of_children[0, 0]].double()).abs().max() < 5 * (0.25 / rows) ** 0.5
    assert (draft.ids[:, first] != draft.ids[:, second]).all(), "siblings differ"


@pytest.mark.parametrize(("kind", "lm_head"), [*((kind, "shared") for kind in FOLLOWING), ("hydra", "own")])
def test_nodes_of_a_static_tree(llama: Any, kind: str, lm_head: str) -> None:
    heads, tree, start = heads_for(llama, kind, lm_head=lm_head), random_tree(14, 1, max_depth=3), frontier(llama)
    with torch.no_grad():
        draft = PathDrafter(heads, Backbone(llama), tree).propose(start)
    for row in range(2):
        assert draft.ids[row, 0] == start.root[row]
        for node in range(1, tree.num_nodes):
            *path, token = path_to(draft, row, node)
            said = log_p_after(llama, heads, start.hidden[row], path)
            assert token == int(said.argsort(descending=True, stable=True)[tree.rank[node]])


@pytest.mark.parametrize(("kind", "nodes"), [*((kind, 15) for kind in FOLLOWING), ("hydra", 2), ("eagle", 6)])
def test_a_dynamic_tree_holds_the_most_probable_paths(
    llama: Any, kind: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every node of a level expanded, the tree equals a search over all paths."""
    monkeypatch.setattr(levelwise, "width_of", lambda tree: tree.num_nodes)
    heads, start, temperatures = heads_for(llama, kind), frontier(llama), (0.7, 1.0, 1.5)
    tree = DynamicTree.over_heads(nodes, 3, temperatures)
    with torch.no_grad():
        draft = PathDrafter(heads, Backbone(llama), tree).propose(start)
    for row in range(2):

        def tempered(path: list[int], hidden: Tensor = start.hidden[row]) -> Tensor:
            return (log_p_after(llama, heads, hidden, path) / temperatures[len(path) - 1]).log_softmax(-1)

        found = {tuple(path_to(draft, row, node)) for node in range(nodes)}
        assert found == best_paths(tempered, int(start.root[row]), nodes, 3)


@pytest.mark.parametrize("nodes", [3, 9, 100, 256])
def test_shallow_dynamic_trees_are_filled(llama: Any, nodes: int) -> None:
    tree = DynamicTree.over_heads(nodes, 2)
    with torch.no_grad():
        draft = PathDrafter(heads_for(llama, "hydra"), Backbone(llama), tree).propose(frontier(llama))
    for row in range(2):
        assert len({tuple(path_to(draft, row, node)) for node in range(nodes)}) == nodes


@pytest.mark.parametrize(
    ("kind", "copies"), [*((kind, False) for kind in FOLLOWING), ("markov", True), ("eagle", True)]
)
@torch.no_grad()
def test_a_drawn_tree_holds_its_draft_distributions(llama: Any, kind: str, copies: bool) -> None:
    scale = 1.0 if kind == "markov" else 2.0  # with 2.0, the root gives one token all probability
    heads, one, tree = heads_for(llama, kind, scale=scale), frontier(llama, 1), Tree.top_k([2, 2, 1])

    def kept(path: list[int]) -> Tensor:
        said = log_p_after(llama, heads, one.hidden[0], path)
        return said.masked_fill(said < said.topk(4).values[-1], -torch.inf).softmax(-1)

    require_drawn(lambda target: PathDrafter(heads, Backbone(llama), tree, target), one, copies, kept, top_k=4)


@pytest.mark.parametrize(
    ("kind", "draft"), [("eagle", "topk"), *((kind, "sample") for kind in ("cascade", *FOLLOWING))]
)
def test_a_seed_gives_the_same_text_alone_and_in_a_batch(llama: Any, kind: str, draft: str) -> None:
    heads, prompts = heads_for(llama, kind, scale=0.1), [random_ids(n, seed=n) for n in (5, 9)]
    settings = Settings(max_new_tokens=8, temperature=1.0, top_k=20, draft=draft)
    method = medusa_method(llama, heads, settings, tree="topk:2,2")
    both = [result.new_ids for result in method(prompts, seeds=[1, 2])]
    assert both == [method([prompt], seeds=[seed])[0].new_ids for prompt, seed in zip(prompts, (1, 2), strict=True)]


@pytest.mark.parametrize(
    ("kind", "prefix_layers", "family", "tree"),
    [  # one kind meets all pairs of a family and a tree, with and without prefix layers; each other kind meets one
        ("eagle", 0, "llama", "topk:3,2,1"),
        ("eagle", 0, "mistral", "dynamic:9"),
        ("eagle", 1, "llama", "dynamic:9"),
        ("eagle", 1, "mistral", "topk:3,2,1"),
        ("recurrent", 1, "mistral", "topk:4,2,1"),
        ("eagle, window", 0, "llama", "topk:3,2,1"),
        ("eagle-1", 0, "mistral", "topk:3,2,1"),
        ("eagle-3, variants", 0, "mistral", "topk:3,2,1"),
        ("mtp", 0, "llama", "dynamic:9"),
    ],
)
def test_heads_attend_to_the_same_positions_in_decoding_and_training(
    kind: str, prefix_layers: int, family: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step of a ragged batch with chunked prompts, each node equals the heads' guess from whole texts.

    The texts are read without a cache, as in training, so the test checks the heads' caches after acceptance, also
    those of prefix layers. To forget the text is to draft without keys, or from the backbone's own hidden states.
    """
    monkeypatch.setattr(reader, "PIECE_TOKENS", 6)
    monkeypatch.setattr(reader, "MIN_PIECE_ROW", 3)
    model = shared_model(family)
    heads = heads_for(model, kind, seed=2 if kind in EAGLE_FORMS else 0, scale=0.5, prefix_layers=prefix_layers)
    layout = resolve_tree(tree, heads)
    prompts = [random_ids(n, seed=n) for n in (5, 9, 1)]
    requests = prepare(model, prompts, max_new_tokens=10, do_sample=False)
    session = Session(model, requests, 16, heads=heads)
    backbone = session.backbone
    drafter = heads_drafter(heads, backbone, layout)
    compared, forgetful, propose = [], [], drafter.propose

    def watched(frontier: Frontier) -> Draft:
        draft = propose(frontier)
        texts = [session.sequences.prefix(row) for row in frontier.rows]
        states = [backbone.hidden_states(text[:, :-1], use_cache=False) for text in texts]
        bare = torch.stack([hidden[0, -1] for hidden in states])
        attends = frontier.context_kv is not None
        without = propose(frontier._replace(context_kv=None) if attends else frontier._replace(hidden=bare))
        for index, (text, hidden) in enumerate(zip(texts, states, strict=True)):
            assert text[0, -1] == frontier.root[index]
            paths = [path_to(draft, index, node) for node in range(draft.ids.shape[1])]
            before = [*dict.fromkeys(tuple(path[:-1]) for path in paths[1:])]
            copies = hidden.expand(len(before), -1, -1), text.expand(len(before), -1)
            ends = torch.arange(1, len(before) + 1) * hidden.shape[1] - 1  # the last position of each copy
            here = heads.inputs(*copies, backbone.embed, place=ends)
            padded = torch.tensor([path + (0,) * (3 - len(path)) for path in before])
            logits = heads(here._replace(following=heads.embed(padded, backbone.embed)), backbone.lm_head)
            guesses = {path: logits[len(path) - 1, at] for at, path in enumerate(before)}
            for node, (*path, token) in list(enumerate(paths))[1:]:
                said = guesses[(*path,)]
                if isinstance(layout, Tree):  # up to rounding, the guess of this rank
                    wanted = said.sort(descending=True).values[layout.rank[node]]
                    torch.testing.assert_close(said[token], wanted, rtol=1e-3, atol=1e-4)
                else:  # of siblings as many as there are, the best ones
                    siblings = sum(other[:-1] == path for other in paths[1:])
                    assert said[token] >= said.sort(descending=True).values[siblings - 1] - 1e-4
                compared.append(node)
        forgetful.append((draft.ids != without.ids).any())
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    steps = run_steps(session, drafter, AcceptanceRule("greedy"))
    lengths = [length for step in steps for length in step.lengths.values()]
    assert max(lengths) > 1, "nothing was accepted: no power"
    assert min(lengths) < max(lengths), "rows never differed: no power"
    assert len(compared) >= 30
    assert sum(forgetful) > 1, "without the text nothing changes: no power"
    assert session.sequences.new_ids == [plain(model, prompt, max_new_tokens=10) for prompt in prompts]


@pytest.mark.parametrize(("fast", "kind"), [(False, "hydra"), (True, "eagle-3")])
def test_calibration_decodes_with_dynamic_trees_that_may_be_fastest(
    llama: Any, monkeypatch: pytest.MonkeyPatch, fast: bool, kind: str
) -> None:
    monkeypatch.setattr("decode.bench.calibration.calibrate.MIN_STEPS", 1)
    monkeypatch.setattr("decode.bench.calibration.calibrate.NODES", 12)  # batches of 2 and 3 of the 4 texts

    def seconds(*args: Any) -> list[float]:
        return [1.0 if isinstance(tree, DynamicTree) == fast else 100.0 for tree in args[3]]

    monkeypatch.setattr("decode.bench.calibration.calibrate.time_steps", seconds)
    settings, prompts = Settings(max_new_tokens=8), [random_ids(5, seed=seed) for seed in range(4)]
    texts = [(result.input_ids, result.new_ids) for result in plain_method(llama, settings)(prompts)]
    heads = heads_for(llama, kind, scale=0.05)
    found = calibrate(llama, heads, texts, settings, sizes=(1, 4, 6))
    taus = {point.nodes: point.tau for point in found.points if point.kind == "dynamic"}
    assert bool(taus) == fast
    assert {point.nodes for point in found.points if not point.dynamic} >= {1, 4}
    for nodes, found_tau in taus.items():
        tree = DynamicTree.over_heads(nodes, 3, tuple(found.temperatures))
        method = medusa_method(llama, heads, settings, tree=tree)
        assert found_tau == tau([method([prompt])[0] for prompt in prompts])


def test_the_tau_of_a_few_texts_is_brought_to_that_of_all(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is predicted of a static tree, for these texts and for all."""
    monkeypatch.setattr("decode.bench.calibration.calibrate.MIN_STEPS", 1)
    monkeypatch.setattr("decode.bench.calibration.calibrate.DECODED", 20)
    monkeypatch.setattr(
        "decode.bench.calibration.calibrate.time_steps",
        lambda *args: [1.0 if isinstance(tree, DynamicTree) else 100.0 for tree in args[3]],
    )
    settings, prompts = Settings(max_new_tokens=16), [random_ids(5, seed=seed) for seed in range(4)]
    texts = [(result.input_ids, result.new_ids) for result in plain_method(llama, settings)(prompts)]
    heads = heads_for(llama, "hydra", scale=0.05)
    found = calibrate(llama, heads, texts, settings, sizes=(1, 8))
    (point,) = [point for point in found.points if point.kind == "dynamic"]
    recording = record(Backbone(llama), heads, texts)
    static = grow(recording, 8)
    scale = predicted_tau(static, recording) / predicted_tau(static, recording.part(range(2)))
    tree = DynamicTree.over_heads(8, heads.config.num_heads, tuple(found.temperatures))
    method = medusa_method(llama, heads, settings, tree=tree)
    assert point.tau == pytest.approx(scale * tau([method([prompt])[0] for prompt in prompts[:2]]))
    assert scale != 1, "no power"


def test_the_drafter_for_every_kind(llama: Any) -> None:
    """Only kinds that follow the path run their heads level by level, and `markov` heads never do."""
    made = {"cascade": HeadsDrafter, "markov": TrellisDrafter} | dict.fromkeys(("hydra", "eagle"), PathDrafter)
    for kind, drafter in made.items():
        assert type(heads_drafter(heads_for(llama, kind), Backbone(llama), Tree.chain(2))) is drafter


def test_heads_on_another_device_are_named(llama: Any) -> None:
    """Drafts from the host would work on a GPU, too, and take several times as long without a word."""
    heads, tree = heads_for(llama, "hydra"), Tree.chain(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads_drafter(heads, Backbone(llama), tree)
    with pytest.warns(UserWarning, match=r'between cpu and the heads on meta; heads.to\("cpu", torch.float32\)'):
        heads_drafter(copy.deepcopy(heads).to("meta"), Backbone(llama), tree)


def test_heads_of_an_offloaded_lm_head_stay(llama: Any) -> None:
    """Its weights lie on "meta" between forwards, where no heads should go."""
    offloaded = tiny_model("llama")
    cpu_offload(offloaded.lm_head, execution_device=torch.device("cpu"))
    backbone = Backbone(offloaded)
    assert backbone.head_weight.device.type == "meta"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads_drafter(heads_for(llama, "hydra"), backbone, Tree.chain(2))
