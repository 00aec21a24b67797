"""Serving: an OpenAI-compatible server, and chat in the browser."""
