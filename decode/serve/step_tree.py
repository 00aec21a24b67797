"""Pictures of the drafts of single steps: a tree of guesses as SVG, with the accepted guesses in colour.

Depth grows to the right, and `DraftRecord.grid` gives the rows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from unicodedata import combining, east_asian_width

from transformers import PreTrainedTokenizerBase

from decode.draft import DraftRecord
from medusa.records.pieces import INCOMPLETE

CHARACTER, HEIGHT, PADDING = 7.9, 24, 7  # width of a character of the font; height of a node; space beside its text
ROW, GAP, MARGIN = 30, 26, 4  # distance between two rows; space between two columns, and around the picture
WIDEST = 12  # characters of a token that are shown
VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})  # characters that would leave a node blank


def node_texts(record: DraftRecord, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode the token of each node, special tokens included, as it reads after the token of the node's parent."""
    texts = []
    for token, above in zip(record.ids, record.parents, strict=True):
        before = str(tokenizer.decode([record.ids[above]]))
        both = str(tokenizer.decode([record.ids[above], token]))
        texts.append(both.removeprefix(before) if both.startswith(before) else str(tokenizer.decode([token])))
    return texts


def summary(record: DraftRecord, texts: Sequence[str]) -> str:
    """Describe a draft in a sentence: how many guesses it holds, and which of them were accepted."""
    guesses, accepted = len(record.ids) - 1, record.accepted[1:]
    if not guesses:
        return "The drafter guessed nothing in this step"
    words = f"{len(accepted)} of {guesses} {'guess' if guesses == 1 else 'guesses'} accepted"
    text = " ".join("".join(texts[node] for node in accepted).split())
    return words + (f": “{_visible(text).replace('␣', ' ')}”" if text else "")


def drawing(record: DraftRecord, texts: Sequence[str]) -> str:
    """Draw a draft of N nodes as an SVG element, with the `texts` [N] of its nodes; empty for a draft without nodes.

    Nodes and lines have the classes `accepted` or `rejected`, and node 0 also has the class `root`. Screen readers skip
    the picture; `summary` says in words what it shows."""
    if not record.ids:
        return ""
    rows, depths = record.grid
    labels = [_label(text) for text in texts]
    columns = _columns(depths, [_width(label) for label in labels])
    path, lines, nodes = set(record.accepted), [], []
    for node, label in enumerate(labels):
        kind = "accepted" if node in path else "rejected"
        (left, width), middle = columns[depths[node]], MARGIN + rows[node] * ROW + HEIGHT / 2
        if node:
            start, above = columns[depths[node] - 1], MARGIN + rows[record.parents[node]] * ROW + HEIGHT / 2
            lines.append((node in path, _line(start[0] + start[1], above, left, middle, kind)))
        box = f'<rect x="{left:g}" y="{middle - HEIGHT / 2:g}" width="{width:g}" height="{HEIGHT}" rx="6"/>'
        text = f'<text x="{left + width / 2:g}" y="{middle + 4.5:g}">{escape(label)}</text>'
        title = f"<title>{escape(_visible(texts[node]))}</title>"
        nodes.append(f'<g class="node {kind}{"" if node else " root"}">{title}{box}{text}</g>')
    wide, high = sum(columns[-1]) + MARGIN, 2 * MARGIN + max(rows) * ROW + HEIGHT
    drawn = "".join(line for _, line in sorted(lines, key=lambda line: line[0])) + "".join(nodes)
    size = f'width="{wide:g}" height="{high:g}" viewBox="0 0 {wide:g} {high:g}"'
    return f'<svg class="tree" aria-hidden="true" {size}>{drawn}</svg>'


def _columns(depths: Sequence[int], widths: Sequence[float]) -> list[tuple[float, float]]:
    """Return the left edge and the width of the column of each depth."""
    columns, left = [], float(MARGIN)
    for depth in range(max(depths) + 1):
        width = max(width for at, width in zip(depths, widths, strict=True) if at == depth)
        columns.append((left, width))
        left += width + GAP
    return columns


def _line(left: float, top: float, right: float, bottom: float, kind: str) -> str:
    bend = (left + right) / 2
    curve = f"M{left:g} {top:g}C{bend:g} {top:g} {bend:g} {bottom:g} {right:g} {bottom:g}"
    return f'<path class="{kind}" d="{curve}"/>'


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else INCOMPLETE for c in text.translate(VISIBLE)) or "∅"


def _label(text: str) -> str:
    shown = _visible(text)
    if _cells(shown) <= WIDEST:
        return shown
    end = next(end for end in range(len(shown), 0, -1) if _cells(shown[:end]) < WIDEST)
    return shown[:end] + "…"


def _cells(text: str) -> int:
    """Count the columns of a monospaced font that a text takes: two for each wide East Asian character and emoji."""
    return sum(2 if east_asian_width(c) in "WF" else 0 if combining(c) else 1 for c in text)


def _width(label: str) -> float:
    return round(_cells(label) * CHARACTER + 2 * PADDING, 1)
