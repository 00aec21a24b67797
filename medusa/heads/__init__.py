"""What heads are made of: one file per kind, and what the kinds share."""
