"""Measurements of decoding: speedup, calibration of trees, and tests that a drafter does not change the text."""
