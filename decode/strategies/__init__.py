"""Decoding strategies other than greedy decoding and sampling: contrastive decoding and best-first beam search."""
