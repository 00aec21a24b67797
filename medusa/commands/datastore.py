"""Build a datastore: text to look up what the backbone may say next, for `--drafter rest:DIR`.

  medusa datastore build --backbone org/model --data own.jsonl --output runs/datastore
  medusa datastore build --backbone org/model --data src --suffix .py --output runs/code

Text like the one to come is worth most: what `medusa distill` wrote, or the sources that are worked on. An interrupted
build goes on where it stopped, by the same command. Files are as for training data, or with --suffix whole documents.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.commands import common
from medusa.errors import RequestError
from medusa.records.sources import DOCUMENT_SEPARATOR, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from decode.drafters.retrieval.datastore import Piece

PIECE = 2**16
"""Characters tokenised at once: a longer text is cut behind a line, so that a word may be told otherwise there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["build"], help="build one, or go on with it")
    common.add_backbone(parser, heads=False)
    group = parser.add_argument_group("text")
    group.add_argument(
        "--data", required=True, metavar="D", help=".jsonl, .json, .txt or .parquet, a folder or a Hub dataset id"
    )
    group.add_argument(
        "--suffix",
        action="append",
        default=[],
        metavar=".EXT",
        help="read the files under --data that end so, each as one document; repeatable",
    )
    group.add_argument("--max-bytes", type=common.positive, metavar="N", help="with --suffix: stop behind N bytes")
    group.add_argument("--split", default="train", help="of a Hub dataset (default: train)")
    group.add_argument(
        "--document-separator", default=DOCUMENT_SEPARATOR, metavar="LINE", help="in a .txt file (default: %(default)s)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output", required=True, metavar="DIR", help="where the datastore goes")
    group.add_argument("--overwrite", action="store_true", help="start anew where the output exists")
    group.add_argument("--json", metavar="FILE", help="write what came out, machine-readable")
    group.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> None:
    from decode.drafters.retrieval.datastore import build, require_output, tokenizer_fingerprint
    from medusa.files import readable
    from medusa.loading import load_config, load_tokenizer

    output = Path(args.output)
    require_output(output, args.overwrite)
    common.check_output(args.json)
    if args.max_bytes and not args.suffix:
        raise RequestError("--max-bytes is for files that --suffix names; give one, or leave it out")
    options = common.load_options(args)
    config, tokenizer = load_config(args.backbone, options), load_tokenizer(args.backbone, options)
    vocab_size = config.get_text_config(decoder=True).vocab_size
    about = {
        "backbone": args.backbone,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": max(vocab_size, 0 if tokenizer is None else len(tokenizer)),
        "data": args.data,
        "suffixes": args.suffix,
        "max_bytes": args.max_bytes,
        "split": args.split,
        "document_separator": args.document_separator,
    }
    pieces = _files(args) if args.suffix else _records(args, tokenizer)
    start = time.monotonic()
    with common.console(args).status("reading") as status:
        built = build(output, pieces, lambda piece: _ids(piece, tokenizer), about, args.overwrite, status.update)
    size = sum(path.stat().st_size for path in output.iterdir())
    common.console(args).print(
        f"{args.output}: {built['documents']} documents, {built['tokens']} tokens, {readable(size)}",
        highlight=False,
        soft_wrap=True,
    )
    common.write_results(args, built | {"bytes": size, "seconds": time.monotonic() - start})


def _records(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Piece]:
    from decode.drafters.retrieval.datastore import Piece
    from train.data.examples import to_example

    for record in read_records(args.data, split=args.split, separator=args.document_separator):
        if record.text is not None:
            yield from _cut(record.where, record.text)
        else:
            yield Piece(record.where, to_example(record, tokenizer).input_ids)


def _files(args: argparse.Namespace) -> Iterator[Piece]:
    """Files in the order of their names; those that are no UTF-8 are left out, and counted.

    Raises:
        RequestError: there is none."""
    place, skipped, left = Path(args.data), 0, args.max_bytes or float("inf")
    suffixes = tuple(args.suffix)
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.name.endswith(suffixes))
    files = [path for path in files if path.name.endswith(suffixes) and path.is_file()]
    if not files:
        raise RequestError(f"no file at {args.data} ends in {' or '.join(suffixes)}; give a folder with some")
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
        common.warn(f"{skipped} of {len(files)} files are no UTF-8 and were left out; convert them with iconv")


def _cut(where: str, text: str) -> Iterator[Piece]:
    from decode.drafters.retrieval.datastore import Piece

    start = 0
    while len(text) - start > PIECE:
        end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield Piece(where, text[start:end], ends=False)
        start = end
    yield Piece(where, text[start:])


def _ids(piece: Piece, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """As a text is taught (`train.data.datasets`), but for BOS: nothing is ever looked up in front of it."""
    if not isinstance(piece.content, str):
        return piece.content
    if tokenizer is None:
        raise RequestError(f"{piece.where}: the backbone has no tokenizer; give input_ids")
    ids: Any = tokenizer(piece.content, add_special_tokens=False, verbose=False)["input_ids"]
    return ids + [tokenizer.eos_token_id] * (piece.ends and tokenizer.eos_token_id is not None)
