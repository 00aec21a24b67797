"""The prompts of `medusa fit`: those that the model can answer, of which some are set aside for the benchmark."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from medusa.errors import RequestError
from medusa.files import Json, write_text
from medusa.records.messages import text_of
from medusa.records.record import Record

if TYPE_CHECKING:
    from medusa.commands.fit.options import FitOptions

LEAST = 60  # prompts that a run needs
SHARE, FEWEST, MOST = 5, 20, 100  # one prompt in five is set aside, at least 20 and at most 100


class Split(NamedTuple):
    """The prompts of a run: `train` are answered and learned from, `test` are only measured on."""

    train: list[Record]
    test: list[Record]


def split(records: Sequence[Record], seed: int) -> Split:
    """Set a fifth of the prompts aside, from 20 to 100, by a seeded random draw.

    Prompts that begin with the same question fall on the same side, so that no test prompt is trained on: the model
    answers all questions of a conversation. One of them is measured on. If there are fewer than 60 first questions,
    such as one about many documents, those under other system messages or tools are other prompts. Both sides are in
    random order, because stages may use their first prompts only, and a file may be sorted. Raise RequestError if there
    are fewer than 60 of these prompts, too."""
    distinct = list({asked(record): record for record in records}.values())
    groups = grouped(distinct, question)
    if len(groups) < LEAST:
        groups = grouped(distinct, opening)
    if len(groups) < LEAST:
        raise RequestError(
            f"there are {len(groups)} different first questions, and fit needs at least {LEAST}: {FEWEST} to measure "
            "the speedup on, and the others to train on; give more --prompts"
        )
    aside, mixed = min(max(len(groups) // SHARE, FEWEST), MOST), list(groups.values())
    random.Random(seed).shuffle(mixed)
    return Split(
        train=[record for group in mixed[aside:] for record in group], test=[first for first, *_ in mixed[:aside]]
    )


def answerable(options: FitOptions, records: Sequence[Record]) -> list[Record]:
    """Return the records whose prompts fit in the model's context, and note how many do not.

    Raise RequestError for a prompt that no stage could use: it is empty, or the chat template rejects it."""
    from decode.request import require_fitting
    from medusa.commands.prompting import prompt_form
    from medusa.loading import load_config, load_tokenizer, text_limits

    tokenizer = load_tokenizer(options.model, options.load)
    limits = text_limits(load_config(options.model, options.load))
    form = prompt_form(options.raw, tokenizer, options.model, options=options.template_option)
    found: list[Record] = []
    for record, ids in zip(records, form.ids(records, tokenizer), strict=True):
        if limits.context is not None and len(ids) >= limits.context:
            continue
        try:
            require_fitting([ids], limits)
        except RequestError as error:
            raise RequestError(f"{record.where}: {error}") from None
        found.append(record)
    if missing := len(records) - len(found):
        context = f"the model's context of {limits.context} tokens"
        options.output.note(f"{missing} of {len(records)} prompts are left out: they fill {context}")
    return found


def write_prompts(path: Path, records: Iterable[Record]) -> None:
    """Write records to a JSON Lines file from which `read_records` makes equal records."""
    write_text(path, "".join(json.dumps(to_json(record), ensure_ascii=False) + "\n" for record in records))


def to_json(record: Record) -> Json:
    """Return the JSON object from which `parse_record` makes an equal record, but without the answer to a prompt."""
    row: Json = {}
    if record.turns:
        row["turns"] = record.turns
        if not record.is_prompt:
            row["system"] = text_of((record.messages or [])[0])
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
    if record.template_options:
        row["chat_template_kwargs"] = record.template_options
    return row


def asked(record: Record) -> str:
    """Return what a record asks, in whatever form, and without the answers that it holds: the model writes its own."""
    row = to_json(record) | {"category": None}
    if record.is_prompt and not record.turns:
        row |= {"prompt": None, "turns": [record.question]}
    if "messages" in row:
        said = [message for message in row["messages"] if message["role"] != "assistant"]
        rest = said[1:] if (system := bool(said) and said[0]["role"] == "system") else said
        if rest and all(message.keys() == {"role", "content"} and message["role"] == "user" for message in rest):
            row["messages"], row["turns"] = None, [text_of(message) for message in rest]
            row |= {"system": text_of(said[0])} if system else {}
        else:
            row["messages"] = said
    if "input_ids" in row:
        row["input_ids"] = row["input_ids"][: row["prompt_tokens"] or None]
        row["prompt_tokens"] = len(row["input_ids"])
    return json.dumps({name: value for name, value in row.items() if value is not None}, sort_keys=True)


def grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Return the records by their keys, in order."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def question(record: Record) -> str:
    """Return the first question of a record, in whatever form."""
    if record.input_ids is not None:
        return json.dumps(record.input_ids[: record.prompt_tokens or None])
    return record.question


def opening(record: Record) -> str:
    """Return the first question of a record, its system message and its tools."""
    first = next(iter(record.messages or ()), {})
    system = text_of(first) if first.get("role") in ("system", "developer") else None
    return json.dumps([question(record), system, record.tools or None], sort_keys=True)
