"""From what one process recorded to the tables of a run."""
