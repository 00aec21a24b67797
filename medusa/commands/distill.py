"""Let the backbone write its own training data: heads learn to guess what it says, not what a data set says.

  medusa distill --backbone org/model --prompts questions.jsonl --output own.jsonl
  medusa distill --backbone demo --self-talk 500 --temperature 1 --output own.jsonl

Each line of the output holds `input_ids` (prompt and answer), how many of them are the prompt's, the answer's text and
why it ended. An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.commands import common
from medusa.errors import RequestError
from medusa.files import read_json, write_json, write_text
from medusa.records import SETTINGS

if TYPE_CHECKING:
    from decode.results import Result
    from medusa.backbone import Loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, heads=False)
    common.add_prompts(parser, text=False)
    parser.add_argument("--output", required=True, metavar="F.jsonl", help="where the data goes")
    parser.add_argument("--overwrite", action="store_true", help="start anew where the output exists")
    parser.add_argument(
        "--self-talk", type=common.positive, metavar="N", help="N texts from nothing but the BOS token, no prompts"
    )
    common.add_generation(parser, max_new_tokens=512, tree=False)
    parser.set_defaults(batch_size=16)
    common.add_machine(parser)


def run(args: argparse.Namespace) -> None:
    settings = common.settings_of(args)
    if bool(args.self_talk) == bool(args.prompts):
        raise RequestError("give either --prompts FILE or --self-talk N")
    output = Path(args.output)
    common.check_output(args.output)
    common.check_output(args.json)
    records = [] if args.self_talk else common.read_prompts(args)
    about = settings.to_dict() | {
        "backbone": args.backbone,
        "prompts": args.prompts,
        "self_talk": args.self_talk,
        "max_prompts": args.max_prompts,
        "split": args.split,
        "batch_size": args.batch_size,
        "dtype": args.dtype,
        "seed": args.seed,
    }
    about = json.loads(json.dumps(about))  # as it will be read back
    _check_resume(output, about, args.overwrite)

    common.check_models(args)

    from decode.request import require_fitting
    from medusa.backbone import Backbone
    from medusa.records import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records] or self_talk_prompts(loaded, args.self_talk)
    require_fitting(prompts, Backbone(loaded.model))
    done = _resume(output, about, args.overwrite, len(prompts))
    new_tokens, seconds = write_own_text(loaded, prompts, settings, output, args, done, args.seed)
    common.write_results(args, {"settings": about, "texts": len(prompts), "new_tokens": new_tokens, "seconds": seconds})


def self_talk_prompts(loaded: Loaded, count: int) -> list[list[int]]:
    """`count` prompts of BOS alone.

    Raises:
        RequestError: the backbone has no BOS token to start from.
    """
    begin = getattr(loaded.tokenizer, "bos_token_id", None)
    if begin is None:
        begin = loaded.model.config.get_text_config(decoder=True).bos_token_id
    if begin is None:
        raise RequestError(f"{loaded.name} has no BOS token to start from; give --prompts FILE")
    return [[begin]] * count


def write_own_text(
    loaded: Loaded,
    prompts: Sequence[list[int]],
    settings: Any,
    output: Path,
    args: argparse.Namespace,
    done: int = 0,
    seed: int = 0,
    seconds_at_most: float = float("inf"),
) -> tuple[int, float]:
    """Append the backbone's answers to `prompts[done:]` to `output`, batch by batch; returns tokens and seconds.

    No batch is begun after `seconds_at_most`.
    """
    from rich.progress import track
    from transformers import set_seed

    from decode.results import transformers_method

    method = transformers_method(loaded.model, settings, loaded.tokenizer)
    new_tokens, seconds = 0, 0.0
    starts = range(done, len(prompts), args.batch_size)
    with output.open("a", encoding="utf-8") as file:
        for start in track(starts, "writing", console=common.console(args), disable=args.quiet):
            if seconds > seconds_at_most:
                break
            set_seed(seed + start)  # what a batch holds does not depend on where an earlier run stopped
            results = method(prompts[start : start + args.batch_size], None)
            for result in results:
                file.write(json.dumps(_line(result, loaded, settings), ensure_ascii=False) + "\n")
            file.flush()
            new_tokens += sum(len(result.new_ids) for result in results)
            seconds += results[0].seconds
    return new_tokens, seconds


def _line(result: Result, loaded: Loaded, settings: Any) -> dict[str, Any]:
    told = result.to_dict(loaded.tokenizer, settings.stop)
    return {
        "input_ids": result.input_ids + result.new_ids,
        "prompt_tokens": len(result.input_ids),
        "answer": told["text"],
        "finish_reason": result.finish_reason,
    }


def _check_resume(output: Path, about: dict[str, Any], overwrite: bool) -> None:
    """Raises:
    RequestError: the output was made with other settings, and may not be replaced."""
    if output.exists() and not overwrite:
        sidecar = output.with_suffix(SETTINGS)
        known = read_json(sidecar) if sidecar.exists() else None
        if known != about:
            raise RequestError(f"{output} exists and was made with other settings; choose another or add --overwrite")


def _resume(output: Path, about: dict[str, Any], overwrite: bool, total: int) -> int:
    """How many texts are there already, in whole batches: what an interruption cut off is written again."""
    if overwrite:
        output.unlink(missing_ok=True)
    write_json(output.with_suffix(SETTINGS), about)
    if not output.exists():
        return 0
    lines = output.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is no whole line
    done = len(lines) if len(lines) == total else len(lines) // about["batch_size"] * about["batch_size"]
    write_text(output, "".join(line + "\n" for line in lines[:done]))
    return done
