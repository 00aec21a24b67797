"""Compare measured tau with what calibration predicts, for static and dynamic trees of many sizes.

    python scripts/check_calibration.py --backbone demo --heads demo --calibrate-on openings.jsonl \\
        --prompts held_out.jsonl

The backbone continues the prompts of --calibrate-on greedily. From that, trees are grown and confidences fitted, as by
`medusa calibrate`, and tau is predicted. Then every tree decodes the held-out prompts. These are counts, no times: any
machine gives the same. `compare_kinds.py --trees auto dynamic:8 calibrated:8` compares the speed of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from decode.bench.calibration.grow import grow, predicted_tau, predicted_tau_held_out
from decode.bench.calibration.recording import record
from decode.bench.methods import Method, medusa_method, plain_method
from decode.drafters.dynamic_tree import DynamicTree
from decode.results import Result, tau
from decode.settings import Settings
from measuring import Models, open_models
from medusa.backbone import Backbone
from medusa.commands import common
from medusa.records import prompt_ids, read_records
from script_tools import plain_table, run_script, script_parser

AT_ONCE = 16  # prompts in a batch; texts and steps do not depend on it


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    common.add_backbone(parser)
    common.add_prompts(parser)
    parser.add_argument("--calibrate-on", required=True, metavar="FILE", help="other prompts than --prompts")
    parser.add_argument("--calibration-prompts", type=common.positive, default=200, metavar="N", help="the first N")
    parser.add_argument("--nodes", type=common.positive, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--max-new-tokens", type=common.positive, default=128)
    common.add_machine(parser)
    args = parser.parse_args(argv)
    models, settings = open_models(args), Settings(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    loaded, heads = models.loaded, common.open_heads(args, models.loaded)
    others = islice(read_records(args.calibrate_on), args.calibration_prompts)
    plain = decode(plain_method(loaded.model, settings), [prompt_ids(r, loaded.tokenizer) for r in others])
    with torch.inference_mode():
        recording = record(Backbone(loaded.model), heads, [(r.input_ids, r.new_ids) for r in plain])
    temperatures, rows = recording.fit_temperatures(), []
    for nodes in args.nodes:
        dynamic = DynamicTree.over_heads(nodes, heads.config.num_heads, temperatures)
        for kind, tree, predicted in (
            ("static", grow(recording, nodes), predicted_tau_held_out(nodes, recording)),
            ("dynamic", dynamic, predicted_tau(dynamic, recording)),
        ):
            results = decode(medusa_method(loaded.model, heads, settings, tree=tree), models.prompts)
            row = {"nodes": nodes, "tree": kind, "foretold": predicted, "measured": tau(results)}
            rows.append(row | {"by_category": tau_by_category(models, results)})
    table = plain_table("", ["nodes", "tree", "predicted", "measured", "predicted / measured"], words=2)
    for row in rows:
        figures = [row["foretold"], row["measured"], row["foretold"] / row["measured"]]
        table.add_row(str(row["nodes"]), row["tree"], *(f"{figure:.3f}" for figure in figures))
    common.output_console(args).print(table)
    about = {"temperatures": temperatures, "calibration_prompts": len(plain), "prompts": len(models.prompts)}
    common.write_results(args, about | {"rows": rows})


def decode(method: Method, prompts: list[list[int]]) -> list[Result]:
    return [result for batch in common.batches(prompts, AT_ONCE) for result in method(batch)]


def tau_by_category(models: Models, results: Sequence[Result]) -> dict[str, float]:
    """tau of each category of the prompts."""
    grouped: dict[str, list[Result]] = {}
    for category, result in zip(models.categories, results, strict=True):
        grouped.setdefault(category or "all", []).append(result)
    return {category: tau(found) for category, found in grouped.items()}


if __name__ == "__main__":
    run_script(main)
