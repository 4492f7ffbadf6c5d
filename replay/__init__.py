"""The global dataflow graph: align, build, replay, explain, and change it."""
