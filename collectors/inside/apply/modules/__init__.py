"""Changes to the modules that the training loop calls: compiled, under autocast, recomputed, prefetched."""
