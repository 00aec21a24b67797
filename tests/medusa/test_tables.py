"""Tables are complete at every width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from medusa.tables import print_table

COLUMNS = ("method", "tokens/s", "min-max", "tau", "x plain", "x generate", "same text")
ROWS = [
    ["plain", "1234", "1200-1300", "1.00", "1.00", "1.15", "100%"],
    ["generate prompt-lookup", "2345", "2300-2400", "", "1.90", "2.18", "96%"],
]


def printed(width: int, title: str | None = None, keys: int = 1) -> list[str]:
    out = io.StringIO()
    print_table(Console(file=out, width=width), COLUMNS, ROWS, title=title, keys=keys)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [200, 80, 60, 40, 24])
def test_no_figure_and_no_column_is_lost(width: int) -> None:
    lines = printed(width, title="24 prompts, 128 new tokens each")
    text = " ".join(lines)
    assert max(map(len, lines)) <= width
    assert "\u2026" not in text
    if width >= 40:
        assert all(cell in text for row in (COLUMNS, *ROWS) for cell in row)
    else:  # a wide name is folded
        assert all(cell in text.replace(" ", "") for row in ROWS for cell in row[1:])


def test_a_wide_console_shows_one_table() -> None:
    assert sum("method" in line for line in printed(120)) == 1


def test_every_part_begins_with_the_keys() -> None:
    lines = printed(60)
    heads = [line for line in lines if "method" in line]
    assert len(heads) > 1
    assert sum("generate prompt-lookup" in line for line in lines) == len(heads)
    two = [line for line in printed(44, keys=2) if "method" in line]
    assert all("tokens/s" in line for line in two)


def test_figures_are_aligned_on_the_right() -> None:
    plain, assisted = (line for line in printed(120) if "1.00" in line or "1.90" in line)
    assert plain.index("100%") + 4 == assisted.index("96%") + 3
