"""Graphs of runs that are too large to be held at once: each rank is built and condensed by itself.

Everything that goes from a process to another can be pickled. The order of calls:
"""
