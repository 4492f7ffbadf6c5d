"""Diagnosis while a job runs.

The one part where recording, importing and detecting meet outside the commands: what is new is read from the
recorder's own files, and the detectors see small tables of it.

A watch has a state, a small record, and a function from a state and what is known to the next state.
"""
