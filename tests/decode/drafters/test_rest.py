"""decode/drafters/retrieval/datastore.py, decode/drafters/retrieval/suffix_array.py and
decode/drafters/retrieval/rest.py: order, search and drafts, compared with simple versions."""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import decode.drafters.retrieval.datastore
import decode.drafters.retrieval.suffix_array
from decode import generate
from decode.bench.losslessness.cases import RULES, passes
from decode.bench.losslessness.experiment import Experiment
from decode.bench.methods import medusa_method
from decode.drafters.retrieval.datastore import BUILDING, DONE, Datastore, Piece, build, tokenizer_fingerprint
from decode.drafters.retrieval.rest import RestConfig, looked_up, most_frequent
from decode.drafters.retrieval.suffix_array import DEPTH, first_groups, sorted_places
from decode.settings import Settings
from medusa.errors import RequestError
from tests.helpers import VOCAB, plain, random_ids, weekly

NEW = 40
PROMPTS = [random_ids(9, seed=1), [4, 5, 6, 7, 4, 5], random_ids(14, seed=3)]


def about(vocab_size: int = VOCAB, tokenizer: Any = None) -> dict[str, Any]:
    return {"backbone": "org/model", "tokenizer": tokenizer_fingerprint(tokenizer), "vocab_size": vocab_size}


def ids_of(piece: Piece) -> list[int]:
    assert not isinstance(piece.content, str)
    return piece.content


def stored(folder: Path, documents: list[list[int]], vocab_size: int = VOCAB, tokenizer: Any = None) -> Path:
    pieces = [Piece(f"document {number}", ids) for number, ids in enumerate(documents)]
    build(folder, pieces, ids_of, about(vocab_size, tokenizer))
    return folder


def documents_of(seed: int, words: int = 4, count: int = 30) -> list[list[int]]:
    """Documents of few different tokens, so that much repeats."""
    rng = random.Random(seed)
    return [[rng.randrange(words) for _ in range(rng.randint(0, 40))] for _ in range(count)]


# The order


@pytest.mark.parametrize(("vocab_size", "dtype"), [(5, np.uint16), (65535, np.uint16), (200_000, np.uint32)])
@pytest.mark.parametrize("size", [7, 10_000, *weekly(1)])
@pytest.mark.parametrize("words", [1, 3, 5])
def test_positions_are_sorted_by_their_suffixes(vocab_size: int, dtype: Any, size: int, words: int) -> None:
    """This includes texts of one repeated token, and groups larger than the limit."""
    rng = random.Random(size)
    names = [0, 1, vocab_size - 1, vocab_size // 2, 2][:words]
    text = [rng.choice([*names, vocab_size]) for _ in range(300)] + [names[0]] * 50
    tokens = np.array(text + [vocab_size] * DEPTH, dtype)
    groups = first_groups(tokens, vocab_size, size)
    found = [int(p) for group in groups for part in sorted_places(tokens, *group, vocab_size, size) for p in part]
    inside = [place for place in range(len(text)) if text[place] != vocab_size]
    assert found == sorted(inside, key=lambda place: (tokens[place : place + DEPTH].tolist(), place))


# The search


def matches(documents: list[list[int]], text: list[int], least: int) -> tuple[int, list[tuple[int, int]]]:
    """A slow, simple search: (number of equal tokens, [(document, position after the match)])."""
    for size in range(min(len(text), DEPTH), least - 1, -1):
        end = text[-size:]
        found = [
            (number, place + size)
            for number, ids in enumerate(documents)
            for place in range(len(ids) - size + 1)
            if ids[place : place + size] == end
        ]
        if found:
            return size, found
    return 0, []


@pytest.mark.parametrize("seed", range(4))
def test_a_lookup_equals_a_linear_search(tmp_path: Path, seed: int) -> None:
    documents = documents_of(seed)
    datastore, rng = Datastore(stored(tmp_path / "store", documents)), random.Random(seed)
    sizes = Counter[int]()
    for _ in range(150):
        source = rng.choice([ids for ids in documents if ids])
        end = rng.randint(1, len(source))
        text = [rng.randrange(6) for _ in range(rng.randint(0, 3))] + source[max(0, end - rng.randint(1, 20)) : end]
        least = rng.randint(1, 4)
        size, places = matches(documents, text, least)
        found = datastore.longest(text, least)
        sizes[size] += 1
        assert (found.size if found else 0) == size
        if found:
            told = Counter(map(tuple, datastore.after(found, 3, 10_000)))
            assert told == Counter(tuple(documents[number][place : place + 3]) for number, place in places)
            least_of_all = datastore.after(found, 3, 2)
            assert len(least_of_all) <= 2
            assert not Counter(map(tuple, least_of_all)) - told
    assert len(sizes) > 5, "all of one length: no power"
    assert sizes[0], "everything was found: no power"
    assert sizes[DEPTH], "nothing was found in full length: no power"


def test_worked_example_of_the_most_frequent_nodes() -> None:
    """1 follows three times, 2 after 1 twice, 4 after these once, as 3 and 5 do."""
    lines = [[1, 2, 4], [1, 2], [1, 3], [5]]
    assert most_frequent(lines, 4).ids[1:] == [1, 2, 5]
    assert most_frequent(lines, 3).parent == [0, 0, 1]
    assert most_frequent(lines, 16).ids[1:] == [1, 2, 5, 3, 4]
    assert most_frequent([], 16).ids == [-1]
    assert most_frequent([[], []], 16).ids == [-1]


@pytest.mark.parametrize("seed", range(3))
def test_no_node_outside_is_more_frequent_than_one_inside(seed: int) -> None:
    rng = random.Random(seed)
    lines = [[rng.randrange(3) for _ in range(rng.randint(0, 5))] for _ in range(60)]
    counts = Counter(tuple(line[:depth]) for line in lines for depth in range(1, len(line) + 1))
    trie = most_frequent(lines, 12)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(trie.ids[1:], trie.parent[1:], strict=True):
        paths.append((*paths[parent], token))
    inside = {path: counts.pop(path) for path in paths[1:]}
    assert len(inside) == 11
    assert min(inside.values()) >= max(counts.values())


def test_worked_example_of_a_lookup(tmp_path: Path) -> None:
    store = stored(tmp_path / "store", [[7, 8, 1, 2, 3], [9, 8, 1, 4], [7, 8]])
    plan = RestConfig(str(store), min_n=1)
    assert looked_up(plan, [5, 7, 8], 2).ids[1:] == [1, 2], "the longest: 7 8, and not into the next document"
    assert looked_up(plan, [5, 8], 2).ids[1:] == [1, 2, 4]
    assert looked_up(plan, [8, 5], 2).ids[1:] == []
    assert looked_up(RestConfig(str(store)), [5, 8], 2).ids[1:] == [], "8 alone is too short by default"


# Decoding


def own_text(model: Any) -> list[list[int]]:
    return [prompt + plain(model, prompt, max_new_tokens=NEW) for prompt in PROMPTS]


def test_samples_have_the_targets_distribution(llama: Any, tmp_path: Path) -> None:
    """False alarm below 1e-4."""
    store = stored(tmp_path / "store", [*own_text(llama), PROMPTS[0] + [3, 5], PROMPTS[0] + [3, 8]])
    source = RestConfig(str(store), min_n=1)
    settings = Settings(temperature=0.6)
    experiment = Experiment(llama, _source(source, llama), PROMPTS[0], settings, torch.Generator().manual_seed(0))
    case = experiment.run(RULES[0], 0, 100_000)
    assert passes([case])
    assert case.mean_accepted > 0.01, "nothing was accepted: no power"


def _source(plan: RestConfig, model: Any) -> Any:
    from decode.drafters.base import DrafterContext

    return plan.factory(DrafterContext(model))


# Building


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Killed(BaseException):
    """An exception that no handler catches."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks and groups, so that little text needs many of them."""
    monkeypatch.setattr(decode.drafters.retrieval.datastore, "BLOCK", 50)
    monkeypatch.setattr(decode.drafters.retrieval.suffix_array, "BLOCK", 64)
    monkeypatch.setattr(decode.drafters.retrieval.suffix_array, "GROUP", 90)


@pytest.mark.usefixtures("small")
def test_a_killed_build_resumes_to_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the build at every write of the state in turn, when the data file is already longer than the state says."""
    documents = documents_of(7, words=6, count=20)
    pieces = [Piece("here", ids, ends=number % 3 > 0) for number, ids in enumerate(documents)]
    build(tmp_path / "whole", pieces, ids_of, about())
    write = decode.drafters.retrieval.datastore.write_json
    done: list[int] = []

    def killing(after: int) -> Callable[..., None]:
        def writing(path: Path, content: Any) -> None:
            if len(done) == after:
                growing = [name for name in ("order.bin", "tokens.bin") if (path.parent / name).exists()]
                if growing:
                    with (path.parent / growing[0]).open("ab") as file:
                        file.write(b"\x01\x02\x03")  # more than was written down, and cut off
                (path.parent / f".{path.name}.x7").write_text("cut off", encoding="utf-8")
                raise Killed
            done.append(after)
            write(path, content)

        return writing

    kills = 0
    while True:
        folder = tmp_path / str(kills)
        done.clear()
        monkeypatch.setattr(decode.drafters.retrieval.datastore, "write_json", killing(kills))
        try:
            build(folder, pieces, ids_of, about())
            break
        except Killed:
            kills += 1
        with pytest.raises(RequestError, match=r"is unfinished; run|no datastore at"):
            Datastore(folder)
        monkeypatch.setattr(decode.drafters.retrieval.datastore, "write_json", write)
        asked: list[Piece] = []
        build(folder, pieces, lambda piece, asked=asked: asked.append(piece) or ids_of(piece), about())
        assert files(folder) == files(tmp_path / "whole")
        if kills > 8:
            assert len(asked) < len(pieces), "all of it was read again"
    assert kills > 12, "hardly any place to be killed at: no power"


@pytest.mark.usefixtures("small")
def test_a_build_does_not_resume_with_another_text_or_setting(tmp_path: Path) -> None:
    pieces = [Piece("here", ids) for ids in documents_of(7)]

    def interrupted() -> Iterator[Piece]:
        yield from pieces[:20]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "store", interrupted(), ids_of, about())
    with pytest.raises(RequestError, match="started with other settings; choose another place or add --overwrite"):
        build(tmp_path / "store", pieces, ids_of, about(VOCAB + 1))
    with pytest.raises(RequestError, match="was started with another text; add --overwrite"):
        build(tmp_path / "store", pieces[1:], ids_of, about())
    build(tmp_path / "store", pieces, ids_of, about())
    assert not (tmp_path / "store" / BUILDING).exists()
    with pytest.raises(RequestError, match="store exists already; choose another place or add --overwrite"):
        build(tmp_path / "store", pieces, ids_of, about())
    build(tmp_path / "store", pieces[1:], ids_of, about(), overwrite=True)
    assert files(tmp_path / "store") == files(stored(tmp_path / "new", [ids_of(piece) for piece in pieces[1:]]))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cause", ["an id of another tokenizer", "an interruption", "no text"])
def test_a_datastore_stays_until_the_one_that_replaces_it_is_finished(tmp_path: Path, cause: str) -> None:
    """Also if it is named by a link, to which no folder beside it belongs."""
    good = [Piece("here", ids) for ids in documents_of(7)]
    (tmp_path / "place").mkdir()
    store = tmp_path / "link"
    store.symlink_to(tmp_path / "place")
    build(store, good, ids_of, about())
    before = files(store)

    def failing() -> Iterator[Piece]:
        if cause == "no text":
            return
        yield from good[:20]
        if cause == "an interruption":
            raise KeyboardInterrupt
        yield Piece("there", [VOCAB + 5])

    with pytest.raises(KeyboardInterrupt if cause == "an interruption" else RequestError):
        build(store, failing(), ids_of, about(), overwrite=True)
    assert files(store) == before
    assert Datastore(store).about["documents"]
    other = good[1:]
    if cause == "an interruption":
        with pytest.raises(RequestError, match="an unfinished build of another text is deleted; run the command again"):
            build(store, other, ids_of, about(), overwrite=True)
    build(store, other, ids_of, about(), overwrite=True)
    assert files(store) == files(stored(tmp_path / "new" / "store", [ids_of(piece) for piece in other]))
    shutil.rmtree(tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"link", "place"}, "nothing is left beside it"
    assert not (store / ".new").exists()


@pytest.mark.usefixtures("small")
def test_a_build_whose_text_is_read_does_not_go_on_with_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, store = [Piece("here", ids) for ids in documents_of(7)], tmp_path / "store"
    sort = decode.drafters.retrieval.datastore._Builder.sort

    def stops(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode.drafters.retrieval.datastore._Builder, "sort", stops)
    with pytest.raises(KeyboardInterrupt):
        build(store, pieces, ids_of, about())
    monkeypatch.setattr(decode.drafters.retrieval.datastore._Builder, "sort", sort)
    with pytest.raises(RequestError, match="was started with another text; add --overwrite"):
        build(store, pieces[1:], ids_of, about())
    build(store, pieces, ids_of, about())


@pytest.mark.skipif(sys.platform == "win32", reason="it locks no folders")
def test_two_builds_do_not_write_to_one_folder(tmp_path: Path) -> None:
    pieces = [Piece("here", ids) for ids in documents_of(7)]

    def interrupting() -> Iterator[Piece]:
        for number, piece in enumerate(pieces):
            if number == 5:
                with pytest.raises(RequestError, match=r"another build is writing to .*store; wait for it"):
                    build(tmp_path / "store", pieces, ids_of, about(), overwrite=True)
            yield piece

    build(tmp_path / "store", interrupting(), ids_of, about())
    assert files(tmp_path / "store") == files(stored(tmp_path / "new", [ids_of(piece) for piece in pieces]))


def test_an_unrelated_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(RequestError, match="holds something other than a datastore"):
        build(tmp_path, [Piece("here", [1])], ids_of, about(), overwrite=True)
    assert (tmp_path / "letter.txt").exists()


def test_other_files_beside_a_replaced_datastore_stay(tmp_path: Path) -> None:
    """One of them may be the text to store."""
    stored(tmp_path / "store", [[1, 2, 3]])
    corpus = tmp_path / "store" / "corpus.jsonl"
    corpus.write_text("dear", encoding="utf-8")
    build(tmp_path / "store", [Piece("here", [1])], ids_of, about(), overwrite=True)
    assert corpus.read_text(encoding="utf-8") == "dear"
    corpus.unlink()
    assert files(tmp_path / "store") == files(stored(tmp_path / "new", [[1]]))


@pytest.mark.parametrize(
    ("documents", "said"),
    [([], "holds no tokens"), ([[], []], "holds no tokens"), ([[1, VOCAB]], f"document 0: the id {VOCAB} is beyond")],
)
def test_texts_that_cannot_be_stored(tmp_path: Path, documents: list[list[int]], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        stored(tmp_path / "store", documents)


# Who is refused


def test_another_tokenizer_is_refused_by_both_names(llama: Any, tokenizer: Any, tmp_path: Path) -> None:
    store = stored(tmp_path / "store", [[1, 2, 3, 4]], tokenizer=tokenizer)
    ids = torch.tensor([PROMPTS[0]])
    generate(llama, inputs=ids, drafter=f"rest:{store}", max_new_tokens=2)
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    other.add_tokens(["zebra"])
    datastore = Datastore(store)
    datastore.require_tokenizer(tokenizer, "org/same")
    with pytest.raises(RequestError, match=r"the tokenizer of org/model .* and org/other has another one"):
        datastore.require_tokenizer(other, "org/other")
    with pytest.raises(RequestError, match="belongs to org/model: it holds the id 4, and org/tiny has 4 tokens"):
        datastore.require_vocabulary(4, "org/tiny")


def test_incomplete_datastores_are_rejected(llama: Any, tmp_path: Path) -> None:
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(RequestError, match=r"no datastore at .*; `medusa datastore build` makes one"):
        generate(llama, inputs=ids, drafter=f"rest:{tmp_path / 'absent'}", max_new_tokens=2)
    store = stored(tmp_path / "store", [[1, 2, 3, 4]])
    order = (store / "order.bin").read_bytes()
    (store / "order.bin").write_bytes(order[:-4])
    with pytest.raises(RequestError, match=r"order\.bin is missing or damaged"):
        Datastore(store)
    (store / "order.bin").write_bytes(order)
    about = (store / DONE).read_text(encoding="utf-8")
    (store / DONE).write_text(about.replace('"depth": 16', '"depth": 8'), encoding="utf-8")
    with pytest.raises(RequestError, match="of another version"):
        Datastore(store)


def test_a_text_shorter_than_the_end_looked_up(llama: Any, tmp_path: Path) -> None:
    store = stored(tmp_path / "store", own_text(llama))
    method = medusa_method(llama, None, Settings(max_new_tokens=NEW), drafter=f"rest:{store}")
    (result,) = method([[3]])
    assert result.new_ids == plain(llama, [3], max_new_tokens=NEW)
