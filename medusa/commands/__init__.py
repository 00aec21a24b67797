"""The sub-commands of `medusa`, one module each. No other modules use `medusa`, `train` and `decode` together."""
