"""Datastores for REST (arXiv 2311.08252, section 3): the token ids of many documents, with a suffix array for searches.

    DIR/tokens.bin       the ids of all documents, `end` after each; uint16 if the vocabulary allows, else uint32
    DIR/order.bin        the suffix array, uint32: all positions of ids, sorted by the DEPTH tokens from there on
    DIR/datastore.json   written last: tokenizer, settings and counts
    DIR/building.json    the progress of the build; datastore.json replaces it at the end

The id `end` is the vocabulary size. Both .bin files are memory-mapped, so an open datastore uses memory only for the
pages that are read. Each bisection of order.bin reads log2(n) of its positions: 26 for n = 65 million tokens. A build
writes 6 n bytes (8 n with uint32), and needs memory for one group of positions (`suffix_array`). After every block of
text and every group, it records the files' lengths. If run again, it cuts the files to these lengths and continues."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from decode.drafters.retrieval.suffix_array import BLOCK, DEPTH, first_groups, sorted_places
from medusa.errors import RequestError
from medusa.files import Json, disk_may_fill, lock, read_json, require_absent, write_json

TOKENS, ORDER, DONE, BUILDING = "tokens.bin", "order.bin", "datastore.json", "building.json"
NEW = ".new"  # the folder, inside of a finished datastore, of the build that is to replace it
FORMAT = 1
MOST = 2**32 - DEPTH  # maximum number of tokens of a datastore, because positions are uint32


class OtherTextError(RequestError):
    """An unfinished build was started with another text."""


class Piece(NamedTuple):
    """A passage of a document that is tokenised in one call."""

    where: str  # file and line, for error messages
    content: str | list[int]  # text, or token ids if the text is already tokenised
    ends: bool = True  # whether the document ends with this piece

    def to_bytes(self) -> bytes:
        """Return the piece as bytes, for a hash by which a continued build checks that the text is the same."""
        return json.dumps([self.content, self.ends]).encode()


class Match(NamedTuple):
    """Where a text's last `size` tokens occur in a datastore: the entries [first, last) of its suffix array `order`."""

    size: int
    first: int
    last: int


class Datastore:
    """A finished datastore, opened for searches."""

    def __init__(self, folder: str | Path) -> None:
        """Open a datastore, or raise a `RequestError` if it is missing, unfinished or damaged."""
        self.folder = Path(folder)
        if not (self.folder / DONE).is_file():
            if (self.folder / BUILDING).is_file():
                raise RequestError(f"the datastore {folder} is unfinished; run its `medusa datastore build` again")
            raise RequestError(f"no datastore at {folder}; `medusa datastore build` makes one")
        self.about: Json = read_json(self.folder / DONE)
        if not isinstance(self.about, dict) or (self.about.get("format"), self.about.get("depth")) != (FORMAT, DEPTH):
            raise RequestError(f"the datastore {folder} has the format of another version; build it again")
        for name in ("vocab_size", "tokens", "documents", "largest"):
            if not isinstance(self.about.get(name), int):
                raise RequestError(
                    f"{self.folder / DONE} is damaged ({name}); build the datastore again with --overwrite"
                )
        self.end = int(self.about["vocab_size"])
        self.tokens = _mapped(self.folder / TOKENS, _dtype(self.end), self.about["tokens"] + DEPTH)
        self.order = _mapped(self.folder / ORDER, np.dtype(np.uint32), self.about["tokens"] - self.about["documents"])

    def require_vocabulary(self, vocab_size: int, name: str) -> None:
        """Raise a `RequestError` if the datastore holds ids outside the vocabulary of the backbone `name`."""
        if self.about["largest"] >= vocab_size:
            raise RequestError(
                f"the datastore {self.folder} belongs to {self.about['backbone']}: it holds the id "
                f"{self.about['largest']}, and {name} has {vocab_size} tokens; build one for {name}"
            )

    def require_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
        """Raise a `RequestError` if the datastore has another tokenizer than the backbone `name`; `None`: no check."""
        known, given = self.about["tokenizer"], tokenizer_fingerprint(tokenizer)
        if known is not None and given is not None and known != given:
            raise RequestError(
                f"the datastore {self.folder} was built with the tokenizer of {self.about['backbone']} "
                f"({known['tokens']} tokens, {known['sha256'][:8]}) and {name} has another one "
                f"({given['tokens']} tokens, {given['sha256'][:8]}); build one for {name}"
            )

    def longest(self, text: list[int], min_n: int = 1) -> Match | None:
        """Find the longest suffix of `text`, of `min_n` to DEPTH tokens, that occurs in a document, or `None`."""
        found: Match | None = None
        low, high = min_n, min(len(text), DEPTH)
        while low <= high:  # where a long suffix occurs, so do the shorter ones
            size = (low + high) // 2
            wanted, key = text[-size:], partial(self._suffix, count=size)
            first = bisect_left(range(len(self.order)), wanted, key=key)
            if first < len(self.order) and key(first) == wanted:
                found, low = Match(size, first, first), size + 1
            else:
                high = size - 1
        if found is None:
            return None
        key = partial(self._suffix, count=found.size)
        last = bisect_right(range(len(self.order)), text[-found.size :], lo=found.first, key=key)
        return found._replace(last=last)

    def _suffix(self, at: int, count: int) -> list[int]:
        place = int(self.order[at])
        return self.tokens[place : place + count].tolist()

    def after(self, match: Match, count: int, most: int) -> list[list[int]]:
        """Return the `count` tokens after each occurrence of `match`, or fewer where a document ends.

        If there are more than `most` occurrences, every k-th occurrence is taken. As occurrences are sorted by the
        tokens after them, the frequencies of continuations stay about the same."""
        step = -(-(match.last - match.first) // most)
        places = self.order[match.first : match.last : step].astype(np.int64) + match.size
        following = np.minimum(places[:, None] + np.arange(count), len(self.tokens) - 1)
        rows = self.tokens[following].tolist()
        return [row[: row.index(self.end)] if self.end in row else row for row in rows]


def _dtype(end: int) -> np.dtype:
    return np.dtype(np.uint16 if end < 2**16 else np.uint32)


def _mapped(path: Path, dtype: np.dtype, count: int) -> NDArray:
    """Map a file of `count` numbers into memory, as a plain array because slices of a `memmap` take microseconds."""
    if not path.is_file() or path.stat().st_size != count * dtype.itemsize:
        raise RequestError(f"{path} is missing or damaged; build the datastore again with --overwrite")
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,)))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> Json | None:
    """Return the vocabulary size and SHA-256 that identify a tokenizer; `None` if there is no tokenizer."""
    if tokenizer is None:
        return None
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0])))
    return {"tokens": len(tokenizer), "sha256": hashlib.sha256(vocabulary.encode()).hexdigest()}


def require_output(folder: Path, overwrite: bool) -> None:
    """Raise a `RequestError` if `folder` holds files but no datastore, or a finished one without `overwrite`."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    names -= {path.name for path in _temporary_files(folder)}
    if names and not names & {DONE, BUILDING}:
        raise RequestError(f"{folder} holds something other than a datastore; choose another place")
    if folder.is_file() or DONE in names:
        require_absent(folder, overwrite and not folder.is_file())


def _temporary_files(folder: Path) -> list[Path]:
    """List the temporary files that `medusa.files.replacing` left in `folder` when a build was interrupted."""
    return [path for name in (BUILDING, DONE) for path in folder.glob(f".{name}.*")]


def build(
    folder: Path,
    pieces: Iterable[Piece],
    encode: Callable[[Piece], list[int]],
    about: Json,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda message: None,
) -> Json:
    """Build a datastore in `folder`, or continue an unfinished build; returns the content of datastore.json.

    `encode` returns the token ids of a piece. `about` holds `backbone`, `tokenizer` (the result of
    `tokenizer_fingerprint`), `vocab_size`, and every other setting that the ids depend on. To continue a build, give
    the same `pieces` in the same order, and the same `about`. `overwrite` deletes an unfinished build in `folder`. A
    finished datastore stays until the new one, which is built in a folder inside of it, is finished, too. `tell`
    receives progress messages.

    Raise a `RequestError` if `folder` holds other files or, without `overwrite`, a finished datastore or another build,
    or if the text is empty or has ids of another tokenizer; raise a `RunError` if the disk is full."""
    settings = json.loads(json.dumps(about | {"format": FORMAT, "depth": DEPTH}))  # as building.json returns them
    require_output(folder, overwrite)
    replaces = (folder / DONE).is_file()
    place = folder / NEW if replaces else folder
    is_new = not folder.exists()
    full = disk_may_fill(folder, lambda: "the progress is kept: make room and run the same command again")
    with contextlib.ExitStack() as stack, full:
        builder = _Builder(place, settings, overwrite, stack, continues=replaces)
        try:
            if builder.state["read"]:
                builder.require_same(pieces)
            else:
                builder.read(pieces, encode, tell)
        except RequestError as error:
            if replaces or (is_new and not read_json(place / BUILDING)["pieces"]):  # nothing that a run could continue
                shutil.rmtree(place)
            if replaces and isinstance(error, OtherTextError):
                raise RequestError("an unfinished build of another text is deleted; run the command again") from None
            raise
        builder.sort(tell)
        found = builder.finish()
        if replaces:
            (folder / DONE).unlink()  # until all files are there, the folder holds no datastore
            for name in (ORDER, TOKENS, DONE):
                os.replace(place / name, folder / name)
            place.rmdir()
        return found


class _Builder:
    """Writes the files of a datastore, and records the progress of the build in building.json."""

    def __init__(
        self, folder: Path, about: Json, overwrite: bool, stack: contextlib.ExitStack, continues: bool = False
    ) -> None:
        """Begin or continue a build; until `stack` closes, other builds in the folder are refused.

        `overwrite` deletes an earlier build, but if it `continues` one only a build with other settings."""
        self.folder, self.end = folder, int(about["vocab_size"])
        self.dtype = _dtype(self.end)
        folder.mkdir(parents=True, exist_ok=True)
        if sys.platform != "win32":  # which cannot open a folder
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            if not lock(handle, wait=False):
                raise RequestError(f"another build is writing to {folder}; wait for it, or choose another place")
        held = read_json(folder / BUILDING) if continues and (folder / BUILDING).is_file() else {}
        overwrite = overwrite and held.get("about") != about
        for name in (DONE, TOKENS, ORDER, BUILDING) if overwrite else ():
            (folder / name).unlink(missing_ok=True)  # other files stay: one may be the text to store
        for path in _temporary_files(folder):
            path.unlink()
        counts = {"pieces": 0, "groups": 0, "largest": 0, "documents": 0, "bytes": {TOKENS: 0, ORDER: 0}}
        self.state: Json = {"about": about, "digest": hashlib.sha256().hexdigest(), "read": False} | counts
        if (folder / BUILDING).is_file():
            self.state = read_json(folder / BUILDING)
            if self.state.get("about") != about:
                raise RequestError(f"{folder} was started with other settings; choose another place or add --overwrite")
        write_json(folder / BUILDING, self.state)

    def require_same(self, pieces: Iterable[Piece]) -> None:
        """Raise a `RequestError` unless these are the pieces that an earlier run has read."""
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece.to_bytes())
        self._require_digest(digest.hexdigest())

    def _require_digest(self, digest: str) -> None:
        if digest != self.state["digest"]:
            raise OtherTextError(f"{self.folder} was started with another text; add --overwrite to start again")

    def read(self, pieces: Iterable[Piece], encode: Callable[[Piece], list[int]], tell: Callable[[str], None]) -> None:
        """Tokenise the pieces of text that no earlier run has read, and append their ids to tokens.bin."""
        digest, remaining, size = hashlib.sha256(), iter(pieces), self.dtype.itemsize
        for piece in islice(remaining, self.state["pieces"]):
            digest.update(piece.to_bytes())
        self._require_digest(digest.hexdigest())
        with self._open(TOKENS) as file:
            written = file.tell()
            for piece in remaining:
                digest.update(piece.to_bytes())
                ids = encode(piece)
                largest = max(ids, default=0)
                if largest >= self.end:
                    raise RequestError(
                        f"{piece.where}: the id {largest} is beyond the backbone's vocabulary of {self.end}; tokenise "
                        "the text with the backbone's tokenizer"
                    )
                file.write(np.array(ids + [self.end] * piece.ends, self.dtype).tobytes())
                self.state["pieces"] += 1
                self.state["documents"] += piece.ends
                self.state["largest"] = max(self.state["largest"], largest)
                if file.tell() > MOST * size:
                    raise RequestError(f"the text has more than {MOST} tokens; build several datastores")
                if file.tell() - written >= BLOCK * size:
                    written = file.tell()
                    self._record(file, TOKENS, digest=digest.hexdigest())
                    tell(f"{written // size / 1e6:.0f} M tokens read")
            if file.tell() == self.state["documents"] * size:
                raise RequestError("the data holds no tokens; give some text")
            file.write(np.full(DEPTH, self.end, self.dtype).tobytes())
            self._record(file, TOKENS, digest=digest.hexdigest(), read=True)

    def sort(self, tell: Callable[[str], None]) -> None:
        """Sort the groups of positions that no earlier run has sorted, and append them to order.bin."""
        tokens = _mapped(self.folder / TOKENS, self.dtype, self.state["bytes"][TOKENS] // self.dtype.itemsize)
        with self._open(ORDER) as file:
            for number, (low, high) in enumerate(first_groups(tokens, self.end)):
                if number < self.state["groups"]:
                    continue
                for places in sorted_places(tokens, low, high, self.end):
                    file.write(places.tobytes())
                self._record(file, ORDER, groups=number + 1)
                tell(f"{file.tell() // 4 / 1e6:.0f} of {len(tokens) / 1e6:.0f} M tokens sorted")

    def finish(self) -> Json:
        """Write datastore.json and remove building.json; returns the content of datastore.json."""
        counts = {name: self.state[name] for name in ("documents", "largest", "digest")}
        about = self.state["about"] | {"tokens": self.state["bytes"][TOKENS] // self.dtype.itemsize - DEPTH} | counts
        write_json(self.folder / DONE, about)
        (self.folder / BUILDING).unlink()
        return about

    def _open(self, name: str) -> IO[bytes]:
        """Open a .bin file for appending, after cutting it to the length that building.json records."""
        path, size = self.folder / name, self.state["bytes"][name]
        path.touch()
        if path.stat().st_size < size:
            raise RequestError(f"{path} is damaged; add --overwrite to start again")
        os.truncate(path, size)
        return path.open("ab")

    def _record(self, file: IO[bytes], name: str, **done: str | bool | int) -> None:
        """Flush `file` to disk, then record the progress `done` in building.json."""
        file.flush()
        os.fsync(file.fileno())
        self.state["bytes"][name] = file.tell()
        self.state |= done
        write_json(self.folder / BUILDING, self.state)
