"""Rows for viewers of timelines: lanes, spans, the critical path and counters."""
