"""The network of a job as flows see it."""
