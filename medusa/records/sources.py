"""Reading of records from files (JSONL, JSON, text and Parquet), folders, datasets of `save_to_disk` and the Hub.

Records are read when they are needed, so that a file can be larger than the memory. A JSON array is read as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from medusa import places
from medusa.errors import RequestError, first_line
from medusa.records.messages import parse_json, require_characters
from medusa.records.record import Record, parse_record
from medusa.shipped import PROMPTS

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")  # of files with records, in small or capital letters
UNREAD = (".csv", ".tsv", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip")  # of files that probably hold some, too
SAVED_TO_DISK = (("dataset_dict.json",), ("dataset_info.json", "state.json"))
"""The files in a folder that `save_to_disk` of the library datasets has written: of several splits, or of one."""
DOCUMENT_SEPARATOR = "<|endoftext|>"  # the usual line between two documents in a text file
SETTINGS, FAILED = ".settings.json", ".failed.jsonl"  # endings of files without records that `medusa distill` writes
WEIGHTS = "weights"  # the setting that holds a few weights of the model that wrote the texts (`medusa.fingerprint`)


def read_records(
    source: str, *, split: str = "train", subset: str | None = None, separator: str | None = None
) -> Iterator[Record]:
    """Read the records of a file, of all files in a folder, or of the `split` and `subset` of a Hub dataset.

    A folder may also be a dataset that `save_to_disk` of the library datasets has written, of one split or of several.
    The source `demo` is the file of prompts that comes with the package.

    In a `.txt` file, lines equal to `separator` separate documents. Without a separator every line is a prompt.

    Raise RequestError if the source does not exist, is empty, or contains a record of no known form."""
    path, record = PROMPTS.get(source, Path(source)), None
    files: list[Path] = []
    if any(all((path / name).is_file() for name in names) for names in SAVED_TO_DISK):
        yield from _read_saved(path, split)
        return
    if path.is_dir():
        files = _files_in(path)
    elif path.is_file():
        files = [path]
    else:
        require_records(source)
    records = (r for file in files for r in _read_file(file, separator)) if files else _read_hub(source, split, subset)
    for record in records:
        yield record
    if record is None:
        raise RequestError(f"{source} is empty; it must hold at least one record")


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder that hold records. Raise RequestError if there are none, or some that cannot be read."""
    ends, known = f"files end in {', '.join(SUFFIXES)}", (*SUFFIXES, *UNREAD)
    named = (f for f in folder.rglob("*") if f.suffix.lower() in known and not f.name.endswith((SETTINGS, FAILED)))
    files = sorted(f for f in named if f.is_file())
    if not files:
        raise RequestError(f"{folder} holds no data; {ends}")
    for file in files:
        if file.suffix.lower() in UNREAD:
            raise RequestError(f"{file} cannot be read; {ends}: convert it, or move it to another folder")
    return files


def require_records(source: str) -> None:
    """Raise RequestError if `source` is no file, folder or shipped file, and can be no Hub id. The Hub is not asked."""
    path = PROMPTS.get(source, Path(source))
    may_be_id = path.suffix.lower() not in SUFFIXES and places.SHORT_HUB_ID.fullmatch(source)
    if not path.exists() and (not may_be_id or (path.parent.is_dir() and len(path.parts) > 2)):
        kinds = f"a file ({', '.join(SUFFIXES)}), a folder, a Hub dataset id or demo"
        raise RequestError(f"no data at {source}: give {kinds}")


def require_splits(source: str | None, option: str = "--split") -> None:
    """Raise a RequestError if data has no splits: it is missing, a file, or a folder other than a saved dataset."""
    if source is None:
        raise RequestError(f"{option} chooses a part of a dataset, and none is given; leave out {option}")
    path = PROMPTS.get(source, Path(source))
    if path.is_file() or (path.is_dir() and not (path / SAVED_TO_DISK[0][0]).is_file()):
        raise RequestError(f"{option} chooses a part of a Hub dataset, and {source} is local; leave out {option}")


def _read_file(path: Path, separator: str | None) -> Iterator[Record]:
    """Read the records of one file, in the format that the file's suffix shows."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from (parse_record(row, f"{path}, row {n}", arrow=True) for n, row in enumerate(_parquet_rows(path), 1))
    elif kind == ".jsonl":
        for number, line in _lines(path):
            if line.strip():
                yield parse_record(parse_json(line, f"{path}:{number}"), f"{path}:{number}")
    elif kind == ".json":
        yield from (parse_record(row, f"{path}, record {number}") for number, row in enumerate(_json_array(path), 1))
    elif kind == ".txt" and separator is not None:
        yield from _documents(path, separator)
    elif kind == ".txt":
        for number, line in _lines(path):
            if line.strip():
                yield Record(f"{path}:{number}", text=line, is_prompt=True)
    else:
        raise RequestError(f"{path}: files end in {', '.join(SUFFIXES)}")


def _read_saved(folder: Path, split: str) -> Iterator[Record]:
    """Read the records of a dataset that `save_to_disk` has written; of several splits, read `split`."""
    from datasets import Dataset, load_from_disk

    try:
        saved = load_from_disk(folder)
    except Exception as error:  # datasets raises errors of many types
        raise RequestError(f"{folder} is an empty or damaged dataset of save_to_disk ({first_line(error)})") from None
    if not isinstance(saved, Dataset):
        if split not in saved:
            splits = ", ".join(map(str, saved)) or "none"
            raise RequestError(f"{folder} has no split {split!r}; its splits are {splits}")
        saved = saved[split]
    if not len(saved):
        raise RequestError(f"{folder} is empty; it must hold at least one record")
    yield from (parse_record(row, f"{folder}, row {n}", arrow=True) for n, row in enumerate(saved, 1))


def _parquet_rows(path: Path) -> Iterator[object]:
    """Read the rows of a Parquet file in batches."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        for batch in ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise RequestError(f"{path} is damaged or no Parquet file ({first_line(error)})") from None


def _json_array(path: Path) -> list[object]:
    """Read a file that contains one JSON array of records."""
    text = "\n".join(line for _, line in _lines(path))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; a file with one record a line is named .jsonl" if error.msg == "Extra data" else ""
        raise RequestError(f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno}){hint}") from None
    except (ValueError, RecursionError) as error:  # a number that is too long, or nested too deeply
        raise RequestError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, list):
        raise RequestError(f"{path} must hold a JSON array of records")
    require_characters(text, content, str(path))
    return content


def _documents(path: Path, separator: str) -> Iterator[Record]:
    """Read the documents of a text file, which are separated by lines that contain only `separator`."""
    lines: list[str] = []
    start = 1
    for number, line in chain(_lines(path), [(0, separator)]):
        if line.rstrip(" \t") != separator:
            lines.append(line)
            continue
        document = "\n".join(lines)
        if document.strip():
            yield Record(f"{path}:{start}", text=document.strip("\n"))
        lines, start = [], number + 1


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read a file's lines with their numbers, split only at newlines: JSON can contain characters such as U+2028."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # without a byte order mark
            except UnicodeDecodeError as error:
                wrong = f"byte {error.start + 1} of the line is {error.object[error.start]:#04x}"
                raise RequestError(f"{path}:{number}: not UTF-8 ({wrong}); convert the file, as with iconv") from None
            yield number, text.rstrip("\n").rstrip("\r")


def _read_hub(name: str, split: str, subset: str | None) -> Iterator[Record]:
    """Stream the records of a Hub dataset."""
    from datasets import load_dataset

    if not places.hub_is_reachable():
        raise RequestError(f"no data at {name}: it is not on this machine, and {places.unreachable()}")
    try:
        rows = load_dataset(name, split=split, streaming=True, **({"name": subset} if subset else {}))
    except Exception as error:  # datasets raises errors of many types
        raise RequestError(f"{name}: neither a file nor a dataset on the Hub ({first_line(error)})") from None
    yield from (parse_record(row, f"{name}, row {n}", arrow=True) for n, row in enumerate(rows, 1))
