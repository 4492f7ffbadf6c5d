"""Edits of the network: they need the topology of a run."""
