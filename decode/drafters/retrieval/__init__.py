"""Retrieval-based drafting (REST): a datastore of texts, and the drafter that looks up the text's end in it."""
