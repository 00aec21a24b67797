"""Heads on disk: this project's format and those of other programs, read strictly and written atomically."""
