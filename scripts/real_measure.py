"""What scripts/real_model.py measures, on the prompts that it reads: tau, methods in turns, and the speed of text."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.bench.benchmark import Contender, run_rounds
from decode.bench.calibration.stored import Calibration
from decode.bench.compare import Sample, interval
from decode.bench.machine import stopwatch
from decode.bench.methods import Method, medusa_method, plain_method, transformers_method
from decode.drafters.layouts import DynamicTree, default_tree
from decode.serve.bulk import BulkWriter, Job
from decode.texts import tau
from medusa.commands.fit.prompts import Split, asked
from medusa.commands.models import Opened, fitted_heads
from medusa.commands.options import batches
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.independent import MedusaHeads
from medusa.records.record import Record
from medusa.records.sources import read_records

SETS = {"MT-bench": ("mt_bench", 80), "GSM8K": ("gsm8k", 40), "HumanEval": ("humaneval", 40)}
"""The sets of prompts: the folder of each in --data, and the number of its last prompts that are set aside."""
ROWS = 16  # of a batch of `model.generate` that is compared with the text engine
TOGETHER = 8  # texts whose tau is measured at once; a text's steps do not depend on the others


def read_prompts(data: Path, more: Sequence[Path]) -> tuple[Split, dict[str, list[Record]]]:
    """Read the sets of prompts; return those to train on, in random order, and those set aside, by set."""
    train, tests = [], {}
    for name, (folder, aside) in SETS.items():
        if not (data / folder).is_dir():
            raise RequestError(f"--data {data} has no folder {folder}; `make real` fetches the three, or see --help")
        records = [replace(record, category=name) for record in read_records(str(data / folder))]
        tests[name] = records[-aside:]
        train += records[:-aside]
    train += [record for file in more for record in read_records(str(file))]
    aside_too = {asked(record) for records in tests.values() for record in records}
    chosen = list({its: record for record in train if (its := asked(record)) not in aside_too}.values())
    random.Random(0).shuffle(chosen)
    return Split(chosen, []), tests


def lengthened(records: Sequence[Record], texts: Path, tokenizer: Tokenizer, tokens: int) -> list[Record]:
    """Put texts of the model with their questions, out of a file of `medusa distill`, before each question.

    The texts of a question have at least `tokens` tokens together, and differ from those of the next one if there are
    enough. Raise RequestError if the file has no texts of a model."""
    written = [record for record in read_records(str(texts)) if record.input_ids]
    if not written:
        raise RequestError(f"{texts} has no texts of a model; it should be a file of medusa distill")
    found, others = [], cycle(written)
    for record in records:
        before, count = list[str](), 0
        while count < tokens:
            ids = next(others).input_ids or []
            before.append(tokenizer.decode(ids, skip_special_tokens=True))
            count += len(ids)
        question = "\n\n".join([*before, record.question])
        found.append(Record(record.where, text=question, is_prompt=True, category=record.category))
    return found


def taus(opened: Opened, heads: MedusaHeads, nodes: Sequence[int], found: Calibration | None) -> Json:
    """Decode the prompts on dynamic trees of `nodes` nodes; return tau with its interval by set of prompts and nodes.

    `found`: the calibration of such heads, for the temperatures of the trees."""
    rows: Json = {}
    for count in nodes:
        dynamic = DynamicTree.over_heads(count, heads.config.num_heads)
        tree = dynamic if found is None else found.fit(dynamic)
        method = medusa_method(opened.loaded.model, heads, opened.settings, opened.loaded.tokenizer, tree=tree)
        contender = Contender(str(count), method)
        run_rounds([contender], list(batches(opened.prompts, TOGETHER)), 1)
        for name in dict.fromkeys(str(record.category) for record in opened.records):
            chosen = [index for index, record in enumerate(opened.records) if record.category == name]
            sample = Sample.of(contender.prompt_figures(chosen))
            its = tau([contender.rounds[0][index] for index in chosen])
            rows.setdefault(name, {})[str(count)] = [its, *interval(sample.tau(sample.resampling()))]
    return rows


def methods_of(
    opened: Opened, heads: Mapping[str, MedusaHeads], calibrations: Mapping[str, Calibration | None], best: str
) -> dict[str, Method]:
    """Make the methods of a comparison: baselines, n-grams, all kinds of heads on their calibrated trees.

    The `best` kind also takes part together with n-grams, in the fastest mix of its calibration."""
    model, settings, tokenizer = opened.loaded.model, opened.settings, opened.loaded.tokenizer
    found: dict[str, Method] = {
        "plain": plain_method(model, settings, tokenizer),
        "transformers": transformers_method(model, settings, tokenizer),
        "prompt lookup": transformers_method(model, settings, tokenizer, prompt_lookup_num_tokens=10),
        "n-grams": medusa_method(model, None, settings, tokenizer, drafter="ngram"),
    }
    for kind, given in heads.items():
        its, fitted = calibrations[kind], fitted_heads(given, opened.loaded)
        tree = default_tree(fitted) if its is None else its.tree
        found[kind] = medusa_method(model, fitted, settings, tokenizer, tree=tree)
        if kind == best:
            drafter, points = "mix:heads+ngram", [] if its is None else its.points
            mixes = [point for point in points if point.kind == "heads and n-grams"]
            if its is not None and mixes:
                point = max(mixes, key=lambda point: point.tokens_per_second)
                tree, drafter = its.tree_of(point), point.drafter
            found[f"{kind} and n-grams"] = medusa_method(model, fitted, settings, tokenizer, tree, drafter)
    return found


def text_speeds(opened: Opened, rounds: int) -> dict[str, list[float]]:
    """Let the engine of `medusa distill` and `model.generate` answer the prompts; return tokens a second by round."""
    loaded, clock = opened.loaded, stopwatch(opened.loaded.model.device)
    generate = transformers_method(loaded.model, opened.settings, loaded.tokenizer)

    def by_engine() -> int:
        ended: list[int] = []

        def keep(new_ids: list[int], reason: str) -> None:
            ended.append(len(new_ids))

        jobs = deque(Job(prompt, seed, keep) for seed, prompt in enumerate(opened.prompts))
        BulkWriter(opened.generator).write(jobs, lambda lengths: None)
        return sum(ended)

    def by_generate() -> int:
        return sum(len(result.new_ids) for batch in batches(opened.prompts, ROWS) for result in generate(batch))

    ways: dict[str, Callable[[], int]] = {"engine": by_engine, "generate": by_generate}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
            start = clock()
            written = ways[name]()
            speeds[name].append(written / (clock() - start))
    return speeds
