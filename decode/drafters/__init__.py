"""The ways to guess ahead, one file each."""
