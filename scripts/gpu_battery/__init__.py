"""Everything that wants a GPU, in three calls of under nine minutes each, without a network (docs/measuring.md)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # scripts import their neighbours by their bare names
