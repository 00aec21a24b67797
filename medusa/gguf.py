"""GGUF files, the format of llama.cpp, as backbones: transformers reads them, and unpacks their quantised weights."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from medusa.errors import RequestError, require_extra

SUFFIX = ".gguf"
OTHER_WEIGHTS = (".safetensors", ".bin")  # a folder with such files is a model in the format of transformers


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a backbone's name means: the file, or the only one in a folder without other weights.

    Return `None` if the name means no GGUF file. Raise RequestError if there is no such file, if the folder holds
    several, or if the package `gguf` is not installed."""
    place = Path(name)
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.suffix in (SUFFIX, *OTHER_WEIGHTS))
        if not files or any(path.suffix != SUFFIX for path in files):
            return None
        if len(files) > 1:
            listed = ", ".join(path.name for path in files)
            raise RequestError(f"{name} holds {len(files)} GGUF files: {listed}; name one of them, as {files[0]}")
        place = files[0]
    elif place.suffix != SUFFIX:
        return None
    if not place.is_file():
        raise RequestError(f"no backbone at {name}: there is no such file; give another")
    require_extra("gguf", "gguf")
    return place


def read_gguf(reader: Any, file: Path) -> Any:
    """Read the config or the tokenizer in a GGUF file; `reader` is AutoConfig or AutoTokenizer.

    Both are kept, because a large vocabulary takes seconds."""
    found = file.stat()
    return copy.deepcopy(_read(reader, file, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=4)
def _read(reader: Any, file: Path, *written: int) -> Any:
    return reader.from_pretrained(str(file.parent), gguf_file=file.name)
