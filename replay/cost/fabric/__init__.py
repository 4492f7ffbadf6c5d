"""Flow-level model of a job's network."""
