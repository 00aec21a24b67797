"""The sizes of everything that the battery measures: in full on a GPU, and as toys to rehearse on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

Shape = dict[str, int]
Options = dict[str, object]


@dataclass(frozen=True)
class Scale:
    """Sizes of everything."""

    curve_shape: Shape
    """A Llama with random weights, whose steps are timed."""
    kv_heads: dict[str, int]
    """KV heads of the models that are timed: one without and one with grouped queries."""
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    nodes: tuple[int, ...]
    """Sizes of trees, the most important one first; 1 is plain decoding."""
    steps: int
    """Timed steps for each point of a curve."""
    losses: Shape
    loss_positions: tuple[int, ...]
    backbone: str
    """Options of make_backbone."""
    source_bytes: int
    """Python sources to train the backbone on."""
    texts: int
    """Texts that the backbone writes for its heads."""
    first_heads: Options
    """Training of the first heads, which most stages use."""
    other_heads: Options
    prompt_tokens: int
    prompts: int
    new_tokens: int
    rounds: int
    draws: int
    trees: dict[str, str] = field(default_factory=lambda: {"64 nodes": "mc_sim_7b_63", "16 nodes": "topk:5,2"})


FULL = Scale(
    curve_shape={
        "hidden_size": 4096,  # layers as in Llama-2-7B, fewer of them: two billion parameters
        "intermediate_size": 11_008,
        "num_hidden_layers": 10,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
    },
    kv_heads={"GQA": 8, "MHA": 32},
    contexts=(2000, 500, 8000),
    batches=(1, 4, 16),
    nodes=(64, 1, 16),
    steps=24,
    losses={"heads": 4, "hidden_size": 4096, "vocab_size": 128_256},
    loss_positions=(2048, 8192),
    backbone="--hidden-size 1024 --layers 12 --heads 16 --kv-heads 8 --intermediate-size 2816 --vocab-size 16384 "
    "--context 2048 --row-length 512 --batch-size 48 --minutes 2.2",
    source_bytes=40_000_000,
    texts=2000,
    first_heads={"max_minutes": 0.75, "per_device_train_batch_size": 16},
    other_heads={"max_minutes": 0.3, "per_device_train_batch_size": 16},
    prompt_tokens=64,
    prompts=6,
    new_tokens=128,
    rounds=2,
    draws=200_000,
)
TOY = Scale(
    curve_shape={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    },
    kv_heads={"GQA": 2, "MHA": 4},
    contexts=(20,),
    batches=(1, 2),
    nodes=(8, 1),
    steps=16,
    losses={"heads": 2, "hidden_size": 32, "vocab_size": 1000},
    loss_positions=(64,),
    backbone="--hidden-size 32 --layers 2 --heads 2 --kv-heads 1 --intermediate-size 64 --vocab-size 400 "
    "--context 128 --row-length 64 --batch-size 8 --steps 30 --threads 1",
    source_bytes=200_000,
    texts=12,
    first_heads={"max_steps": 10, "per_device_train_batch_size": 4},
    other_heads={"max_steps": 2, "per_device_train_batch_size": 4},
    prompt_tokens=12,
    prompts=2,
    new_tokens=12,
    rounds=1,
    draws=300,
    trees={"7 nodes": "topk:2,2"},
)
