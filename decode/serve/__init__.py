"""Serving: an HTTP server with the OpenAI API, and a chat page for the browser."""
