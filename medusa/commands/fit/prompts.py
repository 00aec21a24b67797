"""The prompts of `medusa fit`: some are set aside for the benchmark, and the model answers the others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from medusa.errors import RequestError
from medusa.files import Json, write_text
from medusa.records.record import Record

LEAST = 60  # prompts that a run needs
SHARE, FEWEST, MOST = 5, 20, 100  # one prompt in five is set aside, at least 20 and at most 100


class Split(NamedTuple):
    """The prompts of a run: `train` are answered and learned from, `test` are only measured on."""

    train: list[Record]
    test: list[Record]


def split(records: Sequence[Record], seed: int) -> Split:
    """Set a fifth of the prompts aside, from 20 to 100, by a seeded random draw.

    Equal prompts fall on the same side, so that no test prompt is trained on. Raise RequestError if there are fewer
    than 60 different prompts."""
    distinct = list({_key(record): record for record in records}.values())
    if len(distinct) < LEAST:
        raise RequestError(
            f"there are {len(distinct)} different prompts, and fit needs at least {LEAST}: {FEWEST} to measure the "
            "speedup on, and the others to train on; give more --prompts"
        )
    aside = min(max(len(distinct) // SHARE, FEWEST), MOST)
    chosen = set(random.Random(seed).sample(range(len(distinct)), aside))
    parts = [record for index, record in enumerate(distinct) if index not in chosen]
    return Split(parts, [distinct[index] for index in sorted(chosen)])


def write_prompts(path: Path, records: Iterable[Record]) -> None:
    """Write records to a JSON Lines file from which `read_records` makes equal records."""
    write_text(path, "".join(json.dumps(to_json(record), ensure_ascii=False) + "\n" for record in records))


def to_json(record: Record) -> Json:
    """Return the JSON object from which `parse_record` makes an equal record."""
    row: Json = {}
    if record.turns:
        row["turns"] = record.turns
    elif record.messages is not None:
        row["messages"] = record.messages
    elif record.input_ids is not None:
        row |= {"input_ids": record.input_ids, "prompt_tokens": record.prompt_tokens}
    else:
        row["prompt" if record.is_prompt else "text"] = record.text
    if record.category is not None:
        row["category"] = record.category
    if record.tools:
        row["tools"] = record.tools
    return row


def _key(record: Record) -> str:
    return json.dumps({name: value for name, value in to_json(record).items() if name != "category"}, sort_keys=True)
