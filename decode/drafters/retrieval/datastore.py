"""A datastore: much text as token ids, and where every sequence of them stands (REST, arXiv 2311.08252, section 3).

    DIR/tokens.bin       the ids of all documents, `end` behind each; uint16 where the vocabulary allows, else uint32
    DIR/order.bin        uint32, the place of every token, sorted by the DEPTH tokens from there on
    DIR/datastore.json   written last: whose tokenizer, how many
    DIR/building.json    instead of it while being built: how far that has come

Both files are memory-mapped: an open datastore takes no memory but the pages that are read, and several processes share
them. A search halves `order` as a dictionary is opened, so it reads log2(n) places, 26 for 100 MB of text.

Building holds a piece of the text, or the places of one group (`decode.drafters.retrieval.suffix_array`): of n
tokens on disk, 6 n bytes (8 n
with uint32); at most 2^20 places of 60 to 80 bytes are sorted at once. Only where more places than that begin with the
same token are they all held, 11 bytes each, while they are split: with a fifth of 60 M tokens being spaces, 130 MB.
What is done is written down after every block of text and every group, behind the bytes that it says are there; a run
that goes on cuts off what stands after them, so that the files come out as if it had never stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decode.drafters.retrieval.suffix_array import BLOCK, DEPTH, first_groups, sorted_places
from medusa.errors import RequestError
from medusa.files import disk_may_fill, read_json, require_absent, write_json

TOKENS, ORDER, DONE, BUILDING = "tokens.bin", "order.bin", "datastore.json", "building.json"
FORMAT = 1
MOST = 2**32 - DEPTH
"""Tokens, as places are uint32."""


class Piece(NamedTuple):
    """Some of a document, small enough to be tokenised at once."""

    where: str
    """File and line, for messages to the user."""
    content: str | list[int]
    """Text, or the ids of a text that is tokenised already."""
    ends: bool = True
    """Whether the document ends with it."""


class Match(NamedTuple):
    """Where the end of a text stands in a datastore."""

    size: int
    """Tokens that agree."""
    first: int
    """Of the range in the order that begins with them."""
    last: int
    """Right behind that range."""


class Datastore:
    """One that was built to its end."""

    def __init__(self, folder: str | Path) -> None:
        """Raises:
        RequestError: no datastore there, one that was not built to its end, or files that are not whole."""
        self.folder = Path(folder)
        if not (self.folder / DONE).is_file():
            if (self.folder / BUILDING).is_file():
                raise RequestError(
                    f"the datastore {folder} was not built to its end; run its `medusa datastore build` again"
                )
            raise RequestError(f"no datastore at {folder}; `medusa datastore build` makes one")
        self.about = read_json(self.folder / DONE)
        if self.about.get("format") != FORMAT or self.about.get("depth") != DEPTH:
            raise RequestError(f"the datastore {folder} is of another version; build it again")
        self.end = int(self.about["vocab_size"])
        self.tokens = _mapped(self.folder / TOKENS, _dtype(self.end), self.about["tokens"] + DEPTH)
        self.order = _mapped(self.folder / ORDER, np.dtype(np.uint32), self.about["tokens"] - self.about["documents"])

    def require_vocabulary(self, vocab_size: int, name: str) -> None:
        """Raises:
        RequestError: it holds ids that the backbone `name` does not have."""
        if self.about["largest"] >= vocab_size:
            raise RequestError(
                f"the datastore {self.folder} belongs to {self.about['backbone']}: it holds the id "
                f"{self.about['largest']}, and {name} has {vocab_size} tokens; build one for {name}"
            )

    def require_tokenizer(self, tokenizer: Any, name: str) -> None:
        """`tokenizer`: of the backbone `name`; without one there is nothing to compare.

        Raises:
            RequestError: it was built with another tokenizer."""
        known, ours = self.about["tokenizer"], tokenizer_fingerprint(tokenizer)
        if known is not None and ours is not None and known != ours:
            raise RequestError(
                f"the datastore {self.folder} was built with the tokenizer of {self.about['backbone']} "
                f"({known['tokens']} tokens, {known['sha256'][:8]}) and {name} has another one "
                f"({ours['tokens']} tokens, {ours['sha256'][:8]}); build one for {name}"
            )

    def longest(self, text: list[int], min_n: int = 1) -> Match | None:
        """The longest end of `text`, of `min_n` to DEPTH tokens, that stands somewhere within a document."""
        found: tuple[list[int], int] | None = None
        low, high = min_n, min(len(text), DEPTH)
        while low <= high:  # where a long end stands, the shorter ones do, too
            size = (low + high) // 2
            wanted = text[-size:]
            first = bisect_left(range(len(self.order)), wanted, key=partial(self._words, count=size))
            if first < len(self.order) and self._words(first, size) == wanted:
                found, low = (wanted, first), size + 1
            else:
                high = size - 1
        if found is None:
            return None
        wanted, first = found
        size = len(wanted)
        last = bisect_right(range(len(self.order)), wanted, lo=first, key=partial(self._words, count=size))
        return Match(size, first, last)

    def _words(self, at: int, count: int) -> list[int]:
        place = int(self.order[at])
        return self.tokens[place : place + count].tolist()

    def after(self, match: Match, count: int, most: int) -> list[list[int]]:
        """Up to `count` tokens behind each place of a match, less where the document ends.

        Of more than `most` places, every so-manieth: they are in the order of what follows, so what follows often is
        taken as often."""
        step = -(-(match.last - match.first) // most)
        places = self.order[match.first : match.last : step].astype(np.int64) + match.size
        following = np.minimum(places[:, None] + np.arange(count), len(self.tokens) - 1)
        rows = self.tokens[following].tolist()
        return [row[: row.index(self.end)] if self.end in row else row for row in rows]


def _dtype(end: int) -> np.dtype:
    return np.dtype(np.uint16 if end < 2**16 else np.uint32)


def _mapped(path: Path, dtype: np.dtype, count: int) -> NDArray:
    """A plain array over the file's pages: slices of a `memmap` take microseconds each."""
    if not path.is_file() or path.stat().st_size != count * dtype.itemsize:
        raise RequestError(f"{path} is missing or not whole; build the datastore again with --overwrite")
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,)))


def tokenizer_fingerprint(tokenizer: Any) -> dict[str, Any] | None:
    """What tells one tokenizer from another: which word has which number."""
    if tokenizer is None:
        return None
    words = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda word: (word[1], word[0])))
    return {"tokens": len(tokenizer), "sha256": hashlib.sha256(words.encode()).hexdigest()}


# Building


def build(
    folder: Path,
    pieces: Iterable[Piece],
    encode: Callable[[Piece], list[int]],
    about: dict[str, Any],
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda said: None,
) -> dict[str, Any]:
    """Build a datastore, or go on with one whose `about` is the same; returns what datastore.json holds.

    Args:
        pieces: the text, the same ones in the same order when a build goes on.
        encode: the ids of a piece.
        about: `backbone`, `tokenizer` (`tokenizer_fingerprint`), `vocab_size`, and whatever else the ids depend on.
        tell: told in words how far it is.

    Raises:
        RequestError: the output exists, or was begun with other settings or text; no text, or another tokenizer's ids.
        RunError: the disk is full.
    """
    building = _Building(folder, about | {"format": FORMAT, "depth": DEPTH}, overwrite)
    with disk_may_fill(folder, lambda: "what was built is kept: make room and run the same command again"):
        if not building.state["read"]:
            building.read(pieces, encode, tell)
        building.sort(tell)
        return building.finish()


def require_output(folder: Path, overwrite: bool) -> None:
    """Raises:
    RequestError: something is there that a build would not go on with, or should not replace."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    names -= {path.name for path in _left_behind(folder)}
    if names and not names & {DONE, BUILDING}:
        raise RequestError(f"{folder} holds something else than a datastore; choose another place")
    if folder.is_file() or DONE in names:
        require_absent(folder, overwrite and not folder.is_file())


def _left_behind(folder: Path) -> list[Path]:
    """Files that a killed run was writing (`medusa.files.replacing`)."""
    return [path for name in (BUILDING, DONE) for path in folder.glob(f".{name}.*")]


class _Building:
    def __init__(self, folder: Path, about: dict[str, Any], overwrite: bool) -> None:
        require_output(folder, overwrite)
        self.folder, self.about = folder, json.loads(json.dumps(about))
        if overwrite and folder.is_dir():
            rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.end = int(about["vocab_size"])
        self.state: dict[str, Any] = {
            "about": self.about,
            "pieces": 0,
            "digest": hashlib.sha256().hexdigest(),  # of the pieces
            "read": False,
            "groups": 0,
            "bytes": {TOKENS: 0, ORDER: 0},
            "largest": 0,
            "documents": 0,
        }
        for left in _left_behind(folder):
            left.unlink()
        if (folder / BUILDING).is_file():
            self.state = read_json(folder / BUILDING)
            if self.state.get("about") != self.about:
                raise RequestError(f"{folder} was begun with other settings; choose another place or add --overwrite")
        write_json(folder / BUILDING, self.state)

    def read(self, pieces: Iterable[Piece], encode: Callable[[Piece], list[int]], tell: Callable[[str], None]) -> None:
        """Tokenise what is not yet."""
        digest, coming, dtype = hashlib.sha256(), iter(pieces), _dtype(self.end)
        for piece in islice(coming, self.state["pieces"]):
            _digest(digest, piece)
        if digest.hexdigest() != self.state["digest"]:
            raise RequestError(f"the text is not what {self.folder} was begun with; add --overwrite to start anew")
        with self._growing(TOKENS) as file:
            written = file.tell()
            for piece in coming:
                _digest(digest, piece)
                ids = encode(piece)
                largest = max(ids, default=0)
                if largest >= self.end:
                    raise RequestError(
                        f"{piece.where}: the id {largest} is beyond the backbone's vocabulary of {self.end}; these are "
                        "another tokenizer's ids"
                    )
                file.write(np.array(ids + [self.end] * piece.ends, dtype).tobytes())
                self.state["pieces"] += 1
                self.state["documents"] += piece.ends
                self.state["largest"] = max(self.state["largest"], largest)
                if file.tell() > MOST * dtype.itemsize:
                    raise RequestError(f"more than {MOST} tokens; build several datastores")
                if file.tell() - written >= BLOCK * dtype.itemsize:
                    written = file.tell()
                    self._keep(file, TOKENS, digest=digest.hexdigest())
                    tell(f"{written // dtype.itemsize / 1e6:.0f} M tokens read")
            if file.tell() == self.state["documents"] * dtype.itemsize:
                raise RequestError("the data holds no tokens; give some text")
            file.write(np.full(DEPTH, self.end, dtype).tobytes())
            self._keep(file, TOKENS, digest=digest.hexdigest(), read=True)

    def sort(self, tell: Callable[[str], None]) -> None:
        """Sort what is not yet."""
        dtype = _dtype(self.end)
        tokens = _mapped(self.folder / TOKENS, dtype, self.state["bytes"][TOKENS] // dtype.itemsize)
        with self._growing(ORDER) as file:
            for number, (low, high) in enumerate(first_groups(tokens, self.end)):
                if number < self.state["groups"]:
                    continue
                for places in sorted_places(tokens, low, high, self.end):
                    file.write(places.tobytes())
                self._keep(file, ORDER, groups=number + 1)
                tell(f"{file.tell() // 4 / 1e6:.0f} of {len(tokens) / 1e6:.0f} M tokens sorted")

    def finish(self) -> dict[str, Any]:
        tokens = self.state["bytes"][TOKENS] // _dtype(self.end).itemsize - DEPTH
        counted = {name: self.state[name] for name in ("documents", "largest", "digest")}
        about = self.about | {"tokens": tokens} | counted
        write_json(self.folder / DONE, about)
        (self.folder / BUILDING).unlink()
        return about

    def _growing(self, name: str) -> IO[bytes]:
        """A file of which as much is kept as the state knows of."""
        path, size = self.folder / name, self.state["bytes"][name]
        path.touch()
        if path.stat().st_size < size:
            raise RequestError(f"{path} is not whole; add --overwrite to start anew")
        os.truncate(path, size)
        return path.open("ab")

    def _keep(self, file: IO[bytes], name: str, **done: Any) -> None:
        """Write down how far it is, once the file is there so far."""
        file.flush()
        os.fsync(file.fileno())
        self.state["bytes"][name] = file.tell()
        self.state |= done
        write_json(self.folder / BUILDING, self.state)


def _digest(digest: Any, piece: Piece) -> None:
    digest.update(json.dumps([piece.content, piece.ends]).encode())
