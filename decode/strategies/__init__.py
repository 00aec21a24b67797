"""Other ways to choose the text: contrastive decoding and best-first beam search."""
