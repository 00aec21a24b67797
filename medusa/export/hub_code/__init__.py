"""A small Medusa decoder for plain transformers, which becomes `custom_generate/generate.py` in a Hub repository.

`bundle` joins the modules of this folder into one file, because transformers before 5.21 cannot load a second file from
the Hub on Windows. The modules import only torch, transformers, safetensors and each other."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
SHARED = ("tree_support", "recording")
PARTS = [
    *(HERE / name for name in ("generate.py", "decoding.py", "heads.py")),
    *(HERE.parents[1] / f"{name}.py" for name in SHARED),
]
"""The files that are joined, in this order."""
FUTURE = "from __future__ import annotations\n\n"
FROM_PART = re.compile(rf"^from (?:\.\w+|medusa\.(?:{'|'.join(SHARED)})) import (?:\([^)]*\)|.*)\n\n?", re.MULTILINE)


def bundle() -> str:
    """Return the code of the files `PARTS` joined to one module, without the imports between these files."""
    first, *others = (FROM_PART.sub("", part.read_text(encoding="utf-8")) for part in PARTS)
    # One import from __future__ is enough, and it must come before all other code.
    return "\n\n".join([first, *(other.replace(FUTURE, "") for other in others)])
