"""One module per sub-command: `add_arguments(parser)` and `run(args)`. They compose the packages; none is imported."""
