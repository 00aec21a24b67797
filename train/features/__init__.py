"""Features: the backbone's hidden states on disk, cached for a dataset or recorded from texts in use."""
