"""Detectors of ranks that others wait for: by replay of deep windows, and by calls alone."""
