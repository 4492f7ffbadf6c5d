"""Construction of the global graph: rank by rank from the tables of a run, then joined by collectives."""
