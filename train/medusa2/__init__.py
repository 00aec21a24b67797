"""Medusa-2: heads and backbone learn together, the backbone through a LoRA adapter (paper, section 2.2.2)."""
