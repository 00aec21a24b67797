"""Write docs/recipe.md, the reference of recipes: every key with its type, default and meaning, taken from the code.

python scripts/recipe_page.py
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from textwrap import dedent, fill
from typing import Any

from pydantic_core import PydanticUndefined

from medusa.files import Json
from medusa.heads import HEADS, class_of
from script_tools import markdown_table, run_script, write_page
from train.arguments import MedusaTrainingArguments, training_section
from train.config import AdapterConfig, DataConfig, HeadsConfig, TrainConfig, own_section
from train.sections import Section
from train.trainer_keys import GROUPS, KEYS, UNUSED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipe.md"
SECTIONS: dict[str, type[Section]] = {"heads": HeadsConfig, "data": DataConfig, "adapter": AdapterConfig}
ANCHORS = {name: f"[section](#{name})" for name in (*SECTIONS, "training")}
ANCHORS |= dict.fromkeys(("data", "eval_data"), "[section](#data-and-eval_data)")
TYPES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "array": "list"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
READING = ("dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory")
CHOSEN = ("learning_rate", "bf16", *READING)  # the keys without a fixed default: the command chooses it
INTRODUCTION = """\
# Recipe keys

A recipe is a YAML file that describes a training run. `medusa train` reads it, and `key=value` on the command line
overrides any of its keys. An empty default means that the value is chosen for the backbone or that the key is off.
[Training](training.md) explains how to choose. A wrong key or value ends the command with status 2 and one line, before
any weights are loaded. `python scripts/recipe_page.py` writes this page from the code.

```yaml
# example: a recipe needs three keys; the others have defaults
backbone: org/model
data: own.jsonl
output_dir: runs/heads
heads:
  num: 4
training:
  num_train_epochs: 2
```
"""


def recipe_page() -> str:
    """Return the page in Markdown: a table of the keys of each section of a recipe."""
    parts = [INTRODUCTION, "## Top level\n", _table(_rows("", TrainConfig))]
    for name, section in SECTIONS.items():
        title = "`data` and `eval_data`" if name == "data" else f"`{name}`"
        rows = [*_rows(f"{name}.", section), *(_rows_of_kinds() if name == "heads" else [])]
        parts += [f"## {title}\n", f"{inspect.cleandoc(section.__doc__ or '')}\n", _table(rows)]
    own = _table(_training_rows(_meanings(MedusaTrainingArguments)))
    parts += ["## `training`\n", "These keys are our own:\n", own]
    parts += ["The following keys have the names and the types that they have in transformers' `TrainingArguments`.\n"]
    for title, group in GROUPS.items():
        meanings = {name: key.meaning for name, key in group.items()}
        rows = [(f"`{key}`", default, text) for key, _, default, text in _training_rows(meanings)]
        parts += [f"### {title}\n", markdown_table(["key", "default", "meaning"], rows) + "\n"]
    parts += [
        "### Fields that are refused\n",
        "These fields of `TrainingArguments` have no effect on heads or cannot work. The error names the way out:\n",
        fill(", ".join(f"`{name}`" for name in UNUSED) + ".", 120, break_long_words=False),
    ]
    return "\n".join(parts) + "\n"


def _rows(prefix: str, section: type[Section]) -> Iterable[tuple[str, str, str, str]]:
    """The rows of a section's table: key, type, default and meaning."""
    schema = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        required = field.default is PydanticUndefined and field.default_factory is None
        plain = field.default if field.default is not PydanticUndefined else None
        kind = ANCHORS[name] if name in ANCHORS else _kind(schema[name])
        yield prefix + name, kind, "required" if required else _default(plain), field.description or ""


def _rows_of_kinds() -> Iterable[tuple[str, str, str, str]]:
    """The rows of the keys in the section `heads` that not all kinds of heads have."""
    rows: dict[str, tuple[str, str, str, str]] = {}
    for kind in HEADS.own:
        meanings, section = _meanings(class_of(kind).Settings), own_section(kind)
        schema = section.model_json_schema().get("properties", {})
        for name in section.model_fields:
            meaning = f"{rows[name][3]} {meanings[name]}" if name in rows else meanings[name]
            rows[name] = f"heads.{name}", _kind(schema[name]), "", meaning
    return rows.values()


def _training_rows(meanings: Mapping[str, str]) -> Iterable[tuple[str, str, str, str]]:
    """The rows for keys of the section `training` that this version of transformers has."""
    schema = training_section().model_json_schema()["properties"]
    defaults = {field.name: field.default for field in fields(MedusaTrainingArguments)}
    for name, meaning in meanings.items():
        if name in schema:
            yield f"training.{name}", _kind(schema[name]), _default(defaults[name], name), meaning


def _table(rows: Iterable[tuple[str, str, str, str]]) -> str:
    cells = ((f"`{key}`", kind, default, " ".join(meaning.split())) for key, kind, default, meaning in rows)
    return markdown_table(["key", "type", "default", "meaning"], cells) + "\n"


def _kind(schema: Json) -> str:
    """Describe a type in words, from its JSON schema."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return " or ".join(dict.fromkeys(map(_plain_kind, options))) or "any"


def _plain_kind(schema: Json) -> str:
    names = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if names:
        return ", ".join(f"`{name}`" for name in names)
    bounds = [f"{words} {schema[bound]:g}" for bound, words in BOUNDS.items() if bound in schema]
    if schema.get("maximum", 0) > 2**31:
        bounds = [words for words in bounds if not words.startswith("≤")]
    return " ".join([TYPES.get(schema.get("type", ""), "any"), ", ".join(bounds)]).strip()


def _default(value: Any, name: str = "") -> str:
    value = value.value if isinstance(value, Enum) else value
    if value is None or value is MISSING or (name, value) in (("max_steps", -1), ("debug", "")) or name in CHOSEN:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meanings(arguments: type) -> dict[str, str]:
    """The strings below the fields of a dataclass, by the fields' names."""
    (tree,) = ast.parse(dedent(inspect.getsource(arguments))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and field.target.id not in {*KEYS, *UNUSED}
        ):
            assert isinstance(text, ast.Expr)
            found[field.target.id] = str(ast.literal_eval(text.value))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    write_page(__doc__, PAGE, recipe_page, argv)


if __name__ == "__main__":
    run_script(main)
