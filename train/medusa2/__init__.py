"""Medusa-2: heads are trained together with the backbone, which learns a LoRA adapter (paper, section 2.2.2)."""
