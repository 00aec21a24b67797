"""Write docs/data.md, the reference of records, messages and requests: what is read, taken from the code.

python scripts/data_page.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from chat_families import CONVERSATIONS, TEMPLATES, family_tokenizer
from decode.serve.fields import ALIASES, IGNORED, UNLIMITED, UNSUPPORTED
from decode.serve.schema import ChatRequest, CompletionRequest, GenerationRequest
from medusa.errors import RequestError
from medusa.records.messages import KEYS, ROLES
from medusa.records.record import ENDED, LAYOUTS, parse_record
from medusa.records.replies import FORMATS
from medusa.records.template import THOUGHTS, template_switches
from script_tools import markdown_table, run_script, write_page
from train.data.reader import to_examples

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"
TRIED = (
    ("a system message", "two turns"),
    ("a thought as `reasoning_content`", "reasoning"),
    ("a thought in `content`", "thought in content"),
    ("calls of tools", "tool"),
)
"""The conversations of the tests that a template is tried with, with the heads of their columns."""
INTRODUCTION = """\
# Records, messages and requests

What files of prompts and training data, requests to `medusa serve`, the answers of servers and the chat may hold. All
of them are read by the same code. `python scripts/data_page.py` writes this page from the code.
"""


def data_page() -> str:
    """Return the page in Markdown."""
    roles = ", ".join(f"`{name}` is `{role}`" for name, role in ROLES.items())
    ended = ", ".join(f"`{reason}`" for reason in ENDED if reason)
    marks = ", ".join(f"`{begin}` to `{end}`" for begin, end in THOUGHTS.items())
    formats = [(name, ", ".join(map(_code, marks))) for name, (marks, _) in FORMATS.items()]
    parts = [INTRODUCTION, "## Records\n"]
    parts += [
        _paragraph(
            "A record is a JSON object, a row of a Parquet file or a row of a dataset, with the keys of one of these "
            "layouts. It may also have a `category`, the `tools` of a conversation, a `finish_reason`, and "
            "`chat_template_kwargs`, its own options of the chat template. Nulls are as if absent."
        ),
        markdown_table(["keys", "content"], LAYOUTS.items()) + "\n",
        _paragraph(
            f"An answer ends with its end-of-turn token if its `finish_reason` is missing or one of {ended}. After any "
            "other reason, such as `length`, `abort` or `content_filter`, heads do not learn an end."
        ),
        "## Messages\n",
        markdown_table(["key", "how it is read"], KEYS.items()) + "\n",
        _paragraph(f"Other keys go to the chat template unchanged. Roles of other programs are renamed: {roles}."),
        _paragraph(
            "Where a template takes only texts, parts are joined by newlines; where it takes only parts, texts become "
            f"parts. Where it takes arguments of calls as text, they are given as JSON. These marks "
            f"enclose thoughts: {marks}."
        ),
        "## Chat templates\n",
        _paragraph(
            "What one template reads, another refuses or drops. An answer that a template drops, changes or does not "
            "write after its generation prompt is left out of training, and counted. The tests hold templates that do "
            "what those of these families do. DeepSeek R1 drops thoughts, so heads learn them only from token ids, as "
            "`medusa distill` writes them."
        ),
        markdown_table(["family", "options", *(name for name, _ in TRIED)], map(_family, TEMPLATES)) + "\n",
        "## Calls of tools\n",
        _paragraph(
            "`medusa serve` returns calls of tools as `tool_calls` if the tokenizer has a response template, or if its "
            "chat template holds all marks of one of these formats. The first format that fits is taken. Otherwise "
            "calls are part of the text."
        ),
        markdown_table(["format", "marks in the chat template"], formats) + "\n",
        "## Parameters of requests\n",
    ]
    return "\n".join([*parts, *_parameters()])


def _family(name: str) -> list[str]:
    """Return the row of a family: the options of its template, and what becomes of the answers in `TRIED`."""
    tokenizer, found = family_tokenizer(name), []
    for _, conversation in TRIED:
        try:
            _, left_out = to_examples(parse_record(CONVERSATIONS[conversation], name), tokenizer)
            found.append("left out" if left_out else "taught")
        except RequestError:
            found.append("refused")
    return [name, ", ".join(map(_code, template_switches(tokenizer))) or "none", *found]


def _paragraph(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _code(text: str) -> str:
    """Return a text as code in a table, where a bar would end the cell."""
    return f"`{text}`".replace("|", "\\|")


def _parameters() -> list[str]:
    common = set(GenerationRequest.model_fields)
    rows = [("both", _names(common))]
    for kind, path in ((ChatRequest, "/v1/chat/completions"), (CompletionRequest, "/v1/completions")):
        rows.append((f"`{path}`", _names(set(kind.model_fields) - common)))
    others = [f"`{name}` is another name of `{own}`" for name, own in sorted(ALIASES.items())]
    unlimited = ", ".join(f"`{name}: {value}`" for name, value in sorted(UNLIMITED.items()))
    off: dict[str, list[str]] = {}
    for name, values in UNSUPPORTED.items():
        off.setdefault(", ".join(sorted(map(_code, map(_json, values)))), []).append(name)
    return [
        markdown_table(["endpoint", "parameters"], rows) + "\n",
        _paragraph(f"{'; '.join(others)}."),
        _paragraph(f"These mean the default, like null: {unlimited}. `top_k: -1` turns top-k off."),
        _paragraph(
            "These parameters are not supported where the first table does not list them. Values that leave them off "
            "pass; others return status 400."
        ),
        markdown_table(["values that pass", "parameters"], [(values, _names(off[values])) for values in sorted(off)])
        + "\n",
        _paragraph(f"These pass with any value, and change nothing: {_names(IGNORED)}."),
    ]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _json(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"') or '""'


def main(argv: Sequence[str] | None = None) -> None:
    write_page(__doc__, PAGE, data_page, argv)


if __name__ == "__main__":
    run_script(main)
