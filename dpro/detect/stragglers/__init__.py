"""Ranks that the others wait for: by replay of deep windows, and by calls alone."""
