"""Pictures of drafts: compared with trees drawn by hand, and read back as XML."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

from decode.draft import DraftRecord
from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext
from decode.generation import steps
from decode.serve.step_tree import ROW, drawing, node_texts, summary
from medusa.heads.independent import MedusaHeads
from medusa.loading import load_backbone
from medusa.tree import Tree, load_tree

# The backbone chose "a". Its guesses: " cat" (then " sat" or " ran"), and " dog" (then " sat").
#   a ── cat ── ran
#     │      └─ sat
#     └─ dog ── sat
RECORD = DraftRecord([1, 2, 3, 4, 5, 4], [0, 0, 0, 1, 1, 2], [0, 1, 4])
TEXTS = ["a", " cat", " dog", " sat", " ran", " sat"]
ROWS = [0, 0, 2, 1, 0, 2]
DEPTHS = [0, 1, 1, 2, 2, 2]


def nodes_of(svg: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall("g")


def places(svg: str) -> list[tuple[float, float]]:
    boxes = [node.find("rect") for node in nodes_of(svg)]
    return [(float(box.attrib["x"]), float(box.attrib["y"])) for box in boxes if box is not None]


def test_a_tree_is_drawn_as_by_hand() -> None:
    """Each node but the root has a line, and the accepted lines are on top."""
    svg = drawing(RECORD, TEXTS)
    lefts, tops = zip(*places(svg), strict=True)
    assert [round((top - tops[0]) / ROW) for top in tops] == ROWS
    assert [sorted(set(lefts)).index(left) for left in lefts] == DEPTHS
    assert [node.findtext("text") for node in nodes_of(svg)] == ["a", "␣cat", "␣dog", "␣sat", "␣ran", "␣sat"]
    kinds = [node.attrib["class"].removeprefix("node ") for node in nodes_of(svg)]
    assert kinds == ["accepted root", "accepted", "rejected", "rejected", "accepted", "rejected"]
    lines = [line.attrib["class"] for line in ElementTree.fromstring(svg).findall("path")]
    assert lines == ["rejected"] * 3 + ["accepted"] * 2


def test_special_characters_are_escaped_and_made_visible() -> None:
    texts = ["<b>&", '"\n', "", "\x1b", "\t "]
    svg = drawing(DraftRecord([1] * 5, [0, 0, 0, 0, 0], [0, 1]), texts)
    assert [node.findtext("text") for node in nodes_of(svg)] == ["<b>&", '"↵', "∅", "�", "⇥␣"]
    assert "<b>" not in svg
    assert summary(DraftRecord([1] * 2, [0, 0], [0, 1]), ["a", "\x1b\n b"]) == "1 of 1 guess accepted: “� b”"


def test_long_tokens_are_clipped_and_whole_in_the_title() -> None:
    long, wide = "internationalisation", "猫" * 9
    node, other = nodes_of(drawing(DraftRecord([1, 2], [0, 0], [0]), [long, wide]))
    assert (node.findtext("text"), node.findtext("title")) == ("internation…", long)
    assert (other.findtext("text"), other.findtext("title")) == ("猫猫猫猫猫…", wide)


def test_a_draft_without_nodes_has_no_picture_and_a_root_alone_one_node() -> None:
    assert drawing(DraftRecord([], [], []), []) == ""
    assert [node.attrib["class"] for node in nodes_of(drawing(DraftRecord([7], [0], [0]), ["a"]))] == [
        "node accepted root"
    ]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (RECORD, "2 of 5 guesses accepted: “cat ran”"),
        (RECORD._replace(accepted=[0]), "0 of 5 guesses accepted"),
        (DraftRecord([1, 2], [0, 0], [0]), "0 of 1 guess accepted"),
        (DraftRecord([7], [0], [0]), "The drafter guessed nothing in this step"),
    ],
)
def test_the_summary_names_the_accepted_tokens(record: DraftRecord, words: str) -> None:
    assert summary(record, TEXTS) == words


@pytest.mark.parametrize("tree", [load_tree("mc_sim_7b_63", 4), Tree.chain(5), Tree.top_k([3, 2])])
def test_no_two_nodes_overlap(tree: Tree) -> None:
    count = tree.num_nodes
    record = DraftRecord(list(range(count)), tree.parent.tolist(), [0])
    svg = drawing(record, [f" token{node}" for node in range(count)])
    assert len(set(places(svg))) == len(places(svg)) == count
    picture = ElementTree.fromstring(svg)
    assert all(0 < x < float(picture.attrib["width"]) for x, _ in places(svg))
    assert all(0 < y < float(picture.attrib["height"]) for _, y in places(svg))
    leaves = count - len(set(record.parents))
    assert len({top for _, top in places(svg)}) == leaves  # every path to a leaf ends in its own row


@pytest.mark.parametrize("tree", ["eight", "dynamic:16"])
def test_trees_of_real_steps(tree: str) -> None:
    """The tokens on the accepted path are those that the step wrote, with a static and with a dynamic tree."""
    demo = load_backbone("demo")
    heads, tokenizer = MedusaHeads.from_pretrained("demo"), demo.tokenizer
    factory = drafter_factory(None, DrafterContext(demo.model, heads, tree))
    ids = torch.tensor([tokenizer("Once upon a time")["input_ids"]])
    seen = 0
    for step in steps(demo.model, None, ids, drafter=factory, max_new_tokens=24, do_sample=False, keep_drafts=True):
        for record in step.drafts.values():
            texts = node_texts(record, tokenizer)
            path = "".join(texts[node] for node in record.accepted)
            assert path == tokenizer.decode([record.ids[node] for node in record.accepted])
            assert len(nodes_of(drawing(record, texts))) == len(record.ids)
            seen += len(record.accepted) > 1
    assert seen
