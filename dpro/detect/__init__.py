"""Detectors: tables and graph in, findings out; no printing, no plotting."""
