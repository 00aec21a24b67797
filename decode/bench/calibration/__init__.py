"""Calibration: the tree that decodes fastest with given heads on this machine, measured and kept (docs/trees.md)."""
