"""Probes of the process itself: how it starts, what is asked of it, where its threads are, and how it
ends."""
