"""Measurements: speedup, calibration of trees, and evidence that the text does not change."""
