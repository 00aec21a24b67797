"""How many positions to compute at once, with V logits each: the bound on memory in training and evaluation."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Float32 logits of a chunk, all heads together: a core's share of the cache, or what a GPU needs to be busy."""
MIN_ROWS = 24  # for any V: with fewer, reading the LM head costs more than multiplying by it
MIN_ROWS_OWN = 40  # every chunk also reads and writes the gradient of each own LM head


def chunk_rows(num_heads: int, vocab_size: int, device: str, minimum: int = MIN_ROWS) -> int:
    """Positions in a chunk, for the logits of `num_heads` heads at each position."""
    budget = CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"])
    return max(minimum, budget // (4 * num_heads * vocab_size))
