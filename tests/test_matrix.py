"""Every drafter with every option of generation by every way in: the text of `model.generate`, or one refusal.

A new drafter, kind of heads, option of transformers or option of ours fails here until `matrix_axes.py` has a row for
it. `pytest --full tests/test_matrix.py` runs all cells instead of a cover of the pairs of `pairs`."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import GenerationConfig, GenerationMixin

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("llguidance", reason="needs the extra structured")

from decode import drafters, generate, steps
from decode.drafters.base import DrafterConfig
from decode.serve.schema import CompletionRequest
from decode.settings import Settings
from medusa.errors import RequestError
from medusa.heads import HEADS
from tests.matrix_axes import DRAFTERS, GROUPS, NOT_HERE, OPTIONS, REFUSED, WAYS, Refusal
from tests.matrix_ways import Cell, Place

CHEAP = ("generate", "steps", "config", "custom", "batch")
PROGRAMS = ("command", "server")


class Key(NamedTuple):
    """A cell by the names of its parts."""

    drafter: str
    options: tuple[str, ...]
    way: str

    def __str__(self) -> str:
        return f"{self.drafter} / {' + '.join(self.options)} / {self.way}"


def ways_of(option: str) -> tuple[str, ...]:
    return OPTIONS[option].only or WAYS


def refusal(key: Key) -> Refusal | None:
    """The row of the table of refusals that holds for a cell."""
    found = [one for one in REFUSED if any(one.holds(DRAFTERS[key.drafter], name, key.way) for name in key.options)]
    assert len(found) <= 1, f"{key} is in the table twice"
    return next(iter(found), None)


def every_cell() -> Iterator[Key]:
    for drafter, option in itertools.product(DRAFTERS, OPTIONS):
        yield from (Key(drafter, (option,), way) for way in ways_of(option))


def cover() -> list[Key]:
    """Cells that hold each of the `pairs` at least once.

    Each option is alone in some cells: by the command or by the server in turn, or else by the first way that offers
    it. Options of a group are tried together with every fourth drafter, and by the command and the server. A few cells
    are added for pairs that are still missing."""
    names, cells = list(DRAFTERS), list[Key]()
    for number, option in enumerate(OPTIONS):
        alone = [way for way in PROGRAMS if way in ways_of(option)] or ways_of(option)[:1]
        cells.append(Key(names[7 * number % len(names)], (option,), alone[number % len(alone)]))
    for (row, drafter), (column, options) in itertools.product(enumerate(names), enumerate(GROUPS)):
        ways = [way for way in CHEAP if all(way in ways_of(option) for option in options)]
        if (row + column) % 4 == 0:
            cells += together(drafter, options, ways[(row + column) // 4 % len(ways)])
    cells += (Key(drafter, ("return_dict_in_generate",), "steps") for drafter in names)  # shows what is accepted
    for (row, options), (at, way) in itertools.product(enumerate(GROUPS), enumerate(("custom batch", *PROGRAMS))):
        offered = tuple(option for option in options if way in ways_of(option))
        cells += together(names[(row + 5 * at) % len(names)], offered, way)
    done, missing = {pair for key in cells for pair in pairs(key)}, list(every_cell())
    random.Random(1).shuffle(missing)
    for key in sorted(missing, key=lambda key: key.way not in CHEAP):
        if not done.issuperset(pairs(key)):
            cells.append(key)
            done.update(pairs(key))
    return list(dict.fromkeys(cells))


def together(drafter: str, options: tuple[str, ...], way: str) -> Iterator[Key]:
    """Yield one cell with all options that are not refused, and one cell for each of the others."""
    cells = [Key(drafter, (option,), way) for option in options]
    refused = [key for key in cells if refusal(key)]
    yield from refused
    if allowed := tuple(key.options[0] for key in cells if key not in refused):
        yield Key(drafter, allowed, way)


def pairs(key: Key) -> Iterator[tuple[str, str]]:
    """What meets in a cell: an option and a way; a kind of drafter and a way; a drafter and a way of Python.

    Each drafter also meets a fourth of the groups of options (`cover`), and in the weekly run each option."""
    kinds = DRAFTERS[key.drafter].kinds
    for option in key.options:
        yield option, key.way
    yield from ((kind, key.way) for kind in (kinds if key.way in PROGRAMS else {key.drafter}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The models and files. To save time, the command reads weights once and calibrates no dynamic trees."""
    place = Place(tmp_path)
    monkeypatch.setattr("medusa.loading.BackboneFiles.load", lambda files: place.loaded(files.name, files.options))
    monkeypatch.setattr("medusa.commands.trees.own_texts", lambda *given: [([1], [2])])
    return place


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds; 15 on a free machine
def test_each_cell_gives_the_text_of_generate_or_is_refused(place: Place, request: pytest.FixtureRequest) -> None:
    expected, faults, accepted = dict[object, list[list[int]]](), list[str](), dict[str, int]()
    keys = list(every_cell()) if request.config.getoption("--full") else cover()
    for key in keys:
        cell = Cell(place, DRAFTERS[key.drafter], tuple(OPTIONS[name] for name in key.options), key.way)
        table = refusal(key)
        refusing = RequestError if table is None else table.error
        try:
            found = cell.decoded()
        except refusing as error:
            if table is None or table.word not in str(error):
                faults.append(f"{key} is refused: {error}")
            continue
        except Exception as error:
            faults.append(f"{key} raises {type(error).__name__}: {error}")
            continue
        accepted[key.drafter] = max(accepted.get(key.drafter, 0), cell.longest_step)
        if table is not None:
            faults.append(f"{key} is allowed, but must be refused")
            continue
        same = (key.options, cell.shape, cell.drafting.drawn, id(cell.model))
        if same not in expected:
            expected[same] = cell.expected()
        if found != (wanted := cell.shown(expected[same])):
            faults.append(f"{key} writes {found} instead of {wanted}")
    assert not faults, "\n".join([f"{len(faults)} of {len(keys)} cells:", *faults])
    useless = [drafter for drafter in DRAFTERS if accepted[drafter] < 2 and DRAFTERS[drafter].base != "mtp"]
    assert not useless, f"no draft of {useless} was accepted: no power"


def test_the_cover_holds_every_pair() -> None:
    wanted = {pair for key in every_cell() for pair in pairs(key)}
    found = {pair for key in cover() for pair in pairs(key)}
    assert found == wanted


def test_every_row_of_the_table_refuses_something() -> None:
    cells = list(every_cell())
    for row in REFUSED:
        assert any(row.holds(DRAFTERS[key.drafter], key.options[0], key.way) for key in cells), row


def test_every_drafter_and_kind_of_heads_has_a_row() -> None:
    assert {drafting.base for drafting in DRAFTERS.values()} == {*drafters.DRAFTERS}
    assert {drafting.kind for drafting in DRAFTERS.values()} - {None} == {*HEADS}
    for name, place in drafters.DRAFTERS.items():
        module, _, kind = place.partition(":")
        config: type[DrafterConfig] = getattr(import_module(module), kind)
        rows = [drafting for drafting in DRAFTERS.values() if drafting.base == name]
        assert any(row.drawn for row in rows) == config.can_draw, f"{name}: rows with drawn guesses"
        if config.takes_tree:
            assert any("dynamic" in row.kinds for row in rows), f"{name}: a row with a dynamic tree"


def test_every_option_has_a_row() -> None:
    """The options of transformers' config and `generate`, of `decode.generate`, `steps`, `Settings` and the server."""
    rows = {name for option in OPTIONS.values() for name in (*option.theirs, *option.ours)} | {*OPTIONS}
    offered = {*vars(GenerationConfig()), *(one.name for one in fields(Settings)), *CompletionRequest.model_fields}
    for function in (GenerationMixin.generate, generate, steps):
        offered |= inspect.signature(function).parameters.keys()
    assert offered - rows == NOT_HERE & offered
    assert not NOT_HERE & rows
