"""The checks of `medusa distill`: settings of an earlier run, room on the disk, and the reason for empty answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from decode.settings import Settings
from medusa.commands.distill.tasks import Task
from medusa.commands.options import warn
from medusa.commands.prompting import PromptForm
from medusa.errors import RequestError
from medusa.files import Json, free_bytes, read_json, readable
from medusa.records.messages import REASONING
from medusa.records.record import Record
from medusa.records.sources import SETTINGS, WEIGHTS
from medusa.records.template import is_endless, template_switches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_PER_LINE = 100  # of one answer, without its tokens
BYTES_PER_TOKEN = 12  # of one answer: an id, a comma, a space, and the text of the token


def require_same_settings(path: Path, about: Json, overwrite: bool, quantized: bool = False) -> None:
    """Raise a `RequestError` if the output file has texts and its settings are not `about`, unless `overwrite` is true.

    A run that ended before it could write its settings leaves an empty file. Weights, which are known only after the
    model is loaded, count only if `about` has some, and the file's settings too: earlier versions wrote none. The
    prompts count by their digest, so their file may have another path.
    `quantized`: whether they are those of quantised layers."""
    sidecar, has_texts = path.with_suffix(SETTINGS), path.exists() and path.stat().st_size > 0
    if not has_texts or overwrite:
        return
    held = read_json(sidecar) if sidecar.exists() else {}
    earlier, weights = held.pop(WEIGHTS, None), about.get(WEIGHTS)
    way = "choose another file or add --overwrite"
    now = {name: value for name, value in about.items() if name != WEIGHTS}
    if held.get("prompts_digest") is not None and now.get("prompts_digest") is not None:
        held.pop("prompts", None)
        now.pop("prompts", None)
    if held != now:
        raise RequestError(f"{path} exists and was made with other settings; {way}")
    if earlier and weights:
        from medusa.fingerprint import unlike  # which imports torch

        if unlike(earlier, weights, quantized):
            raise RequestError(f"{path} was written by other weights than those of {about['backbone']}; {way}")


def require_room(path: Path, tasks: list[Task], settings: Settings) -> None:
    """Raise a `RequestError` if not even the shortest possible answers fit on the disk."""
    prompts, turns = sum(len(task.ids or ()) for task in tasks), sum(task.turns for task in tasks)
    least = 3 * prompts + BYTES_PER_LINE * turns
    most = least + BYTES_PER_TOKEN * (prompts + settings.max_new_tokens * turns)
    free = free_bytes(path)
    if least > free:
        raise RequestError(
            f"{path} will take {readable(least)} at least, and its disk has {readable(free)} left; choose a file on "
            "another disk, or fewer prompts with --max-prompts"
        )
    if most > free:
        warn(f"{path} may take {readable(most)}, and its disk has {readable(free)} left")


def why_cut(
    path: Path, reasons: Mapping[str, int], max_new_tokens: int, tokenizer: PreTrainedTokenizerBase | None
) -> str | None:
    """Return a warning if the limit of tokens cut most answers in the file `path`; `reasons` count why answers ended.

    Heads that learn from such answers never see an end, or an answer after a thought."""
    cut, total = reasons.get("length", 0), sum(reasons.values())
    if 2 * cut <= total:
        return None
    told = f"{cut} of {total} answers were cut at {max_new_tokens} tokens"
    way_out = f"give a larger --max-new-tokens than {max_new_tokens}"
    endless, switches = 0, list[str]()
    if tokenizer is not None:
        with path.open(encoding="utf-8") as file:
            endless = sum(_is_endless(tokenizer, json.loads(line)) for line in file)
        switches = [f", or --template-option {name}=false" for name in template_switches(tokenizer) if "think" in name]
    if not endless:
        return f"{told}, so heads hardly learn their ends; {way_out}"
    return f"{told}, {endless} of them within a thought; {way_out}{''.join(switches[:1])}"


def _is_endless(tokenizer: PreTrainedTokenizerBase, row: Json) -> bool:
    """Whether an answer ends within a thought; a server may return the thought as reasoning, without an answer."""
    if "messages" in row:
        return not row["answer"].strip() and bool(row["messages"][-1].get(REASONING[0]))
    ids, start = row["input_ids"], row["prompt_tokens"]
    return is_endless(str(tokenizer.decode(ids[:start])), str(tokenizer.decode(ids[start:])))


def why_short(form: PromptForm, records: list[Record], seeds: bool) -> str:
    """Return the likely reason for empty answers, and what to type instead. `seeds`: of texts that --self-talk begins.

    Without records, the texts begin with the BOS token alone."""
    model, forms = form.backbone, {form.of(record) for record in records}
    if not records:
        why = f"{model} ends a text that begins with the BOS token alone, as chat models do"
        return f"{why}; give questions with --prompts FILE instead of --self-talk, or add --ignore-eos"
    if not form.has_template:
        why = f"{model} ends plain text at once (EOS), and its tokenizer has no chat template"
        return f"{why}; for a chat model, put its chat_template.jinja next to the tokenizer, else add --ignore-eos"
    if forms == {None}:
        way = "give the seeds with --prompts instead of --self-talk" if seeds else "rename the field to `prompt`"
        return f"{model} has a chat template, and these texts do not go through it; {way}, or add --ignore-eos"
    if True in forms:
        way = "leave --raw out" if form.asked else "add --no-raw"
        return f"{model} has a chat template, and the prompts were given as plain text; {way}"
    return f"{model} ends its answers at once (EOS); check that the chat template is this model's, or add --ignore-eos"
