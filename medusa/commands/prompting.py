"""The form in which a command gives prompts to the backbone: through the tokenizer's chat template, or as plain text.

The form is that of --raw or --no-raw, else the form in which the heads' training data were distilled, else the chat
template where the tokenizer has one. Only prompts depend on it: `prompt`, `question`, `turns`, --prompt and the lines
of a text file. Conversations always use the template; `text` and `input_ids` never do. The template's options are those
of --template-option, together with those of the heads' training data."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa.errors import RequestError
from medusa.files import Json, read_json
from medusa.options import option
from medusa.records.record import Record, naming, prompt_ids
from medusa.records.template import marks_of_template, require_options, template_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from medusa.loading import TextLimits


def raw_option() -> Any:
    """Declare the option --raw: True for plain text, False for the chat template, `None` for the default."""
    return option(
        None,
        "give prompts as plain text; --no-raw: through the chat template (default: as when the heads' training data "
        "were distilled, else through the template if the tokenizer has one)",
        action=BooleanOptionalAction,
    )


def template_option() -> Any:
    """Declare the option --template-option, which can be repeated."""
    return option(
        (),
        "set an option of the chat template, as in enable_thinking=false; repeatable (default: as the heads record it)",
        check=lambda given: template_options(given) is not None,
        metavar="NAME=VALUE",
        brief="set an option of the chat template",
    )


class Recorded(NamedTuple):
    """The form of prompts in the training data of heads, as the heads' config records it."""

    raw: bool | None  # whether the prompts were plain text; `None`: not recorded
    options: Json  # of the chat template


@dataclass(frozen=True)
class PromptForm:
    """The form of a command's prompts, with the sentence that the command prints about this form."""

    raw: bool
    """Whether prompts are plain text."""
    backbone: str
    has_template: bool
    """Whether the tokenizer has a chat template."""
    asked: bool | None = None
    """The value of --raw, if the user gave it."""
    recorded: bool | None = None
    """The form in which the heads' training data were distilled, if it is recorded."""
    options: Json = field(default_factory=dict)
    """The options of the chat template."""
    has_own_options: bool = False
    """Whether the user gave options of the chat template."""

    def ids(self, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
        """Return the token ids of each record's prompt; raise RequestError if a prompt is empty or rejected."""
        return [prompt_ids(record, tokenizer, self.raw, self.options) for record in records]

    def of(self, record: Record) -> bool | None:
        """Return whether the prompt of a record is plain text; `None` for `text` and `input_ids`."""
        if record.is_prompt:
            return self.raw
        return None if record.messages is None else False

    def of_most(self, records: Sequence[Record]) -> bool | None:
        """Return whether most prompts of these records are plain text; `None` if no prompt has a form."""
        forms = [form for form in map(self.of, records) if form is not None]
        return sum(forms) > len(forms) / 2 if forms else None

    def line(self, records: Sequence[Record]) -> str | None:
        """Describe in one line how these prompts are given; `None` if there is nothing to choose or to describe."""
        if not records or not (self.has_template or self.asked):
            return None
        forms = {self.of(record) for record in records}
        if forms == {None}:
            return "prompts: as they are, because `text` and `input_ids` do not go through the chat template"
        if True in forms:
            return f"prompts: {self._plain_text()}" + ("; conversations use the template" if False in forms else "")
        given = " with " + ", ".join(f"{name}={value}" for name, value in self.options.items()) if self.options else ""
        is_recorded = bool(self.options) and not self.has_own_options
        like = self.recorded is False and self.asked is None
        because = ", like the heads' training data" if like or is_recorded else ""
        way_out = " (--raw turns it off)" if any(record.is_prompt for record in records) else ""
        return f"prompts: through the chat template of {self.backbone}{given}{because}{way_out}"

    def hint(self, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase | None) -> str | None:
        """Return a hint if the template would format a prompt that a template has formatted already; else `None`."""
        if self.raw or tokenizer is None:
            return None
        way_out = "give it as messages, or as `text` to pass it on unchanged"
        for record in records:
            if record.is_prompt and (mark := marks_of_template(record.question, tokenizer)):
                return f"hint: {record.where} holds {mark}, which the chat template writes itself; {way_out}"
        return None

    def _plain_text(self) -> str:
        if not self.has_template:
            return f"as plain text (--raw; {self.backbone} has no chat template)"
        if self.asked:
            return f"as plain text, without the chat template of {self.backbone} (--raw)"
        return f"as plain text, like the heads' training data (--no-raw uses the chat template of {self.backbone})"


def prompt_form(
    asked: bool | None,
    tokenizer: PreTrainedTokenizerBase | None,
    backbone: str,
    heads: str | None = None,
    options: Sequence[str] = (),
    default_raw: bool = True,
) -> PromptForm:
    """Choose the form of a command's prompts.

    `asked` is the value of --raw, `options` those of --template-option, and `heads` the folder or Hub id of heads that
    may record a form. `default_raw`: whether prompts are plain text by default if the heads record that. Raise
    RequestError if the user asks for a chat template that the tokenizer does not have, or for an option that the
    template does not read."""
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    if asked is False and not has_template:
        raise RequestError(f"--no-raw needs a chat template, and the tokenizer of {backbone} has none; leave it out")
    given = template_options(options)
    if given and asked:
        raise RequestError("--template-option is for the chat template, and --raw turns it off; leave one out")
    require_options(given, tokenizer, backbone)
    told = recorded_form(heads) if heads is not None and has_template else Recorded(None, {})
    recorded = told.raw if asked is None and not given and default_raw else None
    raw = next((form for form in (asked, recorded) if form is not None), not has_template)
    return PromptForm(raw, backbone, has_template, asked, recorded, {} if raw else told.options | given, bool(given))


def recorded_form(heads: str) -> Recorded:
    """Return the form of prompts that the config of heads records."""
    from medusa.checkpoints.folder import find_folder
    from medusa.checkpoints.stored import CONFIG

    config = find_folder(heads) / CONFIG
    content = read_json(config) if config.is_file() else {}
    content = content if isinstance(content, dict) else {}
    raw, options = content.get("raw_prompts"), content.get("template_options")
    return Recorded(raw if isinstance(raw, bool) else None, options if isinstance(options, dict) else {})


def fitting(
    records: Sequence[Record],
    prompts: Sequence[list[int]],
    limits: Mapping[str, TextLimits],
    skip_long: bool,
    note: Callable[[str], object],
    room: int = 0,
) -> tuple[list[Record], list[list[int]]]:
    """Check the token ids `prompts` of `records` against the limits of models, by their roles, and return both.

    Raise RequestError that names the record of a prompt that is too long, or has an unknown id. With `skip_long`, long
    prompts are left out instead, and `note` receives their number. A prompt is long if no `room` is left for so many
    more tokens."""
    from decode.request import require_fitting

    longest = min((limit.context for limit in limits.values() if limit.context is not None), default=1 << 60) - room
    long = [record.where for record, ids in zip(records, prompts, strict=True) if len(ids) > longest]
    if skip_long and 0 < len(records) == len(long):
        raise RequestError(f"every prompt has more than {longest} tokens; give shorter ones")
    if skip_long and long:
        told = f"{len(long)} of {len(records)} prompts are left out, because they have more than {longest} tokens"
        note(f"{told}; the first one is {long[0]}")
    kept, advice = list(zip(records, prompts, strict=True)), "; shorten it, or leave out long prompts by --skip-long"
    if skip_long:
        kept = [(record, ids) for record, ids in kept if len(ids) <= longest]
    for record, ids in kept:
        with naming(record.where, advice * (len(ids) > longest)):
            for role, limit in limits.items():
                require_fitting([ids], limit, role)
    return [record for record, _ in kept], [ids for _, ids in kept]
