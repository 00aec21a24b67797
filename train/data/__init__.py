"""The training data: records become examples, rows of one length, and datasets."""
