"""Traces of pipeline-parallel jobs that hold operations instead of kernels."""
