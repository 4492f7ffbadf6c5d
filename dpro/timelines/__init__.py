"""What is drawn of a run on lanes: spans, the critical path and counters, as rows."""
