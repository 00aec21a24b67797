"""Time a draft of eight nodes on a model with recurrent layers, beside plain steps and the stock chunk form.

    python scripts/state_speed.py
    python scripts/state_speed.py --dtype bfloat16 --nodes 16

The model has the configuration of Qwen3.5-0.8B and random weights. Times are CPU times of one thread, medians of rounds
in which the ways take turns. "Ours" includes the commit of the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as file

from decode.bench.machine import machine
from decode.draft import Draft
from decode.layers import functions
from decode.reader import ReaderFactory
from decode.topology import Topology, chain
from medusa import Tree
from medusa.backbone import Backbone
from medusa.errors import RequestError
from script_tools import markdown_table, run_script, script_parser

CONFIG = Qwen3_5TextConfig(
    vocab_size=248_320,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    tie_word_embeddings=True,
)
PROMPT = 64  # tokens
PATH = 3  # accepted nodes


def tree_of(nodes: int) -> Topology:
    """A tree of so many nodes, of which no two siblings are alone."""
    return Topology.of(
        Tree.from_paths(
            [[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 0], [2], [3], *([n] for n in range(4, nodes))][: nodes - 1]
        )
    )


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median milliseconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first one warms up
        for name, way in ways.items():
            start = thread_time()
            way()
            if turn:
                times[name].append(1e3 * (thread_time() - start))
    return {name: median(found) for name, found in times.items()}


def whole_steps(dtype: torch.dtype, nodes: int, rounds: int) -> dict[str, float]:
    """The times of whole forwards after a prompt: stock ones of one token and of `nodes`, and ours."""
    with torch.device("meta"):
        model = file.Qwen3_5ForCausalLM(CONFIG)
    model = model.to_empty(device="cpu").to(dtype).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    model.tie_weights()
    model.model.rotary_emb = file.Qwen3_5TextRotaryEmbedding(CONFIG)
    prompt, ids = torch.randint(1000, (1, PROMPT)), torch.randint(1000, (1, nodes))
    caches = {count: DynamicCache(config=CONFIG) for count in (1, nodes)}
    for cache in caches.values():
        model(input_ids=prompt, past_key_values=cache)
    reader, topology = ReaderFactory().create(Backbone(model), 1, PROMPT + 64 * rounds), tree_of(nodes)
    reader.prefill(prompt, [PROMPT])
    path = [node for node in topology.paths[0, -1].tolist() if node >= 0][:PATH]

    def ours(draft: Draft, line: list[int]) -> None:
        reader(draft)
        reader.cache.keep([len(line)], [line])

    alone = Draft(ids[:, :1], chain(1, ids.device))
    return in_turns(
        {
            "a stock step of one token": lambda: model(input_ids=ids[:, :1], past_key_values=caches[1]),
            f"a stock forward of {nodes} tokens": lambda: model(input_ids=ids, past_key_values=caches[nodes]),
            "our step of one node": lambda: ours(alone, [0]),
            f"our step of {nodes} nodes": lambda: ours(Draft(ids, topology), path),
        },
        rounds,
    )


def one_layer(dtype: torch.dtype, nodes: int, rounds: int) -> dict[str, float]:
    """The times of the gated delta rule of one layer: the stock forms, and ours with its commit."""
    heads, size = CONFIG.linear_num_value_heads, CONFIG.linear_key_head_dim
    query, key, value = (torch.randn(1, nodes, heads, size).to(dtype) for _ in range(3))
    decay, beta = -F.softplus(torch.randn(1, nodes, heads)), torch.rand(1, nodes, heads)
    state, topology = torch.randn(1, heads, size, size), tree_of(nodes)
    last = topology.paths[0, -1].max()[None]
    on_path = topology.ancestors[:, int(last)]

    def stock(function: Callable[..., tuple[Tensor, Tensor]], part: slice) -> None:
        read = (each[:, part] for each in (query, key, value))
        kwargs = {"g": decay[:, part], "beta": beta[:, part], "initial_state": state, "output_final_state": True}
        function(*read, **kwargs, use_qk_l2norm_in_kernel=True)

    def ours() -> None:
        _, update = functions.gated_delta(query, key, value, decay, beta, state, topology.ancestors, norm=True)
        update.apply(state, last, on_path)

    def by_steps() -> None:
        for node in range(nodes):
            stock(file.torch_recurrent_gated_delta_rule, slice(node, node + 1))

    return in_turns(
        {
            f"{nodes} stock steps": by_steps,
            "the stock chunk form": lambda: stock(file.torch_chunk_gated_delta_rule, slice(None)),
            "our tree form and commit": ours,
        },
        rounds,
    )


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="of the draft, the root included")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    args = parser.parse_args(argv)
    if min(args.nodes, args.rounds) < 1:
        raise RequestError("--nodes and --rounds must be at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    print(f"{machine().processor}, one thread, {args.dtype}\n")
    rows = one_layer(dtype, args.nodes, 5 * args.rounds) | whole_steps(dtype, args.nodes, args.rounds)
    print(markdown_table(["what", "ms"], [[name, f"{time:.2f}"] for name, time in rows.items()]))


if __name__ == "__main__":
    run_script(main)
