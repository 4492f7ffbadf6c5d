"""A whole recording, from all its processes."""
