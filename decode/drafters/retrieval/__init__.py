"""Retrieval (REST): drafts from a datastore of other texts."""
