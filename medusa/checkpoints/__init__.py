"""Heads on disk: formats of ours and of others, read strictly and written atomically."""
