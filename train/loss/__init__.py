"""The loss of heads: their targets, the weights of their errors, and its computation in little memory."""
