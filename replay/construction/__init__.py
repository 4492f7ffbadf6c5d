"""From the tables of a run to one global graph: rank by rank, then joined by their collectives."""
