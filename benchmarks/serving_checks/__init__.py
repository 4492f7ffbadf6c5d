"""Checks of `benchmarks/serving.py`: request logs, tables of servers under load, controlled pairs of runs."""
