"""Deep windows of one process, on their way into tables."""
