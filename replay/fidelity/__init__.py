"""How far a replay is from the trace, what it rests on, and how far to trust what it predicts."""
