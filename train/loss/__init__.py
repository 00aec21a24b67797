"""The loss of heads: their labels, their loss weights, and the computation in little memory."""
