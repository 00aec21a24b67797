"""Evidence that decoding with a drafter changes nothing: the experiments of `medusa verify` (docs/exactness.md)."""
