"""Formats of heads that other programs load: one file for each program, and one line in `medusa.export.formats`."""
