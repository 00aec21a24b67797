"""Build a datastore: text in which `--drafter rest:DIR` looks up the next tokens.

  medusa datastore build --backbone org/model --data own.jsonl --output store
  medusa datastore build --backbone demo --data src --suffix .py --output code

Choose text that resembles the text to generate, such as the output of `medusa distill` or the sources of a project.
Files have the formats of training data; with --suffix, each is a document. The same command continues a stopped build.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.commands.effects import require_revisions
from medusa.commands.evaluate import DataOptions
from medusa.commands.options import Models, Output, warn
from medusa.errors import RequestError
from medusa.files import readable, require_writable_folder
from medusa.options import REQUIRED, LoadOptions, Options, count, group, option
from medusa.records.sources import DOCUMENT_SEPARATOR, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from decode.drafters.retrieval.datastore import Piece

PIECE = 2**16  # characters tokenised at once; a longer text is cut after a line, which may change the tokens there


class DatastoreOptions(Options):
    shown = "action backbone data output suffix max-bytes split overwrite json quiet"
    action: str = option(
        REQUIRED, "build a datastore, or continue to build it", positional=True, choices=["build"], metavar="build"
    )
    models: Models = group(Models, "models", only=("backbone",), backbone=REQUIRED)
    load: LoadOptions = group(LoadOptions, "loading", only=("revision", "trust_remote_code"))
    data: DataOptions = group(DataOptions, "data", without=("max_prompts",))
    suffix: tuple[str, ...] = option(
        (),
        "read each file in --data that ends in .EXT as one document; repeatable",
        metavar=".EXT",
        brief="read files that end in .EXT; repeatable",
    )
    max_bytes: int | None = count(None, "with --suffix: stop after N bytes of text")
    out: str = option(REQUIRED, "write the datastore to this folder", metavar="DIR", name="output")
    overwrite: bool = option(False, "replace an existing datastore")
    output: Output = group(Output, "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_writable_folder(self.out, option="--output")
        require_revisions(self.models.backbone, self.load.revision)
        if self.max_bytes and not self.suffix:
            raise RequestError("--max-bytes works only with --suffix; add --suffix .EXT, or leave it out")
        for name, default in (("split", "train"), ("document_separator", DOCUMENT_SEPARATOR)):
            if self.suffix and getattr(self.data, name) != default:
                raise RequestError(f"--{name.replace('_', '-')} has no effect with --suffix; leave it out")


def run(options: DatastoreOptions) -> None:
    from decode.drafters.retrieval.datastore import build, require_output, tokenizer_fingerprint
    from medusa.loading import BackboneFiles

    folder, backbone = Path(options.out), options.models.backbone
    require_output(folder, options.overwrite)
    files = BackboneFiles(backbone, options.load)
    tokenizer, vocab_size = files.tokenizer, files.config.get_text_config(decoder=True).vocab_size
    about: dict[str, object] = {
        "backbone": backbone,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": max(vocab_size, 0 if tokenizer is None else len(tokenizer)),
        "data": options.data.data,
        "suffixes": list(options.suffix),
        "max_bytes": options.max_bytes,
        "split": options.data.split,
        "document_separator": options.data.document_separator,
    }
    pieces = _files(options) if options.suffix else _records(options.data, tokenizer)
    first = list(islice(pieces, 1))  # data that cannot be read is refused before a folder is made
    start, progress = time.monotonic(), options.output.progress
    with options.output.stage("reading") as status:
        built = build(
            folder, chain(first, pieces), lambda piece: _ids(piece, tokenizer), about, options.overwrite, status.update
        )
    size = sum(path.stat().st_size for path in folder.iterdir())
    built["tokens"] -= built["documents"]  # without the end marks of documents
    summary = f"{options.out}: {built['documents']} documents, {built['tokens']} tokens, {readable(size)}"
    progress.print(summary, highlight=False, soft_wrap=True)
    options.output.write(built | {"bytes": size, "seconds": time.monotonic() - start})


def _records(data: DataOptions, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Piece]:
    """Yield the content of the --data records: texts cut into pieces, and prompts and conversations as token ids."""
    from decode.drafters.retrieval.datastore import Piece
    from train.data.reader import to_examples

    for record in read_records(data.data, split=data.split, separator=data.document_separator):
        if record.text is not None and record.answer is None:
            if record.text:
                yield from _cut(record.where, record.text)
        else:
            for example in to_examples(record, tokenizer)[0]:
                yield Piece(record.where, example.input_ids)


def _files(options: DatastoreOptions) -> Iterator[Piece]:
    """Yield the texts of the --data files whose names end in --suffix, sorted by path. Skip files not in UTF-8."""
    place, skipped, left = Path(options.data.data), 0, options.max_bytes or float("inf")
    found = [place] if place.is_file() else sorted(place.rglob("*"))
    files = [path for path in found if path.name.endswith(options.suffix) and path.is_file()]
    if not files:
        raise RequestError(f"no file at {place} ends in {' or '.join(options.suffix)}; give a folder with such files")
    for path in files:
        if left <= 0:
            break
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            skipped += 1
            continue
        left -= len(content)
        if text:
            yield from _cut(str(path), text)
    if skipped:
        warn(f"{skipped} of {len(files)} files are not UTF-8 and were skipped; convert them with iconv")


def _cut(where: str, text: str) -> Iterator[Piece]:
    """Cut a text into pieces of at most PIECE characters, to tokenise one by one. `where` names its record or file."""
    from decode.drafters.retrieval.datastore import Piece

    start = 0
    while len(text) - start > PIECE:
        end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield Piece(where, text[start:end], ends=False)
        start = end
    yield Piece(where, text[start:])


def _ids(piece: Piece, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return a piece's token ids, as in training but without BOS. The last piece of a text gets EOS at its end."""
    if not isinstance(piece.content, str):
        return piece.content
    if tokenizer is None:
        raise RequestError(f"{piece.where}: the backbone has no tokenizer to encode text; give records with input_ids")
    ids: list[int] = tokenizer(piece.content, add_special_tokens=False, verbose=False)["input_ids"]
    return ids + [tokenizer.eos_token_id] * (piece.ends and tokenizer.eos_token_id is not None)
