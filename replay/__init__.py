"""The global dataflow graph: built from the tables of a run, replayed, assessed and changed."""
