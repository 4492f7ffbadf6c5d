"""Probes of the process itself: its start, requests to it, the stacks of its threads, and its end."""
