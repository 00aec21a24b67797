"""Medusa-2: heads learn alone at first, then together with a LoRA adapter in the backbone (paper, section 2.2.2)."""
