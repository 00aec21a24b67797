"""The heads' modules: one file for each kind, and the parts that kinds share."""
