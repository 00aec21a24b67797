"""Features, the backbone's hidden states on disk: their files, a cache of them, and a recorder of texts in use."""
