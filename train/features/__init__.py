"""Features: the backbone's hidden states on disk, computed for a dataset or recorded while texts are generated."""
