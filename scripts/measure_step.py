"""Compare a decoding step with its lower bound: one bare forward over the tree, and one pass through the heads.

    python scripts/measure_step.py --backbone B --heads H --prompts P --threads 1
    python scripts/measure_step.py --random 6x288 --tree mc_sim_7b_63 --threads 1
    python scripts/measure_step.py --random 12x768 --tree topk:4,3 --tau 2.5 --dtype bfloat16 --threads 1

A round times one step of our loop, a bare forward of the same model on the same cache with a prepared mask, the heads
on one hidden state, and one step of plain decoding with its bare forward over one token. Everything is timed within the
round, so a slower machine slows all parts:

    ratio    step / (forward + heads)
    outside  share of the step that is neither forward nor heads
    speedup  tau x plain step / step; its bound is tau x T(1) / (T(n) + T(heads))

`--random` makes a Llama of that many layers and that hidden size, with random weights and a vocabulary of 32000. It
always predicts token t + 1 after token t, so a scripted drafter can reach the tau of `--tau`. The heads still run, and
their guesses fill the rest of the tree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from decode.prefill import prefill
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decode import prefill as prefill_module
from decode.bench.machine import machine, stopwatch
from decode.cache import TreeCache
from decode.draft import Draft, Frontier
from decode.drafters.heads import HeadsDrafter
from decode.drafters.layouts import resolve_tree
from decode.loop import Acceptor, Timer, TreeStepper, advance
from decode.masks import TreeMasks
from decode.ops.fast_linear import fast_linear
from decode.ops.grouped_attention import grouped, sharing
from decode.request import prepare
from decode.session import Session
from decode.texts import stepper_for
from decode.topology import Topology
from measuring import MeasuringOptions, open_measured, peak_meter, show
from medusa import MedusaHeads, RequestError, Tree
from medusa.arguments import parse
from medusa.backbone import Backbone
from medusa.commands.models import open_heads
from medusa.commands.options import Models
from medusa.heads.inputs import HeadInputs
from medusa.loading import DTYPES
from medusa.options import count, group, option
from medusa.tree_support import Mask
from script_tools import markdown_table, run_script, script_parser
from tiny_models import random_heads

VOCAB, NUM_HEADS = 32000, 5
WARM_UP = 3  # rounds of each prompt that are not counted


class Round(NamedTuple):
    """Times of the parts of a round, in seconds."""

    step: float
    forward: float
    heads: float
    plain: float
    forward_of_one: float


class Scripted(HeadsDrafter):
    """Drafter whose draft is that of the heads, with the correct tokens root + 1, root + 2, ... on its first path.

    So many of them are correct that steps accept `tau` tokens on average."""

    tau: float
    steps = 0

    def propose(self, frontier: Frontier) -> Draft:
        draft = super().propose(frontier)
        right = int((self.steps + 1) * (self.tau - 1)) - int(self.steps * (self.tau - 1))
        self.steps += 1
        path = self.topology.paths[0, -1, 1 : right + 1]  # the last node is one of the deepest
        draft.ids[:, path] = (frontier.root[:, None] + self.topology.depth[0, path]) % self.backbone.vocab_size
        return draft


def layers_and_hidden(text: str) -> tuple[int, int]:
    """Read layers and hidden size from text such as 6x288; the `type` of an argparse argument."""
    layers, hidden = map(int, text.split("x"))
    if min(layers, hidden) < 1:
        raise ValueError(text)
    return layers, hidden


def counting_llama(layers: int, hidden: int) -> LlamaForCausalLM:
    """Make a random Llama that predicts t + 1 after t: row t + 1 of its LM head is the embedding of t."""
    sizes = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3 // 32 * 32, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": max(1, hidden // 64), "head_dim": 64, "max_position_embeddings": 1 << 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, bos_token_id=None, eos_token_id=None)).eval()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        nn.init.normal_(embedding, std=4)  # so far above what the layers add that rounding decides nothing
        model.lm_head.weight.copy_(embedding.roll(1, 0) / 4 / hidden**0.5)
    return model


@torch.inference_mode()
def measure_prefill(model: PreTrainedModel, prompt: list[int]) -> dict[str, float]:
    """Measure the prefill of a prompt: seconds, peak memory with the cache (Linux or CUDA), and the cache's size."""
    backbone = Backbone(model)
    ids, clock = torch.tensor([prompt], device=backbone.device), stopwatch(backbone.device)
    peak, cache = peak_meter(backbone.device), TreeCache(model.config, 1, capacity=len(prompt))
    start = clock()
    prefill(backbone, cache, ids, [len(prompt)])
    kept = sum(arena.buffer.nbytes for arena in cache.arenas)
    figures = {"tokens": len(prompt), "seconds": clock() - start}
    return figures | {"peak_mb": peak() / 2**20, "cache_mb": kept / 2**20}


@torch.inference_mode()
def measure(
    model: PreTrainedModel, heads: MedusaHeads, tree: Tree, prompt: list[int], new_tokens: int, tau: float | None = None
) -> tuple[list[Round], list[int]]:
    """Decode one prompt; return its rounds, and the number of tokens that each step accepted, with the root."""
    backbone = Backbone(model)
    requests = prepare(model, [prompt], max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    session = Session(model, requests, slack=tree.num_nodes)
    drafter = (HeadsDrafter if tau is None else Scripted)(heads, session.backbone, tree)
    drafter.tau = tau
    stepper = TreeStepper(session, drafter, Acceptor("greedy"))
    plain = stepper_for(model, None, requests, Acceptor("greedy"))
    masks = TreeMasks(backbone.config, backbone.dtype, backbone.device)
    topology = Topology.of(tree.to(backbone.device))
    hidden = torch.zeros(1, backbone.hidden_size, dtype=backbone.dtype, device=backbone.device)
    clock = stopwatch(backbone.device)

    def seconds_of(work: Callable[[], object]) -> float:
        start = clock()
        work()
        return clock() - start

    def bare(cache: TreeCache, ids: Tensor, positions: Tensor, mask: Mask | None) -> float:
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "past_key_values": cache}
        with grouped(backbone.config), sharing(mask), fast_linear(backbone.head_weight, ids.numel()):
            seconds = seconds_of(lambda: model(**inputs, use_cache=True))
        cache.pending = 0
        return seconds

    rounds, lengths = [], []
    rows, roots = stepper.start()
    plain_rows, plain_roots = plain.start()
    while True:
        start = clock()
        step, rows, roots = advance(session.sequences, stepper, rows, roots, Timer())
        seconds = clock() - start
        length = session.verifier.cache.lengths[0]
        at_end = backbone.context is not None and length + tree.max_depth >= backbone.context
        if not rows or at_end:
            return rounds[WARM_UP:], lengths
        lengths.append(step.lengths[0])
        start = clock()
        _, plain_rows, plain_roots = advance(plain.session.sequences, plain, plain_rows, plain_roots, Timer())
        of_plain = clock() - start
        plain_cache = plain.session.verifier.cache
        one, here = (torch.tensor([[n]], device=backbone.device) for n in (prompt[0], plain_cache.lengths[0]))
        nodes = one.expand(1, tree.num_nodes)
        forward = bare(session.verifier.cache, nodes, topology.depth + length, masks([length], topology))
        with fast_linear(backbone.head_weight, 2):
            of_heads = seconds_of(lambda: heads(HeadInputs(hidden), backbone.lm_head, tree.max_depth))
        rounds.append(Round(seconds, forward, of_heads, of_plain, bare(plain_cache, one, here, None)))


def summarize(rounds: Sequence[Round], tau: float) -> dict[str, object]:
    """Compute the figures from the lower quartile of each part's times, since other processes only slow a part down."""
    low = Round(*(statistics.quantiles(column, n=4)[0] for column in zip(*rounds, strict=True)))
    needed = low.forward + low.heads
    ratios = statistics.quantiles([r.step / (r.forward + r.heads) for r in rounds], n=4)
    return {
        "rounds": len(rounds),
        "tau": tau,
        "ms": {name: 1000 * seconds for name, seconds in low._asdict().items()},
        "ratio": low.step / needed,
        "ratio_of_rounds": {"median": ratios[1], "low": ratios[0], "high": ratios[2]},
        "outside": 1 - needed / low.step,
        "speedup": tau * low.plain / low.step,
        "bound": tau * low.forward_of_one / needed,
    }


class StepOptions(MeasuringOptions):
    """Options of measure_step.py."""

    models: Models = group(Models, "models", without=("drafter",), backbone="")
    rounds: int = 1
    random: tuple[int, int] | None = option(
        None, "measure a random Llama of L layers and hidden size H instead", metavar="LxH", type=layers_and_hidden
    )
    tau: float | None = option(None, "with --random: accept so many tokens a step (default: all)", type=float)
    prompt_tokens: int = count(256, "with --random: measure after N prompt tokens")
    piece: int | None = count(None, "read N tokens of a prompt at once")
    lm_head: str = option("own", "with --random: the LM heads of the heads", choices=["own", "shared"])


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(StepOptions, script_parser(__doc__), argv)
    load, length = options.load, options.settings.max_new_tokens
    if options.piece:
        prefill_module.TOKENS = prefill_module.LEAST = options.piece
    if options.random:
        options.runtime.prepare()
        model = counting_llama(*options.random).to(load.device or "cpu", DTYPES[load.dtype or "float32"])
        heads = random_heads(model, NUM_HEADS, std=0.02, lm_head=options.lm_head)
        prompts = [torch.randint(VOCAB, (options.prompt_tokens,)).tolist()]
    elif not (options.models.backbone and options.models.heads):
        raise RequestError("nothing to measure: give --backbone B --heads H --prompts P, or --random LxH")
    else:
        opened = open_measured(options)
        model, prompts = opened.loaded.model, opened.prompts
        heads = open_heads(options.models.heads, opened.loaded)
        if heads.follows_path:
            raise RequestError(f"these heads are of kind {heads.config.kind}; take independent ones, such as medusa")
    tree, tau = resolve_tree(options.models.tree, heads), options.tau
    if tau is not None and not 1 <= tau <= 1 + tree.max_depth:
        raise RequestError(f"--tau is {tau}; this tree allows 1 to {1 + tree.max_depth}")
    about = {name: getattr(options, name) for name in ("random", "lm_head", "prompt_tokens", "piece")}
    about |= {"nodes": tree.num_nodes, "dtype": str(model.dtype).removeprefix("torch.")}
    read = measure_prefill(model, max(prompts, key=len))
    found = [measure(model, heads, tree, prompt, length, tau) for prompt in prompts]
    rounds = [timed for part, _ in found for timed in part]
    outcome = summarize(rounds, statistics.fmean(length for _, lengths in found for length in lengths))
    figures = {f"{name}, ms": value for name, value in outcome["ms"].items()}
    figures |= {name: outcome[name] for name in ("ratio", "outside", "speedup", "bound")}
    figures |= {f"prefill {name}": value for name, value in read.items()}
    title = f"{len(rounds)} steps of {tree.num_nodes} nodes, {torch.get_num_threads()} thread(s)"
    lines = [["tau", f"{outcome['tau']:.2f}"], *([name, f"{value:.3f}"] for name, value in figures.items())]
    show(options, title, markdown_table(["figure", "value"], lines))
    options.output.write({"machine": asdict(machine()), "settings": about, "prefill": read} | outcome)


if __name__ == "__main__":
    run_script(main)
