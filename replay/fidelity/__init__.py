"""Fidelity of a replay: its distance from the trace, its basis, and how far to trust its predictions."""
