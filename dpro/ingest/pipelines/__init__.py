"""Traces of pipeline-parallel jobs that hold operations instead of kernels.

oplevel         Parquet tables with one row per operation
pp_timeline     JSON timelines of forward and backward per micro-batch
"""
