"""What a step costs beside what it cannot do without: one bare forward over the tree, and the heads at one position.

    python scripts/measure_step.py --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl --threads 1

After every real step the same model is called once more on the same cache, at the same length, with a mask built
beforehand, and the heads once on one hidden state. The figure is the median over steps of

    seconds of the step / (seconds of the bare forward + seconds of the heads)
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter, thread_time
from typing import Any

import torch

from decode.clock import Clock
from decode.front import medusa_session
from decode.request import prepare, resolve_acceptance, resolve_tree
from decode.topology import Topology
from decode.verify import TreeMasks
from medusa.backbone import Backbone
from medusa.commands import common
from medusa.records import prompt_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_backbone(parser)
    common.add_prompts(parser)
    parser.add_argument("--tree", help="default: the heads' own")
    parser.add_argument("--max-new-tokens", type=common.positive, default=128)
    common.add_machine(parser)
    args = parser.parse_args()
    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    heads = common.open_heads(args, loaded)
    tree = resolve_tree(args.tree, heads)
    rows: list[tuple[float, float, float]] = []
    for record in common.read_prompts(args):
        rows += measure(loaded.model, heads, tree, prompt_ids(record, loaded.tokenizer), args.max_new_tokens)
    rows = rows[len(rows) // 20 :]  # the first steps warm caches up
    step, forward, at_one = (statistics.median(column) * 1000 for column in zip(*rows, strict=True))
    ratio = statistics.median(row[0] / (row[1] + row[2]) for row in rows)
    print(f"{len(rows)} steps of {tree.num_nodes} nodes, {torch.get_num_threads()} thread(s)")
    print(f"step {step:.3f} ms, bare forward {forward:.3f} ms, heads {at_one:.3f} ms: ratio {ratio:.3f}")
    common.write_results(args, {"step_ms": step, "forward_ms": forward, "heads_ms": at_one, "ratio": ratio})


@torch.inference_mode()
def measure(
    model: Any, heads: Any, tree: Any, prompt: list[int], max_new_tokens: int
) -> list[tuple[float, float, float]]:
    """Seconds of each step, of the bare forward after it, and of the heads."""
    backbone = Backbone(model)
    requests = prepare(model, [prompt], max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None)
    session, steps = medusa_session(model, heads, requests, tree, resolve_acceptance(None, False), Clock())
    masks, topology = TreeMasks(backbone.config, backbone.dtype, backbone.device), Topology.of(tree.to(backbone.device))
    ids = torch.tensor([prompt[:1] * tree.num_nodes], device=backbone.device)
    hidden = torch.zeros(1, backbone.hidden_size, dtype=backbone.dtype, device=backbone.device)
    # On one thread its own CPU time is as good as wall time on an idle machine, and far better on a busy one.
    clock = thread_time if torch.get_num_threads() == 1 and backbone.device.type == "cpu" else perf_counter
    rows = []
    next(steps)
    while True:
        start = clock()
        step = next(steps, None)
        seconds = clock() - start
        if step is None or session.sequences.finish_reason[0] is not None:
            return rows
        length = session.cache.lengths[0]
        if backbone.context is not None and length + tree.max_depth >= backbone.context:
            return rows
        mask, positions = masks([length], topology), topology.depth + length
        start = clock()
        model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=session.cache, use_cache=True)
        forward = clock() - start
        session.cache.pending = 0
        start = clock()
        heads(hidden, backbone.lm_head, tree.max_depth)
        rows.append((seconds, forward, clock() - start))


if __name__ == "__main__":
    main()
