"""What a step costs beside what it cannot do without: one bare forward over the tree, and the heads at one position.

    python scripts/measure_step.py --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl --threads 1
    python scripts/measure_step.py --random 6x288 --tree mc_sim_7b_63 --threads 1
    python scripts/measure_step.py --random 12x768 --tree topk:4,3 --tau 2.5 --dtype bfloat16 --threads 1

A round is one real step, a bare forward of the same model on the same cache with a mask built beforehand, the heads on
one hidden state, and the same of plain decoding: one step of our loop and one forward over one token. All are timed
within the round, so that a machine that slows down slows all of them:

    ratio    step / (forward + heads)
    outside  the part of the step that is neither forward nor heads
    speedup  tau x plain step / step, beside its bound tau x T(1) / (T(n) + T(heads))

`--random` takes a Llama of that many layers and that hidden size, with random weights and V = 32000. Its LM head makes
it count: after token t it writes t + 1, in every dtype and however it is batched, so that a scripted drafter can be
right about as many tokens as `--tau` wants. The heads are run all the same; their guesses fill the rest of the tree.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from decode import prefill as prefill_module
from decode.bench.machine import machine
from decode.cache import TreeCache
from decode.draft import Draft, Frontier
from decode.drafters.heads import HeadsDrafter
from decode.loop import Session
from decode.prefill import prefill
from decode.reference import plain_session
from decode.request import prepare, resolve_acceptance, resolve_tree
from decode.timers import Timer, stopwatch
from decode.topology import Topology
from decode.verify import TreeMasks, Verifier
from medusa import MedusaConfig, MedusaHeads, RequestError, Tree
from medusa.backbone import Backbone
from medusa.commands import common
from medusa.heads.inputs import HeadInputs
from medusa.loading import DTYPES
from medusa.records import prompt_ids

VOCAB, NUM_HEADS = 32000, 5
WARM_UP = 3
"""Rounds of each prompt that are not counted."""


@dataclass
class Round:
    """Seconds."""

    step: float
    forward: float
    heads: float
    plain: float
    forward_of_one: float


class Scripted(HeadsDrafter):
    """The heads' draft with the right tokens, root + 1, root + 2, ..., written over its first path."""

    tau: float
    steps = 0

    def propose(self, frontier: Frontier) -> Draft:
        draft = super().propose(frontier)
        right = int((self.steps + 1) * (self.tau - 1)) - int(self.steps * (self.tau - 1))
        self.steps += 1
        path = self.static.paths[-1][1 : right + 1]  # the last node is one of the deepest
        draft.ids[:, path] = (frontier.root[:, None] + self.static.depth[path]) % self.backbone.vocab_size
        return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_backbone(parser, required=False)
    next(action for action in parser._actions if action.dest == "backbone").required = False
    common.add_prompts(parser)
    parser.add_argument("--random", type=layers_and_hidden, metavar="LxH", help="a random Llama instead of --backbone")
    parser.add_argument("--tau", type=float, help="scripted acceptance (--random); default: what the heads get")
    parser.add_argument("--prompt-tokens", type=common.positive, default=256, help="of --random (default: 256)")
    parser.add_argument("--piece", type=common.positive, help="tokens of a prompt that are read at once")
    parser.add_argument("--lm-head", choices=["own", "shared"], default="own", help="of the heads of --random")
    parser.add_argument("--tree", help="default: the heads' own")
    parser.add_argument("--max-new-tokens", type=common.positive, default=128)
    common.add_machine(parser)
    args = parser.parse_args()
    common.prepare_machine(args)
    if args.piece:
        prefill_module.TOKENS = prefill_module.LEAST = args.piece
    prompts: list[list[int]]
    if args.random:
        model = counting_llama(*args.random).to(args.device or "cpu", DTYPES[args.dtype or "float32"])
        heads = random_heads(model, args.lm_head)
        prompts = [torch.randint(VOCAB, (args.prompt_tokens,)).tolist()]
    elif not (args.backbone and args.heads):
        raise RequestError("nothing to measure: give --backbone B --heads H --prompts P, or --random LxH")
    else:
        loaded = common.open_backbone(args)
        model, heads = loaded.model, common.open_heads(args, loaded)
        prompts = [prompt_ids(record, loaded.tokenizer) for record in common.read_prompts(args)]
    tree = resolve_tree(args.tree, heads)
    first_forward = measure_prefill(model, max(prompts, key=len))
    rounds, lengths = [], []
    for prompt in prompts:
        found, of_steps = measure(model, heads, tree, prompt, args.max_new_tokens, args.tau)
        rounds += found
        lengths += of_steps
    outcome = summarize(rounds, statistics.fmean(lengths))
    about = {name: getattr(args, name) for name in ("random", "lm_head", "prompt_tokens", "piece")}
    about |= {"nodes": tree.num_nodes, "dtype": str(model.dtype).removeprefix("torch.")}
    outcome["prefill"] = first_forward
    show(outcome, f"{len(rounds)} steps of {tree.num_nodes} nodes, {torch.get_num_threads()} thread(s)")
    common.write_results(args, {"machine": asdict(machine()), "settings": about} | outcome)


def layers_and_hidden(text: str) -> tuple[int, int]:
    layers, _, hidden = text.partition("x")
    return common.positive(layers), common.positive(hidden)


def counting_llama(layers: int, hidden: int) -> LlamaForCausalLM:
    """A random Llama that writes t + 1 after t: the LM head's row t + 1 is the embedding of t."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        head_dim=64,
        max_position_embeddings=1 << 16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        nn.init.normal_(embedding, std=4)  # so far above what the layers add that rounding decides nothing
        model.lm_head.weight.copy_(embedding.roll(1, 0) / 4 / hidden**0.5)
    return model


def random_heads(model: LlamaForCausalLM, lm_head: str) -> MedusaHeads:
    config = MedusaConfig(hidden_size=model.config.hidden_size, vocab_size=VOCAB, num_heads=NUM_HEADS, lm_head=lm_head)
    heads = MedusaHeads(config)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.02)
    return heads.to(model.device, model.dtype).eval()


@torch.inference_mode()
def measure_prefill(model: Any, prompt: list[int]) -> dict[str, float]:
    """Seconds of reading a prompt, and how far the memory in use rose meanwhile (Linux or CUDA), its cache included."""
    backbone = Backbone(model)
    ids = torch.tensor([prompt], device=backbone.device)
    before = _memory(backbone.device, reset=True)
    cache = TreeCache(model.config, 1, capacity=len(prompt))
    seconds, _ = _timer(backbone.device)(lambda: prefill(backbone, cache, ids, [len(prompt)]))
    kept = sum(arena.buffer.nbytes for arena in cache.arenas)
    return {
        "tokens": len(prompt),
        "seconds": seconds,
        "peak_mb": (_memory(backbone.device) - before) / 2**20,
        "cache_mb": kept / 2**20,
    }


def _memory(device: torch.device, reset: bool = False) -> int:
    """The most bytes that were in use; with `reset` counting begins anew."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


@torch.inference_mode()
def measure(
    model: Any, heads: MedusaHeads, tree: Tree, prompt: list[int], max_new_tokens: int, tau: float | None = None
) -> tuple[list[Round], list[int]]:
    """Rounds of decoding one prompt, and how many tokens each step accepted, the root included."""
    backbone = Backbone(model)
    requests = prepare(model, [prompt], max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None)
    session, steps = _session(model, heads, tree, requests, tau)
    plain, plain_steps = plain_session(model, requests)
    masks = TreeMasks(backbone.config, backbone.dtype, backbone.device)
    topology = Topology.of(tree.to(backbone.device))
    depth = topology.depth
    hidden = torch.zeros(1, backbone.hidden_size, dtype=backbone.dtype, device=backbone.device)
    time = _timer(backbone.device)

    def bare(cache: Any, ids: Tensor, positions: Tensor, mask: Any) -> float:
        seconds, _ = time(
            lambda: model(
                input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            )
        )
        cache.pending = 0
        return seconds

    rounds: list[Round] = []
    lengths: list[int] = []
    while True:
        seconds, step = time(lambda: next(steps, None))
        if step is None or session.sequences.finish_reason[0] is not None:
            return rounds[WARM_UP:], lengths
        length = session.cache.lengths[0]
        if backbone.context is not None and length + tree.max_depth >= backbone.context:
            return rounds[WARM_UP:], lengths
        lengths.append(step.lengths[0])
        of_plain, _ = time(lambda: next(plain_steps))
        at = plain.cache.lengths[0]
        one, here = depth.new_tensor([[prompt[0]]]), depth.new_tensor([[at]])
        rounds.append(
            Round(
                seconds,
                bare(session.cache, one.expand(1, tree.num_nodes), depth + length, masks([length], topology)),
                time(lambda: heads(HeadInputs(hidden), backbone.lm_head, tree.max_depth))[0],
                of_plain,
                bare(plain.cache, one, here, None),
            )
        )


def _session(
    model: Any, heads: MedusaHeads, tree: Tree, requests: Any, tau: float | None
) -> tuple[Session, Iterator[Any]]:
    session = Session(model, requests, slack=tree.num_nodes)
    drafter = HeadsDrafter(heads, session.backbone, tree)
    if tau is not None:
        if not 1 <= tau <= 1 + tree.max_depth:
            raise RequestError(f"--tau is {tau}; this tree reaches 1 to {1 + tree.max_depth}")
        drafter = Scripted(heads, session.backbone, tree)
        drafter.tau = tau
    verifier = Verifier(session.backbone, session.cache, session.sequences)
    return session, session.run(drafter, verifier, resolve_acceptance(None, False), Timer())


def _timer(device: torch.device) -> Callable[[Callable[[], Any]], tuple[float, Any]]:
    clock = stopwatch(device)

    def time(what: Callable[[], Any]) -> tuple[float, Any]:
        start = clock()
        value = what()
        return clock() - start, value

    return time


def summarize(rounds: list[Round], tau: float) -> dict[str, Any]:
    """Lower quartiles, as other work on the machine makes things longer and never shorter, and what follows of them.

    `ratio_of_rounds` is the median of the ratios within the rounds.
    """
    low = Round(*(statistics.quantiles(column, n=4)[0] for column in zip(*map(_values, rounds), strict=True)))
    needed = low.forward + low.heads
    ratios = statistics.quantiles([r.step / (r.forward + r.heads) for r in rounds], n=4)
    return {
        "rounds": len(rounds),
        "tau": tau,
        "ms": {name: 1000 * seconds for name, seconds in asdict(low).items()},
        "ratio": low.step / needed,
        "ratio_of_rounds": {"median": ratios[1], "low": ratios[0], "high": ratios[2]},
        "outside": 1 - needed / low.step,
        "speedup": tau * low.plain / low.step,
        "bound": tau * low.forward_of_one / needed,
    }


def _values(of: Round) -> list[float]:
    return list(asdict(of).values())


def show(outcome: dict[str, Any], title: str) -> None:
    ms = outcome["ms"]
    print(f"{title}, tau {outcome['tau']:.2f}")
    print(
        "prefill of {tokens} tokens: {seconds:.2f} s, {peak_mb:.0f} MB, {cache_mb:.0f} of them cache".format(
            **outcome["prefill"]
        )
    )
    print(
        f"step {ms['step']:.3f} ms, bare forward {ms['forward']:.3f} ms, heads {ms['heads']:.3f} ms: "
        f"ratio {outcome['ratio']:.3f} (median of rounds {outcome['ratio_of_rounds']['median']:.3f}), "
        f"outside {outcome['outside']:.1%}"
    )
    print(
        f"plain step {ms['plain']:.3f} ms, T(1) {ms['forward_of_one']:.3f} ms: speedup {outcome['speedup']:.3f}, "
        f"bound {outcome['bound']:.3f}: {outcome['speedup'] / outcome['bound']:.3f} of it"
    )


if __name__ == "__main__":
    main()
