"""Probe of deep windows: every operator, kernel and launch of a few steps, the same on every rank."""
