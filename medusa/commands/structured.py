"""The options of structured output: texts that follow a JSON schema or a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from decode.strategies.options import require_no_compiled_grammar
from medusa.errors import RequestError, require_extra
from medusa.options import Options, option
from medusa.places import require_file

if TYPE_CHECKING:
    from decode.settings import Settings


class Structured(Options):
    json_schema: str | None = option(
        None, "write JSON that follows the JSON schema in FILE", metavar="FILE", exists=require_file
    )
    grammar: str | None = option(
        None,
        "write texts that follow the grammar in FILE, in llguidance's form of Lark",
        metavar="FILE",
        exists=require_file,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.json_schema is not None and self.grammar is not None:
            raise RequestError("--json-schema and --grammar both prescribe the text; leave one of them out")
        self.source()

    def require_fitting(self, settings: Settings) -> None:
        """Raise a `RequestError` if the settings cannot be combined with a grammar."""
        if self.json_schema is not None or self.grammar is not None:
            require_no_compiled_grammar(settings.compile, settings.ignore_eos)

    def source(self) -> str | None:
        """Read the grammar that the options choose; `None` if there is none.

        Raise a `RequestError` if llguidance is missing, or the file cannot be read or holds no valid grammar."""
        name, path = ("--grammar", self.grammar) if self.json_schema is None else ("--json-schema", self.json_schema)
        if path is None:
            return None
        require_extra("structured", "llguidance")
        from decode.strategies.grammar import json_schema_source, lark_source

        try:
            text = Path(path).read_text(encoding="utf-8")
            return lark_source(text) if self.json_schema is None else json_schema_source(json.loads(text))
        except RequestError as error:
            raise RequestError(f"{name} {path}: {error}") from None
        except (OSError, ValueError, RecursionError) as error:  # errors in JSON and in UTF-8 are ValueErrors
            raise RequestError(f"{name} {path} cannot be read: {error}") from None
