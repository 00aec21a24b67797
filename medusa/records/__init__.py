"""Prompts and training text: where they are read from, what one record holds, and the ids of a prompt."""
