"""Numeric kernels: the same numbers as PyTorch gives, faster."""
