"""Records of prompts and training text: reading them from files or the Hub, and turning them into token ids."""
