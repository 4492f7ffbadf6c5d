"""All that is asked of one run, each thing worked out once: for commands, views and notebooks."""
