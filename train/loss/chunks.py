"""The number of positions whose logits are computed at once, which bounds memory in training and evaluation."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Size of a chunk's float32 logits, of all heads together: they fit into a CPU core's cache, or keep a GPU busy."""
MIN_ROWS = 24  # with fewer positions, reading the LM head takes longer than multiplying by it, for any V
MIN_ROWS_OWN = 40  # with own LM heads, every chunk also reads and writes the gradients of their weights


def chunk_rows(num_heads: int, vocab_size: int, device: str, minimum: int = MIN_ROWS) -> int:
    """Number of positions (at least `minimum`) whose logits of all heads form a chunk on `device`, "cpu" or "cuda"."""
    budget = CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"])
    return max(minimum, budget // (4 * num_heads * vocab_size))
