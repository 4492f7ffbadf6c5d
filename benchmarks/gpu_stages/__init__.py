"""Checks that need a GPU: the stages of `benchmarks/gpu.py`, and the jobs that they run."""
