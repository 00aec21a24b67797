"""The decoding step as one region of `torch.compile`, with all shapes fixed."""
