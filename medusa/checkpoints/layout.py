"""The files of a folder of heads, and the shipped one."""

from __future__ import annotations

from medusa.files import ASSETS

CONFIG, PROVENANCE = "config.json", "provenance.json"
WEIGHTS = "medusa_lm_head.safetensors"
LEGACY_WEIGHTS = "medusa_lm_head.pt"
"""FasterDecoding's first format."""
HYDRA_WEIGHTS = "hydra_lm_head.pt"
"""The original Hydra's."""
HEADS_FILES = (WEIGHTS, LEGACY_WEIGHTS, HYDRA_WEIGHTS)
DEMO = ASSETS / "heads"
