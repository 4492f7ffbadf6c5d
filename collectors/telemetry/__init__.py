"""Telemetry of the node beside the job: GPUs, network, CPUs, and the recorded processes seen from outside.

A process beside the sidecar asks once a second and appends what has changed to a compact file; at the end the
file becomes rows of `counters`. Nothing here runs inside the job, and nothing but `tables` imports polars.
"""
