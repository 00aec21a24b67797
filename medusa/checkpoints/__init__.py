"""Heads on disk: strict reading and atomic writing of files in this project's format and in other programs' formats."""
