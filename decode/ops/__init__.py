"""Numeric operations of a decoding step: fast top-k, grouped attention and random draws."""
