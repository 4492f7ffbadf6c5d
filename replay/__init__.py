"""The global dataflow graph: built from the tables of a run, replayed, judged, and changed."""
