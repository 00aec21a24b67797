"""Records of prompts and training text: their sources, their forms, and the ids of a prompt."""
