"""Graphs of runs that are too large to be held at once: each rank is built and condensed by itself.

Everything that goes from a process to another can be pickled. Ranks are matched (`matched.py`); each is
built, their lags are pooled, and each is condensed (`rank.py`); what is left is joined (`joined.py`).
"""
