"""Calibration: finds and stores the tree that decodes fastest with given heads on this machine (docs/decoding.md)."""
