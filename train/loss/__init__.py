"""The loss of heads: what each is taught, how much it counts, and how it is computed in little memory."""
