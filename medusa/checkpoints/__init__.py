"""Heads on disk: the published tensor names, read strictly and written atomically."""
