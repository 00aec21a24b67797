"""The number of positions whose logits are computed at once, which bounds memory in training and evaluation."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Size of a chunk's float32 logits, of all heads together: they fit into a CPU core's cache, or keep a GPU busy."""
MIN_ROWS = 24  # with fewer positions, reading the LM head takes longer than multiplying by it, for any V
MIN_ROWS_OWN = {"cpu": 40, "cuda": 1024}
"""With own LM heads, every chunk also reads and writes the gradients of their weights, which a GPU does as fast as the
products of some hundred positions."""
MOST_BYTES_OWN = 2 << 30  # of the logits of a chunk; for large vocabularies, this limit comes before `MIN_ROWS_OWN`


def chunk_rows(num_heads: int, vocab_size: int, device: str, own: bool = False) -> int:
    """Number of positions whose logits of all heads form a chunk on `device`, "cpu" or "cuda".

    `own`: each head has its own LM head, whose gradient is computed."""
    kind = device if device in CHUNK_BYTES else "cuda"
    position = 4 * num_heads * vocab_size
    rows = max(MIN_ROWS, CHUNK_BYTES[kind] // position)
    if own:
        rows = max(rows, min(MIN_ROWS_OWN[kind], max(MIN_ROWS, MOST_BYTES_OWN // position)))
    return rows
