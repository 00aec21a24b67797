"""The audit of a server: does it write the text of a model? `medusa verify --server` (docs/decoding.md)."""
