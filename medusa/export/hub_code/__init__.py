"""A small Medusa decoder for plain transformers, which becomes `custom_generate/generate.py` in a Hub repository.

`bundle` joins the modules of this folder into one file, because transformers before 5.21 cannot load a second file from
the Hub on Windows. The modules import only torch, transformers, safetensors and each other.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
PARTS = [HERE / f"{name}.py" for name in ("generate", "decoding", "heads")]
PARTS.append(HERE.parents[1] / "tree_support.py")
"""The files that are joined, in this order."""


def bundle() -> str:
    """Return the code of all `PARTS` as one module, with the docstring of `generate.py` and one list of imports."""
    texts = [part.read_text(encoding="utf-8") for part in PARTS]
    modules: set[str] = set()
    names: defaultdict[str, set[str]] = defaultdict(set)
    bodies = []
    for part, text in zip(PARTS, texts, strict=True):
        imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in imports:
            if isinstance(node, ast.Import):
                modules |= {ast.unparse(node)}
            elif not node.level and node.module != "medusa.tree_support":  # the module is not one of the parts
                names[node.module or ""] |= {ast.unparse(alias) for alias in node.names}
        code = "\n".join(text.splitlines()[imports[-1].end_lineno :]).strip("\n")
        bodies.append(f"# --- {part.stem} {'-' * (113 - len(part.stem))}\n\n{code}")
    outside = [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    docstring = ast.get_docstring(ast.parse(texts[0]), clean=False)
    # The sorted imports begin with __future__, which must come first.
    head = [f'"""{docstring}"""', "", outside[0], "", *sorted(modules), *outside[1:]]
    return "\n\n\n".join(["\n".join(head), *bodies]) + "\n"
