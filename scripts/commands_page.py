"""Write docs/commands.md, the reference of the command line: every option with its default, taken from the parsers.

python scripts/commands_page.py
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from medusa.__main__ import COMMANDS, build_parser
from medusa.arguments import WORDS
from script_tools import markdown_table, run_script, write_page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
DEFAULT = re.compile(r"^(.*?),? \(default:? (.*)\)$", re.DOTALL)
Option = tuple[str, str, str]  # its names, its meaning and its default, in Markdown
PAGE_NAME = re.compile(r"\bdocs/([\w-]+)\.md(#[\w-]+)?")
INTRODUCTION = """\
# Commands

Every command with all its options. Options that several commands share are explained once, under [shared
options](#shared-options). `medusa COMMAND --help` shows the main options of a command, and `--help-all` all of them. An
option without a default is off or has no value. Arguments without `--` have the order of the first line of each
section. `demo` names the model, the heads and the prompts that come with the package.

Results go to standard output, progress and warnings to standard error. The exit status is 0 for a finished run, 1 for a
run that failed and 2 for a wrong request, which is answered with one line. After Ctrl-C it is 130, after SIGTERM 143,
and 141 if the reader of its output has gone.
[Recipe keys](recipe.md) lists the keys of `medusa train`. `python scripts/commands_page.py` writes this page.
"""


def commands_page() -> str:
    """Return the page in Markdown: for each command its purpose, its examples and its options."""
    parsers = {name: parser_of(name) for name in COMMANDS}
    options = {name: dict(_groups(parser)) for name, parser in parsers.items()}
    shared = _shared(options)
    parts = [INTRODUCTION]
    for name, parser in parsers.items():
        parts += [f"## {name}\n", f"`{parser.usage}`\n", *_described(parser.description or "")]
        own = [row for rows in options[name].values() for row in rows if row not in shared]
        common = [row[0] for rows in options[name].values() for row in rows if row in shared]
        parts += [_table(own)] if own else []
        parts += [f"[Shared options](#shared-options): {', '.join(map(_brief, common))}.\n"] if common else []
    parts.append("## Shared options\n")
    for title in dict.fromkeys(shared.values()):
        parts.append(f"**{title}**\n\n{_table([row for row, group in shared.items() if group == title])}")
    return "\n".join(parts)


def _groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[Option]]]:
    """Yield the title of each group of a parser, and its options."""
    for group in parser._action_groups:
        title = _linked(group.title or "options")
        yield title[0].upper() + title[1:], list(_options(parser, group))


def _shared(options: dict[str, dict[str, list[Option]]]) -> dict[Option, str]:
    """Return the options that several commands explain in the same words, with the title of their group.

    Of options with the same names but other words, only those of most commands are shared.
    """
    counts = Counter(row for groups in options.values() for rows in groups.values() for row in rows)
    most = {row[0]: row for row, _ in reversed(counts.most_common())}
    titles = {row: title for groups in options.values() for title, rows in groups.items() for row in rows}
    return {row: title for row, title in titles.items() if counts[row] > 1 and most[row[0]] == row}


def _table(rows: Sequence[Option]) -> str:
    return markdown_table(["option", "meaning", "default"], rows) + "\n"


def _brief(names: str) -> str:
    """The names of an option without its value: "`--seed`" of "`--seed N`"."""
    return re.sub(r" [^`]*`", "`", names.replace("`, `", "`,`")).replace("`,`", "`, `")


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a sub-command."""
    (commands,) = (one for one in build_parser(command)._actions if isinstance(one, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = commands.choices[command]
    return parser


def _described(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; indented ones are examples."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("  "):
            lines = "\n".join(line.removeprefix("  ") for line in paragraph.splitlines())
            yield f"```text\n{lines}\n```\n"
        else:
            yield f"{_linked(' '.join(paragraph.split()))}\n"


def _options(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> Iterator[Option]:
    """Yield option, meaning and default of each visible option of a group, but not of the two help options."""
    formatter = parser._get_formatter()
    for action in group._group_actions:
        if action.dest in (WORDS, "help", "help_all") or action.help in (None, argparse.SUPPRESS):
            continue
        name = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar or action.dest}`"
        if action.option_strings and action.nargs != 0:
            name = f"{name[:-1]} {formatter._format_args(action, action.dest.upper())}`"
        meaning, default = " ".join(formatter._expand_help(action).split()), ""
        if found := DEFAULT.match(meaning):
            meaning, default = found.groups()
        yield name.replace("|", "\\|"), _linked(meaning).replace("|", "\\|"), _linked(default)


def _linked(text: str) -> str:
    """Turn names of pages into links and options into code, and escape what Markdown would read as its own."""
    text = re.sub(r"([*<>\[\]])", r"\\\1", text)
    text = re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)", r"`\1`", text)
    return PAGE_NAME.sub(lambda found: f"[{found[0]}]({found[1]}.md{found[2] or ''})", text)


def main(argv: Sequence[str] | None = None) -> None:
    write_page(__doc__, PAGE, commands_page, argv)


if __name__ == "__main__":
    run_script(main)
