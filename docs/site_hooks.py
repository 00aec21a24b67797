"""Hooks of `mkdocs build`: pages made from files outside docs/, and links that work on GitHub and in the site.

README, CHANGELOG and CONTRIBUTING become pages, and so do the notebooks as they were saved. On GitHub a link may lead
anywhere in the repository. In the site, a link that leaves docs/ leads to the page made from that file, or to a copy.
"""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
PAGES |= {f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=[)#])")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages made from files outside docs/, and the other files outside docs/ that pages link to."""
    texts = {page.src_uri: (f"docs/{page.src_uri}", page.content_string) for page in files.documentation_pages()}
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = notebook(json.loads(text)) if source.endswith(".ipynb") else text
        files.append(File.generated(config, target, content=moved(text, source, target)))
        texts[target] = (source, text)
    for source, text in texts.values():
        for link in links(text):
            path = reached(source, link)
            if not path.startswith("docs/") and path not in PAGES and files.get_file_from_path(copied(path)) is None:
                files.append(File.generated(config, copied(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page of docs/ whose links out of docs/ lead to the same files in the site."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return moved(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def links(text: str) -> list[str]:
    """The relative links of a page, without those in code blocks."""
    return LINK.findall(FENCE.sub("", text))


def reached(source: str, link: str) -> str:
    """The file that `link` in `source` leads to, from the repository's root."""
    return PurePosixPath(os.path.normpath(PurePosixPath(source).parent / link)).as_posix()


def copied(path: str) -> str:
    """The place in the site of a copy of a file. Markdown and code are copied as text, not rendered."""
    return f"source/{path}.txt" if path.endswith((".md", ".py", ".yaml", ".toml", ".cff")) else f"source/{path}"


def moved(text: str, source: str, target: str) -> str:
    """The text of the file `source`, with its links changed for the site's page `target`."""

    def lead(match: re.Match[str]) -> str:
        path = reached(source, match[0])
        place = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, copied(path))
        return PurePosixPath(os.path.relpath(place, PurePosixPath(target).parent)).as_posix()

    parts = re.split(f"({FENCE.pattern})", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in parts)


def notebook(content: dict[str, Any]) -> str:
    """A saved notebook as a page: text, code and outputs."""
    parts = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        else:
            parts.append(f"```python\n{text}\n```")
            parts += [shown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def shown(output: dict[str, Any]) -> str:
    """One output of a cell, in its richest saved form."""
    data = output.get("data", {})
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return f'<div class="output">{"".join(data[kind])}</div>'
    if "image/png" in data:
        return (
            f'<div class="output"><img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}"></div>'
        )
    text = "".join(output.get("text") or data.get("text/plain") or "")
    return f'<div class="output"><pre>{html.escape(ANSI.sub("", text).rstrip())}</pre></div>'
