"""Experiments that test whether a drafter changes the decoded text: `medusa verify` (docs/decoding.md)."""
