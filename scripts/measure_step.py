"""Measure what a step costs beyond what it cannot do without: one bare forward over the tree, and the heads once.

    python scripts/measure_step.py --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl --threads 1
    python scripts/measure_step.py --random 6x288 --tree mc_sim_7b_63 --threads 1
    python scripts/measure_step.py --random 12x768 --tree topk:4,3 --tau 2.5 --dtype bfloat16 --threads 1

A round is one real step, a bare forward of the same model on the same cache with a mask built beforehand, the heads on
one hidden state, and the same of plain decoding: one step of our loop and one forward over one token. All are timed
within the round, so that a machine that slows down slows all of them:

    ratio    step / (forward + heads)
    outside  the part of the step that is neither forward nor heads
    speedup  tau x plain step / step, with its bound tau x T(1) / (T(n) + T(heads))

`--random` takes a Llama of that many layers and that hidden size, with random weights and V = 32000. Its LM head makes
the model count: after token t it writes t + 1, in every dtype and in every batch. So a scripted drafter can be right
about as many tokens as `--tau` asks for. The heads run all the same; their guesses fill the rest of the tree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decode import prefill as prefill_module
from decode.bench.machine import machine, stopwatch
from decode.cache import TreeCache
from decode.draft import Draft, Frontier
from decode.drafters.heads import HeadsDrafter
from decode.drafters.layouts import resolve_tree
from decode.generation import plain_decoding
from decode.loop import Acceptor, Step, Timer, TreeStepper, run
from decode.masks import TreeMasks
from decode.prefill import prefill
from decode.request import prepare
from decode.sequences import Request
from decode.session import Session
from decode.topology import Topology
from measuring import MeasuringOptions, PeakMemory, open_measured
from medusa import MedusaHeads, RequestError, Tree
from medusa.backbone import Backbone
from medusa.commands.arguments import group, parse
from medusa.commands.models import open_heads
from medusa.commands.options import Models
from medusa.heads.inputs import HeadInputs
from medusa.loading import DTYPES
from medusa.options import count, option
from script_tools import markdown_table, positive, run_script, script_parser
from tiny_models import random_heads

VOCAB, NUM_HEADS = 32000, 5
WARM_UP = 3  # rounds of each prompt that are not counted


class Round(NamedTuple):
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
        path = self.topology.paths[0, -1, 1 : right + 1]  # the last node is one of the deepest
        draft.ids[:, path] = (frontier.root[:, None] + self.topology.depth[0, path]) % self.backbone.vocab_size
        return draft


def layers_and_hidden(text: str) -> tuple[int, int]:
    """Read 6x288, for argparse."""
    layers, _, hidden = text.partition("x")
    return positive(layers), positive(hidden)


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


@torch.inference_mode()
def measure_prefill(model: PreTrainedModel, prompt: list[int]) -> dict[str, float]:
    """Seconds of reading a prompt, and how far the memory in use rose meanwhile (Linux or CUDA), its cache included."""
    backbone = Backbone(model)
    ids, clock = torch.tensor([prompt], device=backbone.device), stopwatch(backbone.device)
    memory, cache = PeakMemory(backbone.device), TreeCache(model.config, 1, capacity=len(prompt))
    start = clock()
    prefill(backbone, cache, ids, [len(prompt)])
    kept = sum(arena.buffer.nbytes for arena in cache.arenas)
    figures = {"tokens": len(prompt), "seconds": clock() - start}
    return figures | {"peak_mb": memory.grown() / 2**20, "cache_mb": kept / 2**20}


@torch.inference_mode()
def measure(
    model: PreTrainedModel, heads: MedusaHeads, tree: Tree, prompt: list[int], new_tokens: int, tau: float | None = None
) -> tuple[list[Round], list[int]]:
    """Rounds of decoding one prompt, and the tokens that each step accepted, the root included."""
    backbone = Backbone(model)
    requests = prepare(model, [prompt], max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    session, steps = start_session(model, heads, tree, requests, tau)
    plain, plain_steps = plain_decoding(model, requests)
    masks = TreeMasks(backbone.config, backbone.dtype, backbone.device)
    topology = Topology.of(tree.to(backbone.device))
    depth = topology.depth
    hidden = torch.zeros(1, backbone.hidden_size, dtype=backbone.dtype, device=backbone.device)
    clock = stopwatch(backbone.device)

    def seconds_of(work: Callable[[], object]) -> float:
        start = clock()
        work()
        return clock() - start

    def bare(cache: TreeCache, ids: Tensor, positions: Tensor, mask: object) -> float:
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "past_key_values": cache}
        seconds = seconds_of(lambda: model(**inputs, use_cache=True))
        cache.pending = 0
        return seconds

    rounds, lengths = [], []
    while True:
        start = clock()
        step = next(steps, None)
        seconds = clock() - start
        length = session.verifier.cache.lengths[0]
        at_end = backbone.context is not None and length + tree.max_depth >= backbone.context
        if step is None or session.sequences.finish_reason[0] is not None or at_end:
            return rounds[WARM_UP:], lengths
        lengths.append(step.lengths[0])
        of_plain = seconds_of(lambda: next(plain_steps))
        one, here = depth.new_tensor([[prompt[0]]]), depth.new_tensor([[plain.verifier.cache.lengths[0]]])
        forward = bare(session.verifier.cache, one.expand(1, tree.num_nodes), depth + length, masks([length], topology))
        of_heads = seconds_of(lambda: heads(HeadInputs(hidden), backbone.lm_head, tree.max_depth))
        rounds.append(Round(seconds, forward, of_heads, of_plain, bare(plain.verifier.cache, one, here, None)))


def start_session(
    model: PreTrainedModel, heads: MedusaHeads, tree: Tree, requests: Sequence[Request], tau: float | None
) -> tuple[Session, Iterator[Step]]:
    """A session and its steps; with `tau`, the drafter is scripted."""
    session = Session(model, requests, slack=tree.num_nodes)
    drafter = HeadsDrafter(heads, session.backbone, tree)
    if tau is not None:
        if not 1 <= tau <= 1 + tree.max_depth:
            raise RequestError(f"--tau is {tau}; this tree reaches 1 to {1 + tree.max_depth}")
        drafter = Scripted(heads, session.backbone, tree)
        drafter.tau = tau
    return session, run(session.sequences, TreeStepper(session, drafter, Acceptor("greedy")), Timer())


def summarize(rounds: Sequence[Round], tau: float) -> dict[str, object]:
    """Lower quartiles, because other work on the machine only makes things longer, and what follows from them.

    `ratio_of_rounds` is the median of the ratios within the rounds.
    """
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


def show(outcome: dict[str, object], title: str) -> None:
    """Print the figures for people."""
    print(f"{title}, tau {outcome['tau']:.2f}")
    figures = {f"{name}, ms": value for name, value in outcome["ms"].items()}
    figures |= {name: outcome[name] for name in ("ratio", "outside", "speedup", "bound")}
    figures |= {f"prefill {name}": value for name, value in outcome["prefill"].items()}
    print(markdown_table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))


@dataclass(frozen=True, kw_only=True)
class StepOptions(MeasuringOptions):
    """Options of this script."""

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
        loaded, prompts, _ = open_measured(options)
        model, heads = loaded.model, open_heads(options.models.heads, loaded)
    tree = resolve_tree(options.models.tree, heads)
    about = {name: getattr(options, name) for name in ("random", "lm_head", "prompt_tokens", "piece")}
    about |= {"nodes": tree.num_nodes, "dtype": str(model.dtype).removeprefix("torch.")}
    read = measure_prefill(model, max(prompts, key=len))
    found = [measure(model, heads, tree, prompt, length, options.tau) for prompt in prompts]
    rounds = [timed for part, _ in found for timed in part]
    outcome = summarize(rounds, statistics.fmean(length for _, lengths in found for length in lengths))
    outcome["prefill"] = read
    show(outcome, f"{len(rounds)} steps of {tree.num_nodes} nodes, {torch.get_num_threads()} thread(s)")
    options.output.write({"machine": asdict(machine()), "settings": about} | outcome)


if __name__ == "__main__":
    run_script(main)
