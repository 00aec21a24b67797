"""The training data: records become examples, examples become rows of one length, and rows become datasets."""
