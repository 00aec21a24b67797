"""Tables on the terminal that are complete at every width: a table that is too wide is printed in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str | None = None,
    keys: int = 1,
    justify: Literal["left", "right"] = "right",
    styles: Sequence[str] = (),
) -> None:
    """Print a table without cutting off a figure or a column.

    If the console is too narrow, the columns are printed in several tables below each other. Each of them begins with
    the first `keys` columns, which tell the rows apart. Text wraps in a column that does not fit even so.

    Args:
        justify: the alignment of the columns that are no keys.
        styles: the rich style of each row; empty: no styles."""
    if title is not None:
        console.print(title, style="italic", highlight=False)
    widths = [_width(console, columns, rows, index) for index in range(len(columns))]
    for part in _parts(widths, console.width, keys):
        wraps = sum(widths[index] for index in part) > console.width
        console.print(_table(columns, rows, part, keys, justify, styles, wraps))


def _parts(widths: Sequence[int], most: int, keys: int) -> Iterator[list[int]]:
    """Yield the indices of the columns of each part: the keys, and as many other columns as fit into `most`."""
    part = list(range(keys))
    for index in range(keys, len(widths)):
        if len(part) > keys and sum(widths[place] for place in [*part, index]) > most:
            yield part
            part = list(range(keys))
        part.append(index)
    yield part


def _width(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], index: int) -> int:
    """The width of a table of one column, without wrapping. A table is as wide as its columns, each by itself."""
    table = _table(columns, rows, [index], 1, "left", (), wraps=False)
    return Measurement.get(console, console.options.update(width=10_000), table).maximum


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    part: Sequence[int],
    keys: int,
    justify: Literal["left", "right"],
    styles: Sequence[str],
    wraps: bool,
) -> Table:
    """Make a table of the columns with the indices `part`. `wraps`: whether the text of its cells may wrap."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, index in enumerate(part):
        aligned = "left" if place < keys else justify
        table.add_column(columns[index], justify=aligned, no_wrap=not wraps, overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*(row[index] for index in part), style=styles[number] if styles else None)
    return table
