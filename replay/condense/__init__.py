"""A graph with only the nodes at which ranks wait for each other; it replays exactly as the whole graph."""
