"""Medusa decoding for plain transformers: the parts of `custom_generate/generate.py` in a Hub repository.

`bundle` joins the parts into one file, because transformers before 5.21 cannot load a second file from the Hub on
Windows. The parts import torch, transformers, safetensors and each other.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
PARTS = [HERE / f"{name}.py" for name in ("generate", "decoding", "heads")]
PARTS.append(HERE.parents[1] / "tree_support.py")


def bundle() -> str:
    """Join the parts into one module: the docstring of `generate`, all outside imports, then the code of each part."""
    texts = [part.read_text(encoding="utf-8") for part in PARTS]
    modules: set[str] = set()
    names: defaultdict[str, set[str]] = defaultdict(set)
    bodies = []
    for part, text in zip(PARTS, texts, strict=True):
        imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in imports:
            if isinstance(node, ast.Import):
                modules |= {ast.unparse(node)}
            elif not node.level and node.module != "medusa.tree_support":  # no part
                names[node.module or ""] |= {ast.unparse(alias) for alias in node.names}
        code = "\n".join(text.splitlines()[imports[-1].end_lineno :]).strip("\n")
        bodies.append(f"# --- {part.stem} {'-' * (113 - len(part.stem))}\n\n{code}")
    outside = [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    docstring = ast.get_docstring(ast.parse(texts[0]), clean=False)
    # The first import is that of __future__.
    head = [f'"""{docstring}"""', "", outside[0], "", *sorted(modules), *outside[1:]]
    return "\n\n\n".join(["\n".join(head), *bodies]) + "\n"
