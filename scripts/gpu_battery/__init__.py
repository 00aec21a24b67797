"""Figures that need a GPU, measured in one call of ten minutes (docs/gpu.md)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # scripts import each other by their bare names
