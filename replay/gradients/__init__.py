"""Data-parallel gradients: when each is ready, in which reduction it goes, where it is needed next."""
