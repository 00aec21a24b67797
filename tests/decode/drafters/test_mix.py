"""decode/drafters/mix.py: the union of trees equals a simple version, for all drafters; samples follow the target."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from decode import steps
from decode.bench.losslessness.cases import RULES, passes, rules_for
from decode.bench.losslessness.experiment import Experiment
from decode.draft import Draft
from decode.drafters import drafter_factory, parse, title_of
from decode.drafters.base import DrafterContext
from decode.drafters.mix import Mix, MixConfig, MixDrafter, union
from decode.drafters.model import DraftModel
from decode.drafters.tries import Trie, chain, draft_of
from decode.serve.adaptive import drafts_of
from decode.settings import Settings
from decode.texts import TextGenerator
from decode.topology import Topology
from medusa.errors import RequestError
from medusa.tree import Tree
from tests.decode.drafters.test_drafters import PROMPTS, draft_model, repetitive
from tests.decode.drafters.test_paths import path_to
from tests.helpers import FORMS, plain, random_heads, tiny_model, weekly

NEW = 20
Path = tuple[int, ...]


def told(draft: Draft, row: int) -> list[Path]:
    """The tokens on the path to each node, without the root's."""
    return [tuple(path_to(draft, row, node)[1:]) for node in range(draft.topology.num_nodes)]


def joined(drafts: list[list[Path]], most: int) -> list[Path]:
    """A slow, simple union: every path once, in order."""
    return list(dict.fromkeys(path for paths in drafts for path in paths))[:most]


def random_drafts(rng: random.Random, rows: int) -> list[Draft]:
    """A static tree with equal siblings here and there, a chain, and tries that differ by row."""
    root = torch.tensor([rng.randrange(3) for _ in range(rows)])

    def over(topology: Topology) -> Draft:
        drawn = [[rng.randrange(3) for _ in range(topology.num_nodes - 1)] for _ in range(rows)]
        return Draft(torch.cat([root[:, None], torch.tensor(drawn)], dim=1), topology)

    tries = []
    for _ in range(rows):
        trie = Trie(rng.randint(2, 12))
        for _ in range(4):
            trie.add([rng.randrange(3) for _ in range(rng.randint(1, 5))])
        tries.append(trie)
    found = [over(Topology.of(Tree.top_k([3, 2]))), over(chain(5, root.device)), draft_of(tries, root)]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_union_equals_a_simple_implementation(seed: int) -> None:
    rng = random.Random(seed)
    rows, most = rng.randint(1, 4), rng.choice([2, 5, 9, 100])
    drafts = random_drafts(rng, rows)
    made = union(drafts, most)
    wanted = [joined([told(draft, row) for draft in drafts], most) for row in range(rows)]
    assert made.topology.num_nodes == max(map(len, wanted))
    for row, paths in enumerate(wanted):
        assert torch.equal(made.ids[row, 0], drafts[0].ids[row, 0])
        found = told(made, row)
        assert found[: len(paths)] == paths
        assert all(path[: len(paths[-1])] == paths[-1] for path in found[len(paths) :]), "filled up behind the last"
    check(made.topology)


@pytest.mark.parametrize("seed", range(8))
def test_parts_that_know_probabilities_share_the_nodes(seed: int) -> None:
    """The most probable paths of all parts are kept, and a path that two parts draft counts once."""
    rng = random.Random(seed)
    rows, most = rng.randint(1, 4), rng.choice([2, 5, 9, 100])
    drafts = []
    for draft in random_drafts(rng, rows):
        log_probs = torch.zeros(draft.ids.shape)
        parents = draft.topology.parent.expand_as(draft.ids)
        for node in range(1, draft.topology.num_nodes):
            above = log_probs.gather(1, parents[:, node : node + 1])[:, 0]
            log_probs[:, node] = above - torch.tensor([rng.random() for _ in range(rows)])
        drafts.append(draft._replace(log_probs=log_probs))
    made = union(drafts, most)
    check(made.topology)
    for row in range(rows):
        values: dict[Path, float] = {}
        for draft in drafts:
            assert draft.log_probs is not None
            for path, value in zip(told(draft, row), draft.log_probs[row].tolist(), strict=True):
                values[path] = max(value, values.get(path, value))
        wanted = sorted(values, key=lambda path: -values[path])[:most]
        assert set(told(made, row)[: len(wanted)]) == set(wanted)


def check(topology: Topology) -> None:
    """Check that a topology's other fields follow from its parents, and that parents precede their children."""
    assert bool((topology.parent[:, 1:] < torch.arange(1, topology.num_nodes)).all())
    above = topology.depth.gather(1, topology.parent)[:, 1:]
    assert torch.equal(topology.depth[:, 1:], above + 1)
    assert int(topology.depth.max()) <= topology.max_depth
    counts = torch.zeros_like(topology.parent).scatter_add_(
        1, topology.parent[:, 1:], torch.ones_like(topology.parent[:, 1:])
    )
    assert int(counts.max()) <= topology.max_children


def test_worked_example() -> None:
    root = torch.tensor([7])
    parent, depth = torch.tensor([[0, 0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 2, 2]])
    heads = Draft(torch.tensor([[7, 1, 2, 1, 3]]), Topology.from_parents(parent, depth, 2, 2))
    trie = Trie(9)
    trie.add([1, 3, 5])
    made = union([heads, draft_of([trie], root)], 9)
    assert made.ids.tolist() == [[7, 1, 2, 1, 3, 5]]
    assert made.topology.parent.tolist() == [[0, 0, 0, 1, 1, 4]]
    assert union([heads, draft_of([trie], root)], 3).ids.tolist() == [[7, 1, 2]]
    assert union([draft_of([trie], root), heads], 5).ids.tolist() == [[7, 1, 3, 5, 2]]


def test_an_empty_part_does_not_change_the_draft() -> None:
    """If only one part drafts, the mix returns that draft unchanged, chains and shared masks included."""

    class Says:
        def __init__(self, draft: Draft) -> None:
            self.draft = draft

        def propose(self, frontier: Any) -> Draft:
            return self.draft

    nothing = Draft(torch.tensor([[7]]), chain(1, torch.device("cpu")))
    line = Draft(torch.tensor([[7, 1, 2]]), chain(3, torch.device("cpu")))
    asked: Any = None
    assert MixDrafter([Says(nothing), Says(line)], 9).propose(asked) is line
    assert MixDrafter([Says(nothing), Says(nothing)], 9).propose(asked) is nothing
    assert MixDrafter([Says(nothing), Says(line)], 2).propose(asked).ids.tolist() == [[7, 1]], "the budget holds"


def test_options() -> None:
    assert parse("mix:nodes=9,heads+ngram:n=2,tokens=4+model:demo,tokens=2") == MixConfig(
        "heads+ngram:n=2,tokens=4+model:demo,tokens=2", 9
    )
    assert parse("mix:nodes=9,least=0.3,heads+ngram") == MixConfig("heads+ngram", 9, 0.3)
    assert title_of("mix:nodes=9,least=0.3,heads+ngram:n=2,tokens=4") == "heads and ngram"
    assert title_of("ngram:n=2") == "ngram"
    assert parse("mix:heads+ngram").needs_heads
    assert parse("mix:heads+ngram").takes_tree
    assert not parse("mix:ngram+model:demo").needs_heads
    assert not parse("mix:blockwise+ngram").takes_tree


def test_nodes_of_a_mix(llama: Any) -> None:
    materials = DrafterContext(llama, random_heads(llama), "topk:3,2")
    everything = drafter_factory("mix:heads+ngram:tokens=4", materials)
    assert everything.num_nodes == 10 + 4
    assert drafter_factory("mix:nodes=6,heads+ngram:tokens=4", materials).num_nodes == 6
    assert drafter_factory("mix:nodes=60,heads+ngram:tokens=4", materials).num_nodes == 14
    assert everything.reshaped(lambda tree: tree.clip(1)).num_nodes == 4 + 4
    with pytest.raises(RequestError, match="two sets of heads"):
        Mix([drafter_factory("heads", DrafterContext(llama, random_heads(llama), "chain")) for _ in range(2)])


def test_a_draft_model_with_prompt_lookup() -> None:
    """The draft model's cache stays correct when tokens of the other part are accepted."""
    model = tiny_model("mistral, window")
    ngram = drafter_factory("ngram:n=2,tokens=6", DrafterContext(model))
    parts = [ngram, DraftModel(draft_model(model), Tree.top_k([2, 1, 1]))]
    for prompt, nodes in ((PROMPTS[1], 0), (repetitive(model, PROMPTS[0]), 5)):
        text, ids = plain(model, prompt, max_new_tokens=NEW), torch.tensor([prompt])
        taken = list(steps(model, None, ids, drafter=Mix(parts, nodes), max_new_tokens=NEW, do_sample=False))
        assert [token for step in taken for token in step.ids[0]] == text


@pytest.mark.parametrize("kind", ["medusa", "eagle-3, variants", "mtp", "dflash, markov", *weekly("hydra", "eagle")])
def test_mixes_with_every_kind_of_heads(llama: Any, kind: str) -> None:
    """Heads of all kinds, with their own caches; the mix needs fewer steps than the heads alone."""
    heads = random_heads(llama, **FORMS[kind])
    prompt = repetitive(llama, PROMPTS[2])
    ids, options = torch.tensor([prompt]), {"max_new_tokens": NEW, "do_sample": False}
    alone = list(steps(llama, heads, ids, drafter="heads", **options))
    taken = list(steps(llama, heads, ids, drafter="mix:heads+ngram", **options))
    assert [token for step in taken for token in step.ids[0]] == plain(llama, prompt, max_new_tokens=NEW)
    assert len(taken) < len(alone)


def test_samples_have_the_targets_distribution(llama: Any) -> None:
    """Through the production code, 100,000 draws; false alarm below 1e-4."""
    source = drafter_factory(
        "mix:heads+ngram:n=2,tokens=4,matches=3", DrafterContext(llama, random_heads(llama), "topk:6,2")
    )
    prompt = repetitive(llama, PROMPTS[0])
    made = Experiment(llama, source, prompt, Settings(temperature=0.6), torch.Generator().manual_seed(0))
    assert rules_for(source) == [rule for rule in RULES if rule.draft == "topk"]
    case = made.run(RULES[0], 0, 100_000)
    assert passes([case])
    assert case.mean_accepted > 0.1, "hardly anything was accepted: no power"


def test_a_wrong_walk_fails(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a node under the wrong parent reads the wrong text."""
    source = drafter_factory("mix:heads+ngram:n=2,tokens=4", DrafterContext(llama, random_heads(llama), "topk:6,2"))
    prompt = repetitive(llama, PROMPTS[0])
    made = Experiment(llama, source, prompt, Settings(temperature=0.6), torch.Generator().manual_seed(0))
    with torch.inference_mode():
        draft = made.context.drafter.propose(made.context.frontier)
    ancestors = draft.topology.ancestors.roll(1, dims=1) | torch.eye(draft.topology.num_nodes, dtype=torch.bool)
    object.__setattr__(draft.topology, "ancestors", ancestors)
    monkeypatch.setattr(made.context.drafter, "propose", lambda frontier: draft)
    assert not passes([made.run(RULES[0], 0, 100_000)])


SHARED = "mix:nodes=8,least=0.4,heads+ngram:n=3,tokens=6,matches=2"


@pytest.mark.parametrize(("kind", "sampled"), [("medusa", False), ("markov", True), ("hydra", True)])
def test_shared_trees_write_the_same_text(llama: Any, kind: str, sampled: bool) -> None:
    """Greedy and seeded texts of a ragged batch, with steps in which n-grams draft alone."""
    model = llama
    heads, prompts = random_heads(model, **FORMS[kind]), [*PROMPTS, repetitive(model, PROMPTS[2])]
    settings = Settings(max_new_tokens=NEW, temperature=0.4 if sampled else 0.0, ignore_eos=True)
    source = drafter_factory(SHARED, DrafterContext(model, heads, "dynamic:8"))
    seeds = list(range(len(prompts)))
    made = TextGenerator(model, settings, None, source)(prompts, seeds=seeds)
    assert [one.new_ids for one in made] == [
        one.new_ids for one in TextGenerator(model, settings)(prompts, seeds=seeds)
    ]
    assert max(max(one.uncut_lengths) for one in made) > 2, "nothing was copied: no power"


def test_heads_are_left_out_where_they_add_too_little(llama: Any) -> None:
    """Random heads add nothing to a text that repeats itself, which is learned within a few steps."""
    heads, prompt = random_heads(llama), repetitive(llama, PROMPTS[0])
    drafted: list[int] = []

    class Counting(Mix):
        def start(self, session: Any, drawn: bool = False) -> Any:
            made = super().start(session)
            assert isinstance(made, MixDrafter)
            propose = made.parts[0].propose

            def counted(frontier: Any) -> Draft:
                drafted.append(1)
                return propose(frontier)

            made.parts[0].propose = counted  # type: ignore[method-assign]
            return made

    for least, all_steps in ((0.0, True), (0.4, False), (100.0, False)):
        drafted.clear()
        context = DrafterContext(llama, heads, "dynamic:8")
        mix = drafter_factory(f"mix:nodes=8,least={least},heads+ngram", context)
        assert isinstance(mix, Mix)
        taken = list(
            steps(llama, None, torch.tensor([prompt]), drafter=Counting(mix.parts, 8, least), max_new_tokens=NEW)
        )
        assert (len(drafted) == len(taken) - 1 or len(drafted) == len(taken)) == all_steps
        assert least < 100 or not drafted


def test_a_server_makes_a_shared_tree_smaller(llama: Any) -> None:
    source = drafter_factory("mix:nodes=16,heads+ngram", DrafterContext(llama, random_heads(llama), "dynamic:16"))
    assert [draft and draft.num_nodes for draft in drafts_of(source)] == [16, 5, 2, None]
